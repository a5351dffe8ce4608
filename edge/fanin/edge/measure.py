"""What a Version is worth, in float and as the int8 model that devices serve: one measurement for all who ask.

Devices measure it on their own examples each Round, a publisher on validation data before it signs.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from fanin.edge.bundle import Bundle
from fanin.edge.runtimes.base import Batch, Runtime
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidVersion

MAX_DROP_POINTS: Final = 1.0
"""What int8 may cost in accuracy: published per-channel quantization costs less than a point (see docs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Sums over examples: the loss in float, and how many of the labels asked for were found in either form.

    A model of values has no labels: ``num_predictions`` is 0.
    """

    num_examples: int
    loss_sum: float
    num_predictions: int
    num_correct_float: int
    num_correct_int8: int
    num_agreeing: int

    @property
    def accuracy_float(self) -> float:
        """The share of the labels that the float model found."""
        return self.num_correct_float / max(1, self.num_predictions)

    @property
    def accuracy_int8(self) -> float:
        """The share of the labels that the int8 model found."""
        return self.num_correct_int8 / max(1, self.num_predictions)

    @property
    def agreement(self) -> float:
        """The share of the labels to which both said the same."""
        return self.num_agreeing / max(1, self.num_predictions)

    @property
    def drop_points(self) -> float:
        """How many percentage points of accuracy int8 costs; below 0 where it gains."""
        return 100.0 * (self.accuracy_float - self.accuracy_int8)

    def __str__(self) -> str:
        if not self.num_predictions:
            return f"mean loss {self.loss_sum / max(1, self.num_examples):.4f} on {self.num_examples} examples"
        return (
            f"float {100 * self.accuracy_float:.2f} %, int8 {100 * self.accuracy_int8:.2f} %, "
            f"agreeing {100 * self.agreement:.2f} % on {self.num_predictions} labels"
        )


def measure(runtime: Runtime, bundle: Bundle, parameters: Float32s, batches: Iterable[Batch]) -> Measured:
    """Evaluate parameters (num_values,) in both forms.

    Raises ValueError if the loss is not finite, InvalidBundle or InvalidVersion for what the runtime cannot open.
    """
    evaluate, predict = runtime.open_evaluate(bundle), runtime.open_predict(bundle, parameters)
    sums = np.zeros(5, np.int64)  # examples, labels, correct in float, correct in int8, agreeing
    loss_sum = 0.0
    for batch in batches:
        kept = batch.mask > 0
        found = evaluate(parameters, batch)
        loss_sum += found.loss_sum
        sums[0] += int(kept.sum())
        if not bundle.manifest.num_classes:
            continue
        y, in_float = batch.y[kept], found.predicted[kept]
        in_int8 = predict(batch.x[kept]).argmax(axis=-1)
        asked = y != NO_TOKEN
        rows = (asked, (in_float == y) & asked, (in_int8 == y) & asked, (in_float == in_int8) & asked)
        sums[1:] += [int(row.sum()) for row in rows]
    if not math.isfinite(loss_sum):
        raise ValueError(
            f"the Version's loss is not finite on these examples (got {loss_sum}), expected a number; "
            "its parameters diverged, or the data does not fit"
        )
    num_examples, num_predictions, in_float_sum, in_int8_sum, agreeing = (int(value) for value in sums)
    return Measured(
        num_examples=num_examples,
        loss_sum=loss_sum,
        num_predictions=num_predictions,
        num_correct_float=in_float_sum,
        num_correct_int8=in_int8_sum,
        num_agreeing=agreeing,
    )


def check_drop(what: str, measured: Measured, max_drop_points: float) -> None:
    """Raise InvalidVersion if int8 costs more than ``max_drop_points`` of accuracy."""
    if not measured.drop_points <= max_drop_points:
        raise InvalidVersion(
            f"{what}: int8 is {measured.drop_points:.2f} points worse than float ({measured}), expected at most "
            f"{max_drop_points:g}; export anew with calibration data like what devices see, let the recipe be "
            "quantization_aware, or allow a larger drop (fanin export --max-int8-drop)"
        )
