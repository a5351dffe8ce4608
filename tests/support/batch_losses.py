"""Losses that compare the samples of a batch, as their papers and packages write them, and their forms with a mask."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.examples import Examples
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import App, BatchLoss
from fanin.edge.runtimes.base import PaddedBatch
from support.models import export_bundle

BATCH_SIZE = 8
NUM = 21
"""Two full batches and one of five."""
WIDTH = 6
NUM_CLASSES = 3
TEMPERATURE = 0.5
HIDDEN = -1e9
Output = dict[str, Tensor]


class TwoViews(nn.Module):
    """One encoder of two views of a sample, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings (B, WIDTH) of both views, and the scale of their products."""
        return self.encoder(a), self.encoder(b), self.log_scale.exp()


def simclr(output: Output, y: Tensor) -> Tensor:
    """NT-Xent of SimCLR (arXiv 2002.05709)."""
    z = functional.normalize(torch.cat([output["0"], output["1"]]), dim=1)
    num = len(z)
    scores = (z @ z.T / TEMPERATURE).masked_fill(torch.eye(num, dtype=torch.bool), float("-inf"))
    return functional.cross_entropy(scores, torch.arange(num).roll(num // 2))


def masked_simclr(output: Output, y: Tensor, mask: Tensor) -> Tensor:
    z = functional.normalize(torch.cat([output["0"], output["1"]]), dim=1)
    num, real = len(z), mask.repeat(2)
    hidden = torch.eye(num, dtype=torch.bool) | (real == 0)
    scores = (z @ z.T / TEMPERATURE).masked_fill(hidden, HIDDEN)
    losses = functional.cross_entropy(scores, torch.arange(num).roll(num // 2), reduction="none")
    return (real * losses).sum() / real.sum()


def info_nce(output: Output, y: Tensor) -> Tensor:
    """InfoNCE of each first view against all second views (arXiv 1807.03748)."""
    a, b = (functional.normalize(output[key], dim=1) for key in ("0", "1"))
    return functional.cross_entropy(a @ b.T / TEMPERATURE, torch.arange(len(a)))


def masked_info_nce(output: Output, y: Tensor, mask: Tensor) -> Tensor:
    a, b = (functional.normalize(output[key], dim=1) for key in ("0", "1"))
    scores = (a @ b.T / TEMPERATURE).masked_fill(mask == 0, HIDDEN)
    losses = functional.cross_entropy(scores, torch.arange(len(a)), reduction="none")
    return (mask * losses).sum() / mask.sum()


def clip(output: Output, y: Tensor) -> Tensor:
    """The symmetric loss of CLIP with a learned temperature (arXiv 2103.00020), as in ``open_clip.ClipLoss``."""
    a, b = (functional.normalize(output[key], dim=-1) for key in ("0", "1"))
    logits, labels = output["2"] * a @ b.T, torch.arange(len(a))
    return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2


def masked_clip(output: Output, y: Tensor, mask: Tensor) -> Tensor:
    a, b = (functional.normalize(output[key], dim=-1) for key in ("0", "1"))
    logits, labels = output["2"] * a @ b.T, torch.arange(len(a))
    losses = [
        functional.cross_entropy(each.masked_fill(mask == 0, HIDDEN), labels, reduction="none")
        for each in (logits, logits.T)
    ]
    return (mask * (losses[0] + losses[1])).sum() / (2 * mask.sum())


def triplet(output: Output, y: Tensor) -> Tensor:
    """``nn.TripletMarginLoss`` with the nearest other second view of the batch as the negative."""
    return masked_triplet(output, y, torch.ones(len(y)))


def masked_triplet(output: Output, y: Tensor, mask: Tensor) -> Tensor:
    a, b = output["0"], output["1"]
    distances = functional.pairwise_distance(a[:, None], b[None])
    hidden = torch.eye(len(a), dtype=torch.bool) | (mask == 0)
    nearest = distances.masked_fill(hidden, -HIDDEN).argmin(dim=1)
    losses = nn.TripletMarginLoss(margin=0.5, reduction="none")(a, b, b[nearest])
    # A single sample has no negative.
    return (mask * losses).sum() / mask.sum() * (mask.sum() > 1)


def off_diagonal(x: Tensor) -> Tensor:
    """Return the values beside the diagonal, as in facebookresearch/vicreg."""
    num = len(x)
    return x.flatten()[:-1].view(num - 1, num + 1)[:, 1:].flatten()


def vicreg(output: Output, y: Tensor) -> Tensor:
    """VICReg (arXiv 2105.04906), as in facebookresearch/vicreg."""
    a, b = output["0"], output["1"]
    total = functional.mse_loss(a, b)
    for z in (a, b):
        centred = z - z.mean(dim=0)
        std = torch.sqrt(centred.var(dim=0) + 1e-4)
        covariance = centred.T @ centred / (len(z) - 1)
        total = total + torch.relu(1 - std).mean() / 2 + off_diagonal(covariance).pow(2).sum() / z.shape[1]
    return total


def masked_vicreg(output: Output, y: Tensor, mask: Tensor) -> Tensor:
    a, b = output["0"], output["1"]
    num, rows = mask.sum(), mask[:, None]
    total = (rows * (a - b).square()).sum() / (num * a.shape[1])
    for z in (a, b):
        centred = rows * (z - (rows * z).sum(dim=0) / num)
        covariance = centred.T @ centred / (num - 1).clamp(min=1.0)
        std = torch.sqrt(covariance.diagonal() + 1e-4)
        total = total + torch.relu(1 - std).mean() / 2 + off_diagonal(covariance).pow(2).sum() / z.shape[1]
    return total


def supervised(output: Output, y: Tensor) -> Tensor:
    """Supervised contrastive loss (arXiv 2004.11362), the mean over the anchors with a positive."""
    z = functional.normalize(output["0"], dim=1)
    others = ~torch.eye(len(z), dtype=torch.bool)
    scores = z @ z.T / TEMPERATURE
    log_shares = scores - torch.logsumexp(scores.masked_fill(~others, float("-inf")), dim=1, keepdim=True)
    positives = (others & (y[:, None] == y[None])).float()
    num = positives.sum(1)
    return -((positives * log_shares).sum(1) / num.clamp(min=1)).sum() / (num > 0).sum().clamp(min=1)


def masked_supervised(output: Output, y: Tensor, mask: Tensor) -> Tensor:
    z = functional.normalize(output["0"], dim=1)
    others = ~torch.eye(len(z), dtype=torch.bool) & (mask > 0)
    scores = z @ z.T / TEMPERATURE
    log_shares = scores - torch.logsumexp(scores.masked_fill(~others, HIDDEN), dim=1, keepdim=True)
    positives = (others & (y[:, None] == y[None])).to(mask.dtype)
    num = positives.sum(1)
    losses = -(positives * log_shares).sum(1) / num.clamp(min=1)
    return (mask * losses).sum() / (mask * (num > 0)).sum().clamp(min=1)


def mean(output: Output, y: Tensor) -> Tensor:
    """A mean over the batch, the default of torch's losses."""
    return functional.cross_entropy(output["0"], y)


