"""BatchNorm that trains, as a function: its running statistics go in and come out, and padding has no say.

torch's own changes its buffers in place and counts every sample of a batch. In a train graph the last batch of an
epoch is padded, and there are no buffers: so the mean and the variance here are those of the unmasked samples
(Ioffe and Szegedy 2015, arXiv 1502.03167, algorithm 1), and the next running statistics are outputs. They travel with
the parameters, and the mean over devices is taken of them as of everything else.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fanin.edge.export.modules.places import replace_modules
from fanin.protos.errors import UnsupportedModel

STATISTICS = ("running_mean", "running_var")


class TrackedNorm(nn.Module):
    """One BatchNorm layer with the same parameters and buffers by the same names.

    A pass stands between ``begin`` and ``finish``. A batch with one value a channel or none has no variance, and moves
    neither statistic.
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
        """Say which samples of the batch count, (B,), before a pass."""
        self._mask, self._following = mask, {}

    def finish(self) -> dict[str, Tensor]:
        """The next running statistics by name; none if the layer was not used. Nothing of the pass is kept."""
        found, self._mask, self._following = self._following, None, {}
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Normalized (B, C, ...)."""
        if not self.training:
            # torch's own operator, which is known where it is folded into the convolution before it.
            variance = self.running_var.clamp(min=0.0)
            return functional.batch_norm(x, self.running_mean, variance, self.weight, self.bias, eps=self._epsilon)
        assert self._mask is not None, "a pass begins with begin"
        if x.numel() == x.shape[1]:
            raise ValueError(f"norm: got one value a channel {tuple(x.shape)}, expected more; take a larger batch_size")
        # (B, C, places): of images, the TFLite converter mixes up the layouts of these sums on the way back.
        flat = x.reshape(x.shape[0], x.shape[1], -1)
        counted = self._mask.reshape(-1, 1, 1)
        num = self._mask.sum() * flat.shape[2]
        mean = (flat * counted).sum([0, 2]) / num.clamp(min=1.0)
        centred = (flat - _column(mean, flat)) * counted
        square_sum = (centred * centred).sum([0, 2])
        # A layer that is used twice in a pass goes on from its first use, and its running variance is the unbiased one.
        now = {"running_mean": mean, "running_var": square_sum / (num - 1.0).clamp(min=1.0)}
        # The mean over devices is rounded to a grid, which may take a small variance below zero.
        held = {"running_mean": self.running_mean, "running_var": self.running_var.clamp(min=0.0)}
        before = self._following or held
        share = self._momentum * (num > 1.0).to(x.dtype)
        self._following = {name: before[name] + share * (now[name] - before[name]) for name in STATISTICS}
        return self._normalized(flat, mean, square_sum / num.clamp(min=1.0)).reshape(x.shape)

    def _normalized(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        found = (x - _column(mean, x)) * _column(torch.rsqrt(variance + self._epsilon), x)
        if self.weight is not None:
            found = found * _column(self.weight, x) + _column(self.bias, x)
        return found


def track_norms(module: nn.Module, what: str) -> None:
    """Replace every BatchNorm in training mode by one that gives its statistics away.

    Raises UnsupportedModel for one without running statistics, which padding would always have a say in.
    """

    def tracked(name: str, norm: nn.Module) -> nn.Module | None:
        if not isinstance(norm, _BatchNorm):
            return None
        # Without running statistics a batch's own are used in evaluation, too, padding and all.
        if norm.running_mean is None or (norm.training and norm.momentum is None):
            raise UnsupportedModel(
                f"{what}: module {name or 'itself'} ({type(norm).__name__}) has track_running_stats="
                f"{norm.track_running_stats} and momentum={norm.momentum}, expected running statistics and a momentum"
            )
        if not norm.training:
            return None
        if not name:
            raise UnsupportedModel(f"{what}: the module itself is a {type(norm).__name__}, expected layers around it")
        return TrackedNorm(norm)

    replace_modules(module, tracked)


def tracked_norms(module: nn.Module) -> Iterator[tuple[str, TrackedNorm]]:
    """Each tracked norm that trains, and its name."""
    for name, found in module.named_modules():
        if isinstance(found, TrackedNorm) and found.training:
            yield name, found


def _column(values: Tensor, x: Tensor) -> Tensor:
    """One value a channel (C,) in the shape that broadcasts over x (B, C, ...)."""
    return values.reshape([1, -1] + [1] * (x.dim() - 2))
