"""Models with targets and outputs of several kinds, their losses, and the data of a device."""

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
from fanin.edge.export import App, next_token
from fanin.edge.runtimes.base import PaddedBatch
from support.models import export_bundle

NUM = 77
BATCH_SIZE = 8
NUM_CLASSES = 3
LENGTH = 6
QUANTILES = (0.1, 0.5, 0.9)


class ClassesFirst(nn.Module):
    """A segmentation model as torch has them: its class scores are (B, C, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, NUM_CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, C, H, W)."""
        return self.last(torch.relu(self.first(x)))


class Pixels(ClassesFirst):
    """A segmentation model that returns the classes as the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, H, W, C)."""
        return super().forward(x).movedim(1, -1)


class Cells(nn.Module):
    """A detector: for each of 4 x 4 cells, the score of an object, its box and its class."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(8, 5 + NUM_CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Values (B, 5 + C, 4, 4)."""
        return self.body(x)


class TwoClassifiers(nn.Module):
    """A classifier with an auxiliary classifier on its hidden layer, which only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 16), nn.Linear(16, NUM_CLASSES)
        self.auxiliary = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> dict[str, object]:
        """Logits (B, C) of both classifiers; the auxiliary ones are in a tuple."""
        hidden = torch.tanh(self.first(x))
        return {"others": (hidden, self.auxiliary(hidden)), "logits": self.last(hidden)}


class TwoHeads(nn.Module):
    """Two heads of different sizes on one body: the class of a sample, and two of its measures."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.measures = nn.Linear(5, 16), nn.Linear(16, NUM_CLASSES), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C) and values (B, 2)."""
        hidden = torch.tanh(self.body(x))
        return self.kind(hidden), self.measures(hidden)


def two_classifiers_loss(output: dict[str, Tensor], y: Tensor) -> Tensor:
    """Return the sum of both classifiers' losses for y (B,), with a weight of 0.3 for the inner one."""
    inner = functional.cross_entropy(output["others.1"], y.long(), reduction="none")
    return functional.cross_entropy(output["logits"], y.long(), reduction="none") + 0.3 * inner


def two_heads_loss(output: dict[str, Tensor], y: Tensor) -> Tensor:
    """Return the sum of both heads' losses for y (B, 3): the number of the class, and two measures."""
    class_loss = functional.cross_entropy(output["0"], y[:, 0].long(), reduction="none")
    return class_loss + 0.5 * (output["1"] - y[:, 1:]).square().mean(dim=1)


def gaussian_loss(output: Tensor, y: Tensor) -> Tensor:
    """Return the negative log-likelihood of y (B, 1) for means and logarithms of variances (B, 2)."""
    mean, log_variance = output[:, :1], output[:, 1:]
    return (0.5 * (log_variance + (y - mean).square() * torch.exp(-log_variance))).mean(dim=1)


def counts_loss(output: Tensor, y: Tensor) -> Tensor:
    """Return the losses of a count and of three opinions on a class (B, 4), for a log-rate and logits (B, 1 + C)."""
    count_loss = functional.poisson_nll_loss(output[:, 0], y[:, 0], reduction="none")
    return count_loss - torch.log_softmax(output[:, 1:], dim=1).gather(1, y[:, 1:]).mean(dim=1)


def pinball_loss(output: Tensor, y: Tensor) -> Tensor:
    """Return the mean pinball loss of three quantiles (B, 3) for y (B,)."""
    error = y.unsqueeze(1) - output
    quantiles = torch.tensor(QUANTILES)
    return torch.maximum(quantiles * error, (quantiles - 1.0) * error).mean(dim=1)


def pixel_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return torch's cross-entropy, averaged over the labelled pixels (B, H, W) of each sample."""
    losses = functional.cross_entropy(logits.movedim(-1, 1), y.long(), ignore_index=-1, reduction="none")
    return losses.sum(dim=(1, 2)) / (y >= 0).sum(dim=(1, 2)).clamp(min=1)


def class_axis_loss(output: Tensor, y: Tensor) -> Tensor:
    """Return torch's cross-entropy of scores (B, C, H, W), averaged over the pixels (B, H, W) of each sample."""
    return functional.cross_entropy(output, y, ignore_index=-1, reduction="none").mean(dim=(1, 2))