def masked_mean(output: Output, y: Tensor, mask: Tensor) -> Tensor:
    return (mask * functional.cross_entropy(output["0"], y, reduction="none")).sum() / mask.sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A loss.

    Attributes:
        plain: (output, y) -> the loss of rows that are all real.
        masked: The same with a mask.
        is_undefined_for_one: Whether the plain form of one row is not finite.
    """

    plain: Callable[[Output, Tensor], Tensor]
    masked: Callable[[Output, Tensor, Tensor], Tensor]
    is_undefined_for_one: bool = False


CASES = {
    "simclr": Case(plain=simclr, masked=masked_simclr),
    "infonce": Case(plain=info_nce, masked=masked_info_nce),
    "clip": Case(plain=clip, masked=masked_clip),
    "triplet": Case(plain=triplet, masked=masked_triplet),
    "vicreg": Case(plain=vicreg, masked=masked_vicreg, is_undefined_for_one=True),
    "supervised": Case(plain=supervised, masked=masked_supervised, is_undefined_for_one=True),
    "mean": Case(plain=mean, masked=masked_mean),
}


def views_of(num: int, seed: int = 0) -> Examples:
    """Return two noisy views of each sample, and its class."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, NUM_CLASSES, num)
    sources = rng.normal(size=(NUM_CLASSES, 5))[y] + 0.5 * rng.normal(size=(num, 5))
    a, b = ((sources + 0.3 * rng.normal(size=(num, 5))).astype(np.float32) for _ in range(2))
    return Examples(inputs={"a": a, "b": b}, y=y.astype(np.int32))


def batches_of_views() -> list[PaddedBatch]:
    """Return two full batches, one of five rows and one of a single row."""
    return [*batches_in_order(views_of(NUM), BATCH_SIZE), *batches_in_order(views_of(1, seed=1), BATCH_SIZE)]


def batch_loss_app(name: str, other_batch_sizes: tuple[int, ...] = ()) -> App:
    data = views_of(64, seed=2)
    torch.manual_seed(0)
    return App(
        name="views",
        module=TwoViews(),
        calibration=dict(data.inputs),
        batch_size=BATCH_SIZE,
        other_batch_sizes=other_batch_sizes,
        loss=BatchLoss(CASES[name].masked),
        output=("0", "1", "2"),
        targets=data.y,
    )


@cache
def batch_loss_bundle(name: str, formats: tuple[str, ...]) -> Bundle:
    return export_bundle(batch_loss_app(name), formats)
