"""Low-rank adapters beside frozen layers (LoRA: Hu et al. 2021, arXiv 2106.09685, section 4.1).

    linear       y = W x + b + scale * B (A x)         A (rank, in), B (out, rank)
    convolution  y = W * x + b + scale * B (A * x)     A and B 1x1, A with the convolution's stride

    attention    each of its four projections as a linear layer

The convolution's pair sees the middle of each window, so its input is cropped or padded to that. ``down`` (A) begins
random, ``up`` (B) zero: the first Version says what the frozen module says.
"""

import math
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from fanin.edge.export.app import Adapters
from fanin.edge.export.modules.places import replace_modules
from fanin.protos.errors import UnsupportedModel

ARGUMENTS: Final = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
"""What attention is given after query, key and value, in this order."""


class AdaptedLinear(nn.Module):
    """A frozen linear layer and its adapter."""

    def __init__(self, layer: nn.Linear, adapters: Adapters) -> None:
        super().__init__()
        self.frozen = layer
        rank = min(adapters.rank, layer.in_features, layer.out_features)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self._scale = adapters.scale

    @property
    def weight(self) -> Tensor:
        """Frozen and adapted in one (out, in), for those who read a linear layer and do not call it."""
        adapted: Tensor = self.up.weight @ self.down.weight
        return self.frozen.weight + self._scale * adapted

    @property
    def bias(self) -> Tensor | None:
        """The frozen layer's (out,)."""
        return self.frozen.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        frozen: Tensor = self.frozen(x)
        adapted: Tensor = self.up(self.down(x))
        return frozen + self._scale * adapted


