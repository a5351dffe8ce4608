"""The outputs of a model as predictions: classes with names and probabilities, and the score for labels.

A model may have a class for each sample, or for each position of a sample: the words of a sequence, the pixels of an
image. The accuracy then counts positions, without those that have no label.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.edge.tensors import Array
from fanin.protos.errors import InvalidInput
from fanin.protos.texts import counted

SHOWN_SAMPLES: Final = 20
SHOWN_POSITIONS: Final = 20
SUM_TOLERANCE: Final = 0.02
"""Distance of a sum of probabilities from 1: int8 outputs are coarse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Predicted classes.

    Attributes:
        classes: Classes (n,), or (n, ...) for a class at each position.
        probabilities: Their probabilities, of the same shape.
        names: Names by class; empty for classes without names.
        num_labels: Number of labels.
        accuracy: Share of the labels that are predicted; None without labels.
    """

    classes: Array
    probabilities: Array
    names: tuple[str, ...]
    num_labels: int
    accuracy: float | None

    def rows(self) -> list[dict[str, object]]:
        """Return the JSON row of each sample."""
        pairs = zip(self.classes, self.probabilities, strict=True)
        if self.classes.ndim > 1:
            return [{"classes": classes.tolist(), "probabilities": shares.tolist()} for classes, shares in pairs]
        return [
            {
                "class": int(number),
                **({"name": self.names[number]} if self.names else {}),
                "probability": float(probability),
            }
            for number, probability in pairs
        ]

    def table(self) -> str:
        """Return the first samples as lines."""
        columns, line = {
            1: ("probability  class", self._sample),
            2: ("classes of positions", self._positions),
        }.get(self.classes.ndim, ("positions of each class", self._counts))
        lines = [f"sample  {columns}"]
        lines += [f"{index:6}  {line(index)}" for index in range(min(len(self.classes), SHOWN_SAMPLES))]
        if len(self.classes) > SHOWN_SAMPLES:
            lines.append(f"({len(self.classes) - SHOWN_SAMPLES} more; --json lists all of them)")
        return "\n".join(lines) + "\n"

    def _sample(self, index: int) -> str:
        number = int(self.classes[index])
        name = f" {self.names[number]}" if self.names else ""
        return f"{self.probabilities[index]:11.4f}  {number}{name}"

    def _positions(self, index: int) -> str:
        numbers = self.classes[index]
        shown = " ".join(map(self._name, numbers[:SHOWN_POSITIONS].tolist()))
        num_more = len(numbers) - SHOWN_POSITIONS
        return f"{shown} ({num_more} more)" if num_more > 0 else shown

    def _counts(self, index: int) -> str:
        numbers, counts = np.unique(self.classes[index], return_counts=True)
        return ", ".join(
            f"{self._name(number)}: {count}" for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
        )

    def _name(self, number: int) -> str:
        return self.names[number] if self.names else str(number)

    def score(self) -> str:
        """Return the accuracy as a line; "" without labels."""
        unit = "samples" if self.classes.ndim == 1 else "positions"
        return "" if self.accuracy is None else f"accuracy {self.accuracy:.4f} of {self.num_labels} {unit}\n"


def is_of_classes(outputs: Sequence[Array]) -> bool:
    """Return whether a model has one output with at least two scores for each sample, or for each of its positions."""
    return len(outputs) == 1 and outputs[0].ndim >= 2 and outputs[0].shape[-1] > 1 and outputs[0].dtype.kind == "f"


def are_classes(labels: Array | None, logits: Array) -> bool:
    """Return whether there is a label for each row of logits, and all labels are classes."""
    if labels is None or labels.dtype.kind not in "iu" or labels.shape != logits.shape[:-1]:
        return False
    return not labels.size or bool(_least(labels) <= labels.min() <= labels.max() < logits.shape[-1])


def predictions(logits: Array, names: Sequence[str], labels: Array | None) -> Predictions:
    """Return the predictions of a model.

    Args:
        logits: Scores (n, ..., num_classes); rows that are probabilities already stay unchanged.
        names: Names of all classes; empty for none.
        labels: Classes (n, ...), -1 for a position without one; or None.

    Raises:
        InvalidInput: The number of names differs from that of the classes, or the labels do not fit.
    """
    num_classes = logits.shape[-1]
    if names and len(names) != num_classes:
        raise InvalidInput(
            f"--classes: got {counted(len(names), 'name')}, expected {num_classes}, one for each class of the model",
            code="FN-1027",
        )
    if labels is not None and not are_classes(labels, logits):
        is_shifted = are_classes(labels - 1, logits) and labels.max() == num_classes
        received = f"{labels.dtype} {labels.shape}" + (f" from {labels.min()} to {labels.max()}" if labels.size else "")
        raise InvalidInput(
            f"labels: got y {received}, expected integers {logits.shape[:-1]} from {_least(logits[..., 0])} to "
            f"{num_classes - 1}; {'count classes from 0: y - 1' if is_shifted else 'correct or remove y'}",
            code="FN-1028",
        )
    scores = logits.astype(np.float64)
    if not (scores >= 0.0).all() or not np.allclose(scores.sum(axis=-1), 1.0, atol=SUM_TOLERANCE):
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
    classes = logits.argmax(axis=-1)
    has_label = np.zeros(classes.shape, bool) if labels is None else labels != NO_TOKEN
    num_labels = int(has_label.sum())
    return Predictions(
        classes=classes,
        probabilities=np.take_along_axis(scores, classes[..., None], axis=-1)[..., 0],
        names=tuple(names),
        num_labels=num_labels,
        accuracy=float((classes == labels)[has_label].mean()) if num_labels else None,
    )


def squared_error(values: Array, targets: Array | None) -> float | None:
    """Return the mean squared error of values (n, ...); None without targets.

    A single value needs no dimension of its own in the targets: they may be (n,) for values (n, 1).

    Raises:
        InvalidInput: The targets have another shape.
    """
    if targets is None or not targets.size:
        return None
    if values.shape == (*targets.shape, 1):
        targets = targets[..., None]
    if targets.shape != values.shape:
        raise InvalidInput(
            f"labels: got y {targets.shape}, expected {values.shape} like the output; remove y", code="FN-1028"
        )
    return float(np.square(values.astype(np.float64) - targets.astype(np.float64)).mean())


def _least(labels: Array) -> int:
    """Return the least label: only a position may have none."""
    return NO_TOKEN if labels.ndim > 1 else 0


def read_names(path: Path) -> tuple[str, ...]:
    """Return the names of classes from a text file, one a line, class 0 first. Raises InvalidInput."""
    try:
        names = tuple(line.strip() for line in path.read_text(encoding="utf-8").strip().splitlines())
    except UnicodeDecodeError as exc:
        raise InvalidInput(f"{path}: not a text file in UTF-8 ({exc})", code="FN-1027") from exc
    if not names or not all(names):
        raise InvalidInput(
            f"{path}: got {len(names)} lines, some of them empty, expected the name of one class a line", code="FN-1027"
        )
    return names
