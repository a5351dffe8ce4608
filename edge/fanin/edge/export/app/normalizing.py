"""A layer that normalizes an input by the statistics of a fleet, which ``fanin stats --json FILE`` wrote.

    y = (x - mean) / std        mean and std of each feature over all devices; a feature that never varies has std 1

Mean and std are constants of the graphs: buffers, which no device trains and no Update has. So each device normalizes
alike, and the model's int8 form includes the layer.
"""

import json
from pathlib import Path
from typing import Final

import torch
from torch import nn

from fanin.edge.queries.query import ALL, CHANNEL, COLUMN
from fanin.protos.errors import InvalidInput

WRONG_FILE: Final = "FN-1868"
NUM_AXES: Final = 2
"""Axes of a batch whose examples have one axis of features."""


class Normalization(nn.Module):
    """Subtracts the means of features, and divides by their standard deviations.

    Args:
        mean: The means (num_features,).
        std: The standard deviations, above 0 (num_features,).
        by: What a feature is: one of ``fanin.edge.queries.query.FORMS``.
    """

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, mean: torch.Tensor, std: torch.Tensor, by: str) -> None:
        super().__init__()
        self._by = by
        self.register_buffer("mean", mean)
        self.register_buffer("scale", 1.0 / std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input with each feature normalized (B, ...)."""
        if self._by in (ALL, COLUMN) or x.dim() == NUM_AXES:
            return (x - self.mean) * self.scale
        shape = (-1, *(1 for _ in range(x.dim() - 2))) if self._by == CHANNEL else tuple(x.shape[1:])
        return (x - self.mean.reshape(shape)) * self.scale.reshape(shape)


def normalization(path: Path | str, source: str = "x") -> Normalization:
    """Return the layer for an input.

    Put it before the first layer of a module: ``nn.Sequential(normalization("statistics.json"), nn.Linear(64, 10))``.

    Args:
        path: The file that ``fanin stats --json FILE`` wrote.
        source: The input whose features it has.

    Raises:
        InvalidInput: The file cannot be read, lacks the input, or a number is withheld.
    """
    try:
        document = json.loads(Path(path).read_text("utf-8"))
        rows = [row for row in document["features"] if row["input"] == source]
        numbers = [(str(row["name"]), row["mean"], row["std"]) for row in rows]
        forms = {str(row["by"]) for row in rows}
    except (OSError, ValueError, LookupError, TypeError) as exc:
        raise InvalidInput(
            f"normalization: {path}: cannot be read ({type(exc).__name__}: {exc}), expected the file of fanin stats "
            "--json FILE",
            code=WRONG_FILE,
        ) from exc
    if not rows or len(forms) > 1:
        known = sorted({str(row["input"]) for row in document["features"]})
        raise InvalidInput(
            f"normalization: {path}: got the input {source!r}, expected one of {known}; ask for it with fanin stats",
            code=WRONG_FILE,
        )
    if lacking := [name for name, mean, std in numbers if not _is_number(mean) or not _is_number(std)]:
        raise InvalidInput(
            f"normalization: {path}: feature {lacking[0]!r} of {source!r} has no mean: it is withheld, or there are no "
            "values; widen its range, or ask more devices",
            code=WRONG_FILE,
        )
    means, stds = ([float(row[part]) for row in numbers] for part in (1, 2))
    return Normalization(
        torch.tensor(means, dtype=torch.float32),
        torch.tensor([std or 1.0 for std in stds], dtype=torch.float32),
        forms.pop(),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