class AdaptedConv2d(nn.Module):
    """A frozen convolution and its adapter."""

    def __init__(self, layer: nn.Conv2d, adapters: Adapters, name: str) -> None:
        super().__init__()
        self.frozen = layer
        rank = min(adapters.rank, layer.in_channels, layer.out_channels)
        self.down = nn.Conv2d(layer.in_channels, rank, 1, stride=layer.stride, bias=False)  # type: ignore[arg-type]
        self.up = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
        nn.init.zeros_(self.up.weight)
        self._scale = adapters.scale
        self._margins = _margins(layer, name)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, out, H', W')."""
        frozen: Tensor = self.frozen(x)
        seen = functional.pad(x, self._margins) if any(self._margins) else x
        adapted: Tensor = self.up(self.down(seen))
        return frozen + self._scale * adapted


class _LowRank(nn.Module):
    """B (A x) by itself."""

    def __init__(self, sizes: tuple[int, int], rank: int) -> None:
        super().__init__()
        rank = min(rank, *sizes)
        self.down = nn.Linear(sizes[0], rank, bias=False)
        self.up = nn.Linear(rank, sizes[1], bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        found: Tensor = self.up(self.down(x))
        return found


class AdaptedAttention(nn.Module):
    """Frozen multi-head attention, and an adapter for each of its projections; called as torch's is.

    The projections are called here, so that their frozen weights are int8 products still: torch's own forward would
    have to be given the sum of weight and adapter.
    """

    def __init__(self, layer: nn.MultiheadAttention, adapters: Adapters) -> None:
        super().__init__()
        self.frozen = layer
        size, rank = layer.embed_dim, adapters.rank
        self.query = _LowRank((size, size), rank)
        self.key = _LowRank((layer.kdim or size, size), rank)
        self.value = _LowRank((layer.vdim or size, size), rank)
        self.out = _LowRank((size, size), rank)
        self._scale = adapters.scale
        self._qkv_same_embed_dim = False  # torch's encoder layer is kept from reading the frozen weights by this

    @property
    def batch_first(self) -> bool:
        """Whether (B, T, E) is taken and not (T, B, E)."""
        return bool(self.frozen.batch_first)

    @property
    def num_heads(self) -> int:
        """How many heads there are."""
        return int(self.frozen.num_heads)

    @property
    def in_proj_bias(self) -> Tensor | None:
        """The frozen layer's, of query, key and value in one (3 E,)."""
        return self.frozen._parameters["in_proj_bias"]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object
    ) -> tuple[Tensor, Tensor | None]:
        """(what was attended to, the weights or None): ``torch.nn.MultiheadAttention.forward``, whose arguments these
        are; that a mask is causal is seen from the mask."""
        asked = dict(zip(ARGUMENTS, rest, strict=False)) | options
        is_batched = query.dim() == 3
        given = [query, key, value] if is_batched else [part.unsqueeze(0) for part in (query, key, value)]
        turned = is_batched and not self.batch_first
        rows = [part.transpose(0, 1) if turned else part for part in given]
        if query is key and key is value and self.frozen._qkv_same_embed_dim:
            # One product of all three: a slice of a weight is none that the int8 graph knows.
            plain = functional.linear(rows[0], self.frozen.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        else:
            plain = tuple(self._projected(index, part) for index, part in enumerate(rows))
        pairs = zip(plain, rows, (self.query, self.key, self.value), strict=True)
        q, k, v = (self._heads(found + self._scale * adapter(part)) for found, part, adapter in pairs)
        mask = _additive_mask(asked.get("attn_mask"), asked.get("key_padding_mask"), q, k)
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        joined = attended.transpose(1, 2).flatten(2)
        out = self.frozen.out_proj
        said = functional.linear(joined, out.weight, out.bias) + self._scale * self.out(joined)
        said = said.transpose(0, 1) if turned else said
        weights = None
        if asked.get("need_weights", True):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = weights.mean(dim=1) if asked.get("average_attn_weights", True) else weights
            weights = weights if is_batched else weights.squeeze(0)
        return said if is_batched else said.squeeze(0), weights

    def _projected(self, index: int, x: Tensor) -> Tensor:
        """Query (0), key (1) or value (2) of x (B, T, in), by the frozen weight alone (B, T, E)."""
        layer, bias = self.frozen, self.in_proj_bias
        if layer._qkv_same_embed_dim:
            weight = layer.in_proj_weight.chunk(3)[index]
        else:
            weight = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)[index]
        return functional.linear(x, weight, None if bias is None else bias.chunk(3)[index])

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, E) to (B, heads, T, E / heads)."""
        return x.reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2)


def _additive_mask(attn_mask: object, padding: object, query: Tensor, key: Tensor) -> Tensor | None:
    """Both masks in one, to be added to scores (B, heads, T, S); a bool is True where nothing may be attended to."""
    found = None
    if isinstance(attn_mask, Tensor):
        attn_mask = attn_mask.reshape(*query.shape[:2], *attn_mask.shape[1:]) if attn_mask.dim() == 3 else attn_mask
        found = _additive(attn_mask)
    if isinstance(padding, Tensor):
        rows = _additive(padding).reshape(-1, 1, 1, key.size(-2))
        found = rows if found is None else found + rows
    return found


def _additive(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape).masked_fill(mask, -math.inf)


def _margins(layer: nn.Conv2d, name: str) -> list[int]:
    """What to pad (or to crop, below 0) so that a 1x1 window stands in the middle of each of the layer's windows."""
    found: list[int] = []
    for dim in (1, 0):
        reach = layer.dilation[dim] * (layer.kernel_size[dim] - 1)
        named = {"same": reach, "valid": 0}
        sides = named[layer.padding] if isinstance(layer.padding, str) else 2 * layer.padding[dim]
        if (sides - reach) % 2:
            raise UnsupportedModel(
                f"adapters: module {name} (Conv2d) has kernel size {layer.kernel_size}, expected an odd one, "
                "whose windows have a middle"
            )
        found += [(sides - reach) // 2] * 2
    return found


def add_adapters(module: nn.Module, adapters: Adapters, seed: int) -> None:
    """Freeze all, and put an adapter beside each linear layer, 2-D convolution and projection of attention.

    Attention with a bias of keys, or with a place of zeros, is left alone. Raises UnsupportedModel.
    """
    module.requires_grad_(False)
    num_adapted = 0
    # The projection inside an attention module is read, never called.
    read = {layer.out_proj for layer in module.modules() if isinstance(layer, nn.MultiheadAttention)}

    def adapted(name: str, layer: nn.Module) -> nn.Module | None:
        nonlocal num_adapted
        if not name or layer in read:
            return None
        match layer:
            case nn.MultiheadAttention(bias_k=None, add_zero_attn=False):
                made: nn.Module = AdaptedAttention(layer, adapters)
            case nn.Linear():
                made = AdaptedLinear(layer, adapters)
            case nn.Conv2d():
                made = AdaptedConv2d(layer, adapters, name)
            case _:
                return None
        num_adapted += 1
        return made.train(layer.training)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        replace_modules(module, adapted)
    if not num_adapted:
        raise UnsupportedModel(
            "adapters: got a module without linear layers, 2-D convolutions and attention inside, expected at least "
            "one; let 'head' or 'bias' train instead"
        )
