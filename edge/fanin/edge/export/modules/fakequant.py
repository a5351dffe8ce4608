"""Quantization-aware training: layers that round as the int8 graph will, and learn as if they did not.

Jacob et al. 2018 (arXiv 1712.05877, section 3): on the way forward weights and inputs are rounded to their 8-bit
grids, on the way back the gradient passes as it is (straight through, Bengio et al. 2013, arXiv 1308.3432), but not
where an input lay beyond its range. A weight's grid is that of ``edge.quantize``, one scale a channel, made anew in
each step; an input's range is what the calibration data showed. Only the train step rounds: evaluation is in float,
and the ``infer`` graph has its own int8 form.
"""

import functools
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from fanin.edge.bundles.quantize import MAX_CODE, MIN_SCALE
from fanin.edge.export.modules.places import replace_modules
from fanin.edge.export.refusals import guarded
from fanin.protos.errors import UnsupportedModel

LEVELS: Final = 255
"""Steps between the ends of an 8-bit range."""


class _InputRange:
    """The range of a layer's inputs over the calibration data; zero is always in it, and so exact."""

    low: float = 0.0
    high: float = 0.0

    def widen(self, x: Tensor) -> None:
        """Take these inputs in."""
        self.low, self.high = min(self.low, float(x.min())), max(self.high, float(x.max()))

    def rounded(self, x: Tensor) -> Tensor:
        """The inputs on the 8-bit grid."""
        step = max((self.high - self.low) / LEVELS, MIN_SCALE)
        zero = round(self.low / step)
        held = x.clamp(zero * step, (zero + LEVELS) * step)
        return _straight_through(held, torch.round(held / step) * step)


class QuantAwareLinear(nn.Linear):
    """A linear layer that rounds while it trains."""

    inputs: _InputRange

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        if not self.training:
            return super().forward(x)
        return functional.linear(self.inputs.rounded(x), rounded_weight(self.weight), self.bias)


class QuantAwareConv1d(nn.Conv1d):
    """A 1-D convolution that rounds while it trains."""

    inputs: _InputRange

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, T) to (B, out, T')."""
        if not self.training:
            return super().forward(x)
        found: Tensor = self._conv_forward(self.inputs.rounded(x), rounded_weight(self.weight), self.bias)
        return found


class QuantAwareConv2d(nn.Conv2d):
    """A 2-D convolution that rounds while it trains."""

    inputs: _InputRange

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, out, H', W')."""
        if not self.training:
            return super().forward(x)
        found: Tensor = self._conv_forward(self.inputs.rounded(x), rounded_weight(self.weight), self.bias)
        return found


QuantAware = QuantAwareLinear | QuantAwareConv1d | QuantAwareConv2d
KINDS: Final[dict[type[nn.Module], type[QuantAware]]] = {
    nn.Linear: QuantAwareLinear,
    nn.Conv1d: QuantAwareConv1d,
    nn.Conv2d: QuantAwareConv2d,
}


def round_layers(module: nn.Module, calibration: Tensor, batch_size: int) -> None:
    """Make each linear layer and convolution one that rounds, its range from ``calibration`` (n, ...).

    Raises UnsupportedModel if there is none.
    """
    layers: list[QuantAware] = []

    def rounding(name: str, layer: nn.Module) -> nn.Module | None:
        kind = KINDS.get(type(layer))
        # The projection inside an attention module is read, never called.
        if not name or kind is None or isinstance(module.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
            return None
        # The same layer in all it holds, of a class that rounds.
        made = kind.__new__(kind)
        made.__dict__ = layer.__dict__
        made.inputs = _InputRange()
        layers.append(made)
        return made

    replace_modules(module, rounding)
    if not layers:
        raise UnsupportedModel(
            "quantization_aware: got a module without linear layers and convolutions inside, expected at least one"
        )
    _measure(module, layers, calibration, batch_size)


def rounded_weight(weight: Tensor) -> Tensor:
    """A weight on its int8 grid, one scale for each output channel (axis 0)."""
    largest = weight.detach().abs().amax(dim=list(range(1, weight.dim())), keepdim=True)
    scale = (largest / MAX_CODE).clamp(min=MIN_SCALE)
    return _straight_through(weight, torch.round(weight.detach() / scale) * scale)


def _straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    """``rounded`` on the way forward, ``value`` on the way back."""
    return value + (rounded - value).detach()


def _measure(module: nn.Module, layers: list[QuantAware], calibration: Tensor, batch_size: int) -> None:
    modes = {layer: layer.training for layer in module.modules()}
    hooks = [layer.register_forward_pre_hook(lambda found, inputs: found.inputs.widen(inputs[0])) for layer in layers]
    module.eval()
    try:
        with torch.no_grad():
            for batch in torch.split(calibration, batch_size):
                guarded("quantization_aware: the module", module, functools.partial(module, batch))
    finally:
        for hook in hooks:
            hook.remove()
        for layer, training in modes.items():
            layer.training = training
