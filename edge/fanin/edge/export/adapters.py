"""Low-rank adapters beside frozen layers (LoRA: Hu et al. 2021, arXiv 2106.09685, section 4.1).

    linear       y = W x + b + scale * B (A x)         A (rank, in), B (out, rank)
    convolution  y = W * x + b + scale * B (A * x)     A and B 1x1, A with the convolution's stride

The convolution's pair sees the middle of each window, so its input is cropped or padded to that. ``down`` (A) begins
random, ``up`` (B) zero: the first Version says what the frozen module says.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fanin.edge.export.app import Adapters
from fanin.edge.export.places import replace_modules
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
    """Freeze all, and put an adapter beside each linear layer and 2-D convolution. Raises UnsupportedModel."""
    module.requires_grad_(False)
    num_adapted = 0

    def adapted(name: str, layer: nn.Module) -> nn.Module | None:
        nonlocal num_adapted
        # The projection inside an attention module is read, never called; its product would be in float32.
        if not name or isinstance(module.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
            return None
        match layer:
            case nn.Linear():
                made: nn.Module = AdaptedLinear(layer, adapters)
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
            "adapters: got a module without linear layers and 2-D convolutions inside, expected at least one; "
            "let 'head' or 'bias' train instead"
        )
