"""BatchNorm that trains, as a function: running statistics are inputs and outputs, and padding is excluded.

torch's BatchNorm changes its buffers in place and counts every sample. A train graph has no buffers, and the last batch
of an epoch is padded. So mean and variance are computed over the unmasked samples, and the next running statistics are
outputs of the graph. They travel with the parameters and are averaged over devices like these.

A module of torch or of a package stays as it is: only its call of ``functional.batch_norm`` is replaced.

torch refuses a batch with one value for each channel, because it has no variance. A device cannot refuse the last
example of its data, so such a batch is normalized by the running statistics, as in evaluation, and leaves them
unchanged. By its own mean every value would be zero, and the step would train on no feature of the example.

Reference:
    Ioffe and Szegedy 2015, arXiv 1502.03167, algorithm 1.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from fanin.protos.errors import UnsupportedModel

aten = torch.ops.aten
STATISTICS: Final = ("running_mean", "running_var")
NORM: Final = inspect.signature(functional.batch_norm)


class TrackedNorms(TorchFunctionMode):
    """While active, ``functional.batch_norm`` changes no running statistics, and padding does not count.

    A batch with at most one value for each channel has no variance: it is normalized by both running statistics, and
    leaves them unchanged.

    Args:
        statistics: The running statistics that train, by name.
        mask: The samples that count (B,).
        positions_first: Names of the norms whose input has rows of a position, each with all samples. Any other input
            has one row for each sample, or the rows of a sample after each other, as in ``x.flatten(0, 1)``.

    Attributes:
        following: The next running statistics, of the norms that have been called.
        inputs: The name and the input of each norm that trains, in the order of their calls.
    """

    def __init__(self, statistics: Mapping[str, Tensor], mask: Tensor, positions_first: Collection[str] = ()) -> None:
        super().__init__()
        self.following: dict[str, Tensor] = {}
        self.inputs: list[tuple[str, Tensor]] = []
        self._statistics, self._mask, self._positions_first = statistics, mask, positions_first
        self._names = {id(value): name.rpartition(".")[0] for name, value in statistics.items()}

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Compute the norms that train."""
        if func is functional.batch_norm:
            call = NORM.bind(*args, **(kwargs or {}))
            call.apply_defaults()
            named = call.arguments
            name = self._names.get(id(named["running_mean"]))
            if name is not None:
                if named["training"]:
                    return self._normed(name, named)
                # The mean over devices is rounded to a grid, so a small variance may become negative.
                named["running_var"] = cast("Tensor", named["running_var"]).clamp(min=0.0)
                return func(*call.args, **call.kwargs)
        return func(*args, **(kwargs or {}))

    def _normed(self, name: str, named: Mapping[str, object]) -> Tensor:
        """Return x (B, C, ...) normalized."""
        x = cast("Tensor", named["input"])
        epsilon, momentum = (cast("float", named[key]) for key in ("eps", "momentum"))
        if x.numel() == x.shape[1]:
            raise ValueError(
                f"norm: got one value for each channel {tuple(x.shape)}, expected more; use a larger batch_size"
            )
        self.inputs.append((name, x))
        mask = self._rows(name, x)
        # (B, C, positions): for images the TFLite converter confuses the layouts of these sums in the gradient.
        flat = x.reshape(x.shape[0], x.shape[1], -1)
        counted = mask.reshape(-1, 1, 1)
        num = mask.sum() * flat.shape[2]
        mean = (flat * counted).sum([0, 2]) / num.clamp(min=1.0)
        centred = (flat - _column(mean)) * counted
        square_sum = (centred * centred).sum([0, 2])
        # A layer that is called twice in a pass continues from its first call. The running variance is unbiased.
        now = {"running_mean": mean, "running_var": square_sum / (num - 1.0).clamp(min=1.0)}
        keys = {key: f"{name}.{key}".lstrip(".") for key in STATISTICS}
        inputs = {key: self._statistics[keys[key]] for key in STATISTICS}
        inputs["running_var"] = inputs["running_var"].clamp(min=0.0)
        share = momentum * (num > 1.0).to(x.dtype)
        for key, value in now.items():
            before = self.following.get(keys[key], inputs[key])
            self.following[keys[key]] = before + share * (value - before)
        variance = square_sum / num.clamp(min=1.0)
        if flat.shape[2] == 1:
            mean = torch.where(num > 1.0, mean, inputs["running_mean"])
            variance = torch.where(num > 1.0, variance, inputs["running_var"])
        y = (flat - _column(mean)) * _column(torch.rsqrt(variance + epsilon))
        weight, bias = named["weight"], named["bias"]
        if isinstance(weight, Tensor):
            y = y * _column(weight)
        if isinstance(bias, Tensor):
            y = y + _column(bias)
        # No view: a module may write into the result of its norm (`out = norm(x); out += residual`).
        result: Tensor = aten._unsafe_view.default(y, x.shape)
        return result

    def _rows(self, name: str, x: Tensor) -> Tensor:
        """Return which rows of the input of a norm count."""
        num, rest = divmod(x.shape[0], len(self._mask))
        if rest:
            raise ValueError(
                f"norm: got {x.shape[0]} rows {tuple(x.shape)} for a batch of {len(self._mask)} samples, expected as "
                "many for each sample; give the norm (batch, channels, ...), or (batch, ..., channels).flatten(0, -2)"
            )
        if num == 1:
            return self._mask
        shape = (num, len(self._mask)) if name in self._positions_first else (len(self._mask), num)
        return self._mask.unsqueeze(int(name not in self._positions_first)).expand(shape).reshape(-1)


def track_norms(module: nn.Module, what: str) -> None:
    """Let a module count none of its passes, and check each BatchNorm in training mode.

    Args:
        module: The module, changed in place.
        what: Prefix of error messages.

    Raises:
        UnsupportedModel: A BatchNorm has no running statistics or no momentum.
    """
    for name, norm in module.named_modules():
        if not isinstance(norm, _BatchNorm):
            continue
        where = f"{what}: module {name or 'itself'} ({type(norm).__name__})"
        if norm.running_mean is None:
            raise UnsupportedModel(
                f"{where} has no running statistics, so that in evaluation a sample depends on the other samples of "
                "its batch, expected some; write track_running_stats=True, or use GroupNorm or InstanceNorm",
                code="FN-0766",
            )
        if norm.training and norm.momentum is None:
            raise UnsupportedModel(
                f"{where} has momentum=None, so that its statistics depend on the number of passes, which no graph "
                "counts, expected a number; write momentum=0.1",
                code="FN-0766",
            )
        norm.num_batches_tracked = None


def running_statistics(module: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics of the norms that train, by name."""
    return {
        f"{name}.{key}".lstrip("."): getattr(norm, key)
        for name, norm in module.named_modules()
        if isinstance(norm, _BatchNorm) and norm.training and norm.running_mean is not None
        for key in STATISTICS
    }


def _column(values: Tensor) -> Tensor:
    """Reshape one value for each channel (C,) so that it broadcasts over (B, C, positions)."""
    return values.reshape(1, -1, 1)
