"""BatchNorm that trains, as a function: running statistics are inputs and outputs, and padding is excluded.

torch's BatchNorm changes its buffers in place and counts every sample. A train graph has no buffers, and the last batch
of an epoch is padded. So mean and variance are computed over the unmasked samples, and the next running statistics are
outputs of the graph. They travel with the parameters and are averaged over devices like these.

torch refuses a batch with one value for each channel, because it has no variance. A device cannot refuse the last
example of its data, so such a batch is normalized by the running statistics, as in evaluation, and leaves them
unchanged. By its own mean every value would be zero, and the step would train on no feature of the example.

Reference:
    Ioffe and Szegedy 2015, arXiv 1502.03167, algorithm 1.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fanin.edge.export.module.places import replace_modules
from fanin.protos.errors import UnsupportedModel

STATISTICS = ("running_mean", "running_var")


class TrackedNorm(nn.Module):
    """A BatchNorm layer with the same parameters and buffers under the same names, but without side effects.

    Call ``begin`` before a pass and ``finish`` after it. A batch with at most one value for each channel has no
    variance: it is normalized by both running statistics, and leaves them unchanged.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        assert norm.running_mean is not None and norm.running_var is not None and norm.momentum is not None
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self._epsilon, self._momentum = norm.eps, norm.momentum
        self._mask: Tensor | None = None
        self._following: dict[str, Tensor] = {}
        self.train(norm.training)

    def begin(self, mask: Tensor) -> None:
        """Start a pass with the mask (B,) of the samples that count."""
        self._mask, self._following = mask, {}

    def finish(self) -> dict[str, Tensor]:
        """End the pass. Returns the next running statistics by name; empty if the layer was not called."""
        statistics, self._mask, self._following = self._following, None, {}
        return statistics

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, C, ...) normalized."""
        if not self.training:
            # torch's own operator: FoldedNorms recognizes it and folds it into the convolution before it.
            variance = self.running_var.clamp(min=0.0)
            return functional.batch_norm(x, self.running_mean, variance, self.weight, self.bias, eps=self._epsilon)
        assert self._mask is not None, "begin was called"
        if x.numel() == x.shape[1]:
            raise ValueError(
                f"norm: got one value for each channel {tuple(x.shape)}, expected more; use a larger batch_size"
            )
        # (B, C, positions): for images the TFLite converter confuses the layouts of these sums in the gradient.
        flat = x.reshape(x.shape[0], x.shape[1], -1)
        counted = self._mask.reshape(-1, 1, 1)
        num = self._mask.sum() * flat.shape[2]
        mean = (flat * counted).sum([0, 2]) / num.clamp(min=1.0)
        centred = (flat - _column(mean, flat)) * counted
        square_sum = (centred * centred).sum([0, 2])
        # A layer that is called twice in a pass continues from its first call. The running variance is unbiased.
        now = {"running_mean": mean, "running_var": square_sum / (num - 1.0).clamp(min=1.0)}
        # The mean over devices is rounded to a grid, so a small variance may become negative.
        inputs = {"running_mean": self.running_mean, "running_var": self.running_var.clamp(min=0.0)}
        before = self._following or inputs
        share = self._momentum * (num > 1.0).to(x.dtype)
        self._following = {name: before[name] + share * (now[name] - before[name]) for name in STATISTICS}
        variance = square_sum / num.clamp(min=1.0)
        if flat.shape[2] == 1:
            mean = torch.where(num > 1.0, mean, inputs["running_mean"])
            variance = torch.where(num > 1.0, variance, inputs["running_var"])
        return self._normalized(flat, mean, variance).reshape(x.shape)

    def _normalized(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        y = (x - _column(mean, x)) * _column(torch.rsqrt(variance + self._epsilon), x)
        if self.weight is not None:
            y = y * _column(self.weight, x) + _column(self.bias, x)
        return y


def track_norms(module: nn.Module, what: str) -> None:
    """Replace every BatchNorm in training mode by a ``TrackedNorm``.

    Args:
        module: The module, changed in place.
        what: Prefix of error messages.

    Raises:
        UnsupportedModel: A BatchNorm has no running statistics or no momentum, or is the module itself. Without running
            statistics padding would always count.
    """

    def tracked(name: str, norm: nn.Module) -> nn.Module | None:
        if not isinstance(norm, _BatchNorm):
            return None
        # Without running statistics evaluation would use those of the batch, including its padding.
        if norm.running_mean is None or (norm.training and norm.momentum is None):
            raise UnsupportedModel(
                f"{what}: module {name or 'itself'} ({type(norm).__name__}) has track_running_stats="
                f"{norm.track_running_stats} and momentum={norm.momentum}, expected running statistics and a momentum",
                code="FN-0766",
            )
        if not norm.training:
            return None
        if not name:
            raise UnsupportedModel(
                f"{what}: the module itself is a {type(norm).__name__}, expected layers around it", code="FN-0766"
            )
        return TrackedNorm(norm)

    replace_modules(module, tracked)


def tracked_norms(module: nn.Module) -> Iterator[tuple[str, TrackedNorm]]:
    """Yield the name of each tracked norm that trains, and the norm."""
    for name, norm in module.named_modules():
        if isinstance(norm, TrackedNorm) and norm.training:
            yield name, norm


def _column(values: Tensor, x: Tensor) -> Tensor:
    """Reshape one value for each channel (C,) so that it broadcasts over x (B, C, ...)."""
    return values.reshape([1, -1] + [1] * (x.dim() - 2))