def cell_loss(output: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a detector for y (B, 6, 4, 4): the presence of an object, its box, and its class number."""
    has_object, box, kind = y[:, 0], y[:, 1:5], y[:, 5:]
    presence_loss = functional.binary_cross_entropy_with_logits(output[:, 0], has_object, reduction="none")
    box_loss = functional.smooth_l1_loss(output[:, 1:5], box, reduction="none").sum(dim=1)
    is_kind = (kind == torch.arange(NUM_CLASSES, dtype=y.dtype).reshape(1, -1, 1, 1)).to(y.dtype)
    class_loss = -(is_kind * torch.log_softmax(output[:, 5:], dim=1)).sum(dim=1)
    return (presence_loss + has_object * (box_loss + class_loss)).mean(dim=(1, 2))


@dataclass(frozen=True)
class Case:
    """A model, its loss, and the data of a device."""

    module: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    x: Callable[[np.random.Generator], np.ndarray]
    y: Callable[[np.random.Generator], np.ndarray]
    num_classes: int = 0
    is_declared: bool = False
    output: str | tuple[str, ...] = ""
    class_axis: int = -1


def normal_values(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: rng.normal(size=(NUM, *shape)).astype(np.float32)


def labels(lowest: int, *shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: rng.integers(lowest, NUM_CLASSES, (NUM, *shape)).astype(np.int32)


def cells(rng: np.random.Generator) -> np.ndarray:
    y = rng.uniform(size=(NUM, 6, 4, 4)).astype(np.float32)
    y[:, 0] = y[:, 0] < 0.3
    y[:, 5] = rng.integers(0, NUM_CLASSES, (NUM, 4, 4))
    return y


def kinds_of(rng: np.random.Generator) -> np.ndarray:
    return np.column_stack([rng.integers(0, NUM_CLASSES, NUM), rng.normal(size=(NUM, 2))]).astype(np.float32)


def counts_of(rng: np.random.Generator) -> np.ndarray:
    return np.column_stack([rng.poisson(3.0, NUM), rng.integers(0, NUM_CLASSES, (NUM, 3))]).astype(np.int32)


def perceptron(num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, num_outputs))


CASES = {
    "heteroscedastic": Case(lambda: perceptron(2), gaussian_loss, normal_values(5), normal_values(1), is_declared=True),
    "quantiles": Case(lambda: perceptron(3), pinball_loss, normal_values(5), normal_values(), is_declared=True),
    "sequence labels": Case(
        lambda: nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, NUM_CLASSES)),
        next_token,
        normal_values(LENGTH, 5),
        labels(-1, LENGTH),
        NUM_CLASSES,
    ),
    "segmentation": Case(Pixels, pixel_loss, normal_values(1, 8, 8), labels(-1, 8, 8), NUM_CLASSES),
    "class axis": Case(
        ClassesFirst, class_axis_loss, normal_values(1, 8, 6), labels(-1, 8, 6), NUM_CLASSES, class_axis=1
    ),
    "detection": Case(Cells, cell_loss, normal_values(1, 8, 8), cells, is_declared=True),
    "inner classifier": Case(
        TwoClassifiers, two_classifiers_loss, normal_values(5), labels(0), NUM_CLASSES, output=("logits", "others.1")
    ),
    "counts": Case(lambda: perceptron(1 + NUM_CLASSES), counts_loss, normal_values(5), counts_of, is_declared=True),
    "two heads": Case(TwoHeads, two_heads_loss, normal_values(5), kinds_of, is_declared=True, output=("0", "1")),
}


@cache
def examples_of(name: str) -> Examples:
    rng = np.random.default_rng(5)
    return Examples(inputs={"x": CASES[name].x(rng)}, y=CASES[name].y(rng))


def targets_app(name: str) -> App:
    case, data = CASES[name], examples_of(name)
    torch.manual_seed(0)
    return App(
        name="targets",
        module=case.module(),
        calibration=data.inputs["x"],
        batch_size=BATCH_SIZE,
        num_classes=case.num_classes,
        class_axis=case.class_axis,
        loss=case.loss,
        output=case.output,
        targets=data.y if case.is_declared else None,
        validation=(data.inputs["x"], data.y),
    )


@cache
def targets_bundle(name: str, formats: tuple[str, ...]) -> Bundle:
    return export_bundle(targets_app(name), formats)


def targets_of(y: np.ndarray) -> Tensor:
    """Return targets as a loss receives them: integers are int64."""
    return torch.from_numpy(y.astype(np.int64) if y.dtype == np.int32 else y)


def batches_of(name: str) -> list[PaddedBatch]:
    return list(batches_in_order(examples_of(name), BATCH_SIZE))
