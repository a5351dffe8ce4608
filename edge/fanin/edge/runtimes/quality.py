"""Quality of a Version, in float and as the int8 model that devices serve: sums over examples, and limits on the loss.

``measure`` computes these values, ``evaluations`` translates them to the integer statistics that devices upload.
"""

import math
from dataclasses import dataclass
from typing import Final

from fanin.protos.errors import InvalidVersion
from fanin.protos.texts import counted

MAX_DROP_POINTS: Final = 1.0
"""Points of accuracy that int8 may cost. Published per-channel quantization costs less than one point."""
MAX_RISE_PERCENT: Final = 10.0
"""Percent that int8 may add to the squared error of a regression model."""
SMALL_ERROR: Final = 0.01
"""Share of the targets' variance. A smaller squared error counts as this share, because 8 bits do not resolve it."""
MIN_AGREEMENT: Final = 0.97
"""Share of labels on which float and int8 should choose the same class. If they differ, both classes are almost equally
likely, so a lower agreement costs less accuracy than it suggests."""
MAX_RELATIVE_ERROR: Final = 0.05
"""Largest difference between float and int8 values, relative to the spread of the float values. Its square is a quarter
of ``SMALL_ERROR``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Sums over examples with known targets.

    A classifier has labels and uses the ``num_`` fields. A regression model has none: ``num_predictions`` is 0, and the
    ``squares_`` fields hold its errors. If its targets have another form than its output (``has_other_targets``), the
    float model's values stand for the targets: ``squares_float`` is 0.0.

    Attributes:
        num_examples: Examples that were evaluated.
        loss_sum: Sum of the float model's loss.
        num_predictions: Labels: one per example, or one per position of a sequence that has one.
        num_correct_float: Labels that the float model predicts correctly.
        num_correct_int8: Labels that the int8 model predicts correctly.
        num_agreeing: Labels for which both models predict the same class.
        squares_float: Sum of the float model's squared errors.
        squares_int8: Sum of the int8 model's squared errors.
        squares_wanted: Sum of the targets' squared distances from their mean.
        loss_sum_int8: Sum of the loss for the int8 model's values; None if unknown. Only an export has the loss itself.
        loss_sum_constant: Sum of the loss for the best output that is the same for all examples; None if unknown. Only
            an export has it.
        has_other_targets: Whether the targets have another form than the output. A measurement knows it; devices do not
            report it.
    """

    num_examples: int
    loss_sum: float
    num_predictions: int = 0
    num_correct_float: int = 0
    num_correct_int8: int = 0
    num_agreeing: int = 0
    squares_float: float = 0.0
    squares_int8: float = 0.0
    squares_wanted: float = 0.0
    loss_sum_int8: float | None = None
    loss_sum_constant: float | None = None
    has_other_targets: bool = False

    @property
    def loss_rise(self) -> float | None:
        """The mean loss that int8 adds; negative if int8 reduces it, and None if it is unknown."""
        return None if self.loss_sum_int8 is None else (self.loss_sum_int8 - self.loss_sum) / max(1, self.num_examples)

    @property
    def accuracy_float(self) -> float:
        """Share of the labels that the float model predicts correctly."""
        return self.num_correct_float / max(1, self.num_predictions)

    @property
    def accuracy_int8(self) -> float:
        """Share of the labels that the int8 model predicts correctly."""
        return self.num_correct_int8 / max(1, self.num_predictions)

    @property
    def agreement(self) -> float:
        """Share of the labels for which both models predict the same class."""
        return self.num_agreeing / max(1, self.num_predictions)

    @property
    def drop_points(self) -> float:
        """Percentage points of accuracy that int8 costs; negative if int8 is better."""
        # The difference of integers is exact, so a drop that equals a limit does not exceed it by a rounding error.
        return 100.0 * (self.num_correct_float - self.num_correct_int8) / max(1, self.num_predictions)

    @property
    def rise_percent(self) -> float:
        """Percent that int8 adds to the squared error; negative if int8 reduces it."""
        added = self.squares_int8 - self.squares_float
        reference = max(self.squares_float, SMALL_ERROR * self.squares_wanted)
        return 100.0 * added / reference if reference else math.inf * added if added else 0.0

    def __str__(self) -> str:
        if not self.num_predictions:
            in_int8 = "" if self.loss_rise is None else f" (int8 {self.loss_rise:+.4f})"
            loss = f"mean loss {self.loss_sum / max(1, self.num_examples):.4f}{in_int8}"
            cost = f"int8's squared error {self.rise_percent:+.2f} %"
            if self.has_other_targets:
                cost = f"int8's outputs differ from float's by {self.rise_percent:.2f} %"
            return f"{loss} on {counted(self.num_examples, 'example')}, {cost}"
        return (
            f"float {100 * self.accuracy_float:.2f} %, int8 {100 * self.accuracy_int8:.2f} %, "
            f"agreeing {100 * self.agreement:.2f} % on {counted(self.num_predictions, 'label')}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Difference between the float and the int8 model on the same inputs, without targets.

    Attributes:
        num_examples: Examples that were compared.
        agreement: Share of labels for which both models predict the same class; 1.0 for a regression model.
        relative_error: Root mean square difference of the predicted values, relative to the spread of the float
            model's values; 0.0 for a classifier.
    """

    num_examples: int
    agreement: float = 1.0
    relative_error: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether both are within tolerance, so that no warning is printed."""
        return self.agreement >= MIN_AGREEMENT and self.relative_error <= MAX_RELATIVE_ERROR

    def __str__(self) -> str:
        where = f"on {self.num_examples} calibration examples"
        if self.relative_error:
            return f"int8 differs from float by {100 * self.relative_error:.2f} % of the values' spread {where}"
        return f"int8 and float agree on {100 * self.agreement:.2f} % of the labels {where}"


def check_drop(what: str, quality: Quality, max_drop: float | None = None) -> None:
    """Check that int8 does not cost too much.

    Args:
        what: The Version, for the error message.
        quality: The measured quality.
        max_drop: Limit in points of accuracy (default 1.0), or in percent of the squared error of a regression model
            (default 10.0).

    Raises:
        InvalidVersion: The cost exceeds the limit.
    """
    if quality.num_predictions:
        cost, limit = quality.drop_points, MAX_DROP_POINTS if max_drop is None else max_drop
        text = f"int8 is {cost:.2f} points worse than float ({quality})"
    else:
        cost, limit = quality.rise_percent, MAX_RISE_PERCENT if max_drop is None else max_drop
        text = f"int8's squared error is {cost:.2f} % above float's ({quality})"
        if quality.has_other_targets:
            text = (
                f"the mean square of the difference between int8's and float's outputs is {cost:.2f} % of a hundredth "
                f"of the variance of float's ({quality})"
            )
    if not cost <= limit:
        raise InvalidVersion(
            f"{what}: {text}, expected at most {limit:g}; export again with calibration data like the devices' data, "
            "set quantization_aware in the recipe, or allow a larger drop (fanin export --max-int8-drop)"
        )
