"""Logits as predictions: the class of each sample, its name and probability, and the accuracy for labels."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from fanin.edge.tensors import Array
from fanin.protos.errors import InvalidInput

SHOWN_SAMPLES: Final = 20
SUM_TOLERANCE: Final = 0.02
"""Distance of a sum of probabilities from 1: int8 outputs are coarse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Predicted classes (n,), their probabilities (n,), names by class, and the accuracy if there are labels.

    ``names`` is empty for classes without names.
    """

    classes: Array
    probabilities: Array
    names: tuple[str, ...]
    accuracy: float | None

    def rows(self) -> list[dict[str, object]]:
        """Return the JSON row of each sample."""
        return [
            {
                "class": int(number),
                **({"name": self.names[number]} if self.names else {}),
                "probability": float(probability),
            }
            for number, probability in zip(self.classes, self.probabilities, strict=True)
        ]

    def table(self) -> str:
        """Return the first samples as lines."""
        lines = ["sample  probability  class"]
        for index, number in enumerate(self.classes[:SHOWN_SAMPLES]):
            name = f" {self.names[number]}" if self.names else ""
            lines.append(f"{index:6}  {self.probabilities[index]:11.4f}  {number}{name}")
        if len(self.classes) > SHOWN_SAMPLES:
            lines.append(f"({len(self.classes) - SHOWN_SAMPLES} more; --json lists all of them)")
        return "\n".join(lines) + "\n"

    def score(self) -> str:
        """Return the accuracy as a line; "" without labels."""
        return "" if self.accuracy is None else f"accuracy {self.accuracy:.4f} of {len(self.classes)} samples\n"


def is_of_classes(outputs: Sequence[Array]) -> bool:
    """Return whether a model has one output with a row of at least two scores for each sample."""
    return len(outputs) == 1 and outputs[0].ndim == 2 and outputs[0].shape[1] > 1 and outputs[0].dtype.kind == "f"


def are_classes(labels: Array | None, num_classes: int) -> bool:
    """Return whether all labels are classes; False for None."""
    return labels is not None and (not len(labels) or bool(0 <= labels.min() <= labels.max() < num_classes))


def predictions(logits: Array, names: Sequence[str], labels: Array | None) -> Predictions:
    """Return the predictions of a model.

    Args:
        logits: Scores (n, num_classes); rows that are probabilities already stay unchanged.
        names: Names of all classes; empty for none.
        labels: Classes (n,), or None.

    Raises:
        InvalidInput: The number of names differs from that of the classes, or a label is no class.
    """
    num_classes = logits.shape[1]
    if names and len(names) != num_classes:
        raise InvalidInput(
            f"--classes: got {len(names)} names, expected {num_classes}, one for each class of the model"
        )
    if labels is not None and not are_classes(labels, num_classes):
        raise InvalidInput(
            f"labels: got classes from {labels.min()} to {labels.max()}, expected 0 to {num_classes - 1}"
        )
    scores = logits.astype(np.float64)
    if not (scores >= 0.0).all() or not np.allclose(scores.sum(axis=1), 1.0, atol=SUM_TOLERANCE):
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    classes = logits.argmax(axis=1)
    return Predictions(
        classes=classes,
        probabilities=scores[np.arange(len(classes)), classes],
        names=tuple(names),
        accuracy=None if labels is None or not len(labels) else float((classes == labels).mean()),
    )


def read_names(path: Path) -> tuple[str, ...]:
    """Return the names of classes from a text file, one a line, class 0 first. Raises InvalidInput."""
    try:
        names = tuple(line.strip() for line in path.read_text(encoding="utf-8").strip().splitlines())
    except UnicodeDecodeError as exc:
        raise InvalidInput(f"{path}: not a text file in UTF-8 ({exc})") from exc
    if not names or not all(names):
        raise InvalidInput(f"{path}: got {len(names)} lines, some of them empty, expected the name of one class a line")
    return names
