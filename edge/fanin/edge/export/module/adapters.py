"""Low-rank adapters for frozen layers.

    linear       y = W x + b + scale * B (A x)         A (rank, in), B (out, rank)
    convolution  y = W * x + b + scale * B (A * x)     A and B 1x1, A with the stride of the convolution

    attention    each of its four projections as a linear layer

The 1x1 pair of a convolution reads the middle of each window, so its input is cropped or padded accordingly. ``down``
(A) is random at first and ``up`` (B) zero. So the first Version computes the same as the frozen module.

Reference:
    Hu et al. 2021, arXiv 2106.09685, section 4.1.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from fanin.edge.export.app.optimizers.recipe import Adapters
from fanin.edge.export.module.places import replace_modules
from fanin.protos.errors import UnsupportedModel


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
        """Frozen weight plus adapter (out, in), for code that reads a weight instead of calling the layer."""
        adapted: Tensor = self.up.weight @ self.down.weight
        return self.frozen.weight + self._scale * adapted

    @property
    def bias(self) -> Tensor | None:
        """The bias of the frozen layer (out,)."""
        return self.frozen.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
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
        """Map (B, C, H, W) to (B, out, H', W')."""
        frozen: Tensor = self.frozen(x)
        seen = functional.pad(x, self._margins) if any(self._margins) else x
        adapted: Tensor = self.up(self.down(seen))
        return frozen + self._scale * adapted


class _LowRank(nn.Module):
    """The product B (A x) alone."""

    def __init__(self, sizes: tuple[int, int], rank: int) -> None:
        super().__init__()
        rank = min(rank, *sizes)
        self.down = nn.Linear(sizes[0], rank, bias=False)
        self.up = nn.Linear(rank, sizes[1], bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        product: Tensor = self.up(self.down(x))
        return product


class AdaptedAttention(nn.Module):
    """Frozen multi-head attention with an adapter for each of its projections; called like torch's module.

    The projections are computed here, so their frozen weights stay int8 products. torch's own forward would need the
    sum of weight and adapter.
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
        self._qkv_same_embed_dim = False  # keeps torch's encoder layer from reading the frozen weights

    @property
    def batch_first(self) -> bool:
        """Whether inputs are (B, T, E) and not (T, B, E)."""
        return bool(self.frozen.batch_first)

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return int(self.frozen.num_heads)

    @property
    def in_proj_bias(self) -> Tensor | None:
        """The biases of query, key and value of the frozen layer, in one tensor (3 E,)."""
        return self.frozen._parameters["in_proj_bias"]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute ``torch.nn.MultiheadAttention.forward``; returns (output, attention weights or None).

        ``is_causal`` is only a hint: the mask shows whether attention is causal.
        """
        is_batched = query.dim() == 3
        batch = [query, key, value] if is_batched else [part.unsqueeze(0) for part in (query, key, value)]
        is_transposed = is_batched and not self.batch_first
        rows = [part.transpose(0, 1) if is_transposed else part for part in batch]
        if query is key and key is value and self.frozen._qkv_same_embed_dim:
            # One product for all three: the int8 graph has no slot for a slice of a weight.
            plain = functional.linear(rows[0], self.frozen.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        else:
            plain = tuple(self._projected(index, part) for index, part in enumerate(rows))
        pairs = zip(plain, rows, (self.query, self.key, self.value), strict=True)
        q, k, v = (self._heads(frozen + self._scale * adapter(part)) for frozen, part, adapter in pairs)
        mask = _additive_mask(attn_mask, key_padding_mask, q, k)
        attended, weights = self._attend(q, k, v, mask, need_weights=need_weights)
        joined = attended.transpose(1, 2).flatten(2)
        out = self.frozen.out_proj
        output = functional.linear(joined, out.weight, out.bias) + self._scale * self.out(joined)
        output = output.transpose(0, 1) if is_transposed else output
        if weights is not None:
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if is_batched else weights.squeeze(0)
        return output if is_batched else output.squeeze(0), weights

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with dropout of the weights. Returns (B, H, T, D) and the weights (B, H, T, S) or None."""
        dropout = self.frozen.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        if weights is not None and dropout:
            # The weights that are returned are those that attend.
            weights = functional.dropout(weights, dropout)
            return weights @ v, weights
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout), weights

    def _projected(self, index: int, x: Tensor) -> Tensor:
        """Project x (B, T, in) to query (0), key (1) or value (2) by the frozen weight alone: (B, T, E)."""
        layer, bias = self.frozen, self.in_proj_bias
        if layer._qkv_same_embed_dim:
            weight = layer.in_proj_weight.chunk(3)[index]
        else:
            weight = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)[index]
        return functional.linear(x, weight, None if bias is None else bias.chunk(3)[index])

    def _heads(self, x: Tensor) -> Tensor:
        """Split (B, T, E) into heads: (B, heads, T, E / heads)."""
        return x.reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2)


