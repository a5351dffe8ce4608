"""Quantization-aware training: layers that round as the int8 graph will, with gradients that ignore the rounding.

The forward pass rounds weights and inputs to their 8-bit grids. The gradient passes unchanged (straight through),
except where an input was outside its range. The grid of a weight is that of ``bundles.quantize``, one scale for each
channel, recomputed in each step. The range of an input is that of the calibration data. Only the train step rounds:
evaluation is in float, and the ``infer`` graph has its own int8 form.

Reference:
    Jacob et al. 2018, arXiv 1712.05877, section 3. Bengio et al. 2013, arXiv 1308.3432 (straight-through gradients).
"""

import functools
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from fanin.edge.bundles.quantize import MAX_CODE, MIN_SCALE
from fanin.edge.export.app.calls import guarded
from fanin.edge.export.app.inputs.named import call_module, split_inputs
from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.export.module.places import replace_modules
from fanin.protos.errors import UnsupportedModel

LEVELS: Final = 255
"""Steps between the ends of an 8-bit range."""


class _InputRange:
    """The range of a layer's inputs over the calibration data. It includes zero, which is therefore exact."""

    low: float = 0.0
    high: float = 0.0

    def widen(self, x: Tensor) -> None:
        """Extend the range to these inputs."""
        self.low, self.high = min(self.low, float(x.min())), max(self.high, float(x.max()))

    def rounded(self, x: Tensor) -> Tensor:
        """Return the inputs rounded to the 8-bit grid."""
        step = max((self.high - self.low) / LEVELS, MIN_SCALE)
        zero = round(self.low / step)
        clamped = x.clamp(zero * step, (zero + LEVELS) * step)
        return _straight_through(clamped, torch.round(clamped / step) * step)


class QuantAwareLinear(nn.Linear):
    """A linear layer that rounds while it trains."""

    inputs: _InputRange

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        if not self.training:
            return super().forward(x)
        return functional.linear(self.inputs.rounded(x), rounded_weight(self.weight), self.bias)


class QuantAwareConv1d(nn.Conv1d):
    """A 1-D convolution that rounds while it trains."""

    inputs: _InputRange

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, T) to (B, out, T')."""
        if not self.training:
            return super().forward(x)
        y: Tensor = self._conv_forward(self.inputs.rounded(x), rounded_weight(self.weight), self.bias)
        return y


class QuantAwareConv2d(nn.Conv2d):
    """A 2-D convolution that rounds while it trains."""

    inputs: _InputRange

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, out, H', W')."""
        if not self.training:
            return super().forward(x)
        y: Tensor = self._conv_forward(self.inputs.rounded(x), rounded_weight(self.weight), self.bias)
        return y


QuantAware = QuantAwareLinear | QuantAwareConv1d | QuantAwareConv2d
KINDS: Final[dict[type[nn.Module], type[QuantAware]]] = {
    nn.Linear: QuantAwareLinear,
    nn.Conv1d: QuantAwareConv1d,
    nn.Conv2d: QuantAwareConv2d,
}


def round_layers(module: nn.Module, calibration: Tensors, batch_size: int) -> None:
    """Replace each linear layer and convolution by one that rounds.

    Args:
        module: The module, changed in place.
        calibration: Inputs (n, ...) by name, from which the ranges are measured.
        batch_size: Samples of one pass.

    Raises:
        UnsupportedModel: The module has no such layer, or fails on the calibration data.
    """
    layers: list[QuantAware] = []

    def rounding(name: str, layer: nn.Module) -> nn.Module | None:
        kind = KINDS.get(type(layer))
        # An attention module reads the weight of its projection and never calls it.
        if not name or kind is None or isinstance(module.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
            return None
        # The new layer shares all attributes of the old one; only its class differs.
        replacement = kind.__new__(kind)
        replacement.__dict__ = layer.__dict__
        replacement.inputs = _InputRange()
        layers.append(replacement)
        return replacement

    replace_modules(module, rounding)
    if not layers:
        raise UnsupportedModel(
            "quantization_aware: got a module without linear layers and convolutions inside, expected at least one",
            code="FN-0753",
        )
    _measure(module, layers, calibration, batch_size)


def rounded_weight(weight: Tensor) -> Tensor:
    """Return a weight on its int8 grid, with one scale for each output channel (dimension 0)."""
    largest = weight.detach().abs().amax(dim=list(range(1, weight.dim())), keepdim=True)
    scale = (largest / MAX_CODE).clamp(min=MIN_SCALE)
    return _straight_through(weight, torch.round(weight.detach() / scale) * scale)


def _straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    """Return ``rounded`` with the gradient of ``value``."""
    return value + (rounded - value).detach()


def _measure(module: nn.Module, layers: list[QuantAware], calibration: Tensors, batch_size: int) -> None:
    modes = {layer: layer.training for layer in module.modules()}
    hooks = [layer.register_forward_pre_hook(lambda layer, inputs: layer.inputs.widen(inputs[0])) for layer in layers]
    module.eval()
    try:
        with torch.no_grad():
            for batch in split_inputs(calibration, batch_size):
                guarded("quantization_aware: the module", module, functools.partial(call_module, module, batch))
    finally:
        for hook in hooks:
            hook.remove()
        for layer, training in modes.items():
            layer.training = training