def _additive_mask(attn_mask: Tensor | None, padding: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Combine both masks into one to add to scores (B, heads, T, S). A bool is True where a position is hidden."""
    mask = None
    if attn_mask is not None:
        attn_mask = attn_mask.reshape(*query.shape[:2], *attn_mask.shape[1:]) if attn_mask.dim() == 3 else attn_mask
        mask = _additive(attn_mask)
    if padding is not None:
        rows = _additive(padding).reshape(-1, 1, 1, key.size(-2))
        mask = rows if mask is None else mask + rows
    return mask


def _additive(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape).masked_fill(mask, -math.inf)


def _margins(layer: nn.Conv2d, name: str) -> list[int]:
    """Return the padding (a crop where negative) that moves a 1x1 window to the middle of each window of the layer.

    Raises UnsupportedModel for an even kernel size.
    """
    margins: list[int] = []
    for dim in (1, 0):
        reach = layer.dilation[dim] * (layer.kernel_size[dim] - 1)
        named = {"same": reach, "valid": 0}
        sides = named[layer.padding] if isinstance(layer.padding, str) else 2 * layer.padding[dim]
        if (sides - reach) % 2:
            raise UnsupportedModel(
                f"adapters: module {name} (Conv2d) has kernel size {layer.kernel_size}, expected an odd one, "
                "whose windows have a middle; exclude the layer or train 'head' instead",
                code="FN-0753",
            )
        margins += [(sides - reach) // 2] * 2
    return margins


def add_adapters(module: nn.Module, adapters: Adapters, seed: int) -> None:
    """Freeze a module and add an adapter to each linear layer, 2-D convolution and projection of attention.

    Attention with ``bias_k`` or ``add_zero_attn`` is left unchanged.

    Args:
        module: The module, changed in place.
        adapters: Rank and scale.
        seed: Seed of the random factors.

    Raises:
        UnsupportedModel: The module has no such layer, or a convolution has an even kernel size.
    """
    module.requires_grad_(False)
    num_adapted = 0
    # An attention module reads the weight of its projection and never calls it.
    uncalled = {layer.out_proj for layer in module.modules() if isinstance(layer, nn.MultiheadAttention)}

    def adapted(name: str, layer: nn.Module) -> nn.Module | None:
        nonlocal num_adapted
        if not name or layer in uncalled:
            return None
        match layer:
            case nn.MultiheadAttention(bias_k=None, add_zero_attn=False):
                adapted_layer: nn.Module = AdaptedAttention(layer, adapters)
            case nn.Linear():
                adapted_layer = AdaptedLinear(layer, adapters)
            case nn.Conv2d():
                adapted_layer = AdaptedConv2d(layer, adapters, name)
            case _:
                return None
        num_adapted += 1
        return adapted_layer.train(layer.training)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        replace_modules(module, adapted)
    if not num_adapted:
        raise UnsupportedModel(
            "adapters: got a module without linear layers, 2-D convolutions and attention inside, expected at least "
            "one; let 'head' or 'bias' train instead",
            code="FN-0753",
        )
