"""Quality of a Version, in float and as the int8 model that devices serve: sums over examples, and limits on the loss.

``measure`` computes these values, ``evaluations`` translates them to the integer statistics that devices upload.

Both models predict the same labels of a sample. So a limit on the accuracy that int8 costs is tested on pairs: a drop
is too large if it exceeds the limit by more than the sampling error (``LabelDrop``).

Reference:
    McNemar 1947, "Note on the sampling error of the difference between correlated proportions", Psychometrika 12(2).
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
SMALL_SPREAD: Final = 0.01
"""Share of the values' root mean square. A smaller spread counts as this share, because 8 bits do not resolve it."""

CONFIDENT: Final = 1.645
"""Standard errors of a one-sided test: a drop that equals the limit fails on 5 % of the samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelDrop:
    """The labels of a sample that int8 costs.

    The drop of b - c labels has the variance b + c - (b - c)^2 / n for b labels that only float and c labels that only
    int8 predicts correctly. Devices do not report b and c. The number of different predictions is at least b + c, so a
    test with it as the variance never fails more often.

    Attributes:
        num_labels: n, the labels that both models predict.
        num_lost: b - c, the labels that int8 costs; negative if int8 is better.
        num_different: Labels for which the two models predict different classes.
    """

    num_labels: int
    num_lost: int
    num_different: int

    @classmethod
    def of_shares(cls, num_labels: int, accuracy_float: float, accuracy_int8: float, agreement: float) -> "LabelDrop":
        """Return the drop that shares of the labels describe."""
        return cls(
            num_labels=num_labels,
            num_lost=round(accuracy_float * num_labels) - round(accuracy_int8 * num_labels),
            num_different=num_labels - round(agreement * num_labels),
        )

    @property
    def points(self) -> float:
        """Percentage points of accuracy that int8 costs; negative if int8 is better."""
        # The difference of integers is exact, so a drop that equals a limit does not exceed it by a rounding error.
        return 100.0 * self.num_lost / max(1, self.num_labels)

    @property
    def error_points(self) -> float:
        """The sampling error of ``points``."""
        return 100.0 * CONFIDENT * math.sqrt(self.num_different) / max(1, self.num_labels)

    def exceeds(self, limit: float) -> bool:
        """Return whether the drop exceeds a limit in points by more than the sampling error. NaN is no limit."""
        return not self.points - self.error_points <= limit

    def num_needed(self, limit: float) -> int:
        """Return the number of labels that judge a drop above the limit: its excess is their sampling error."""
        share = self.num_different / max(1, self.num_labels)
        return math.ceil(share * (100.0 * CONFIDENT / (self.points - limit)) ** 2)

    def __str__(self) -> str:
        return (
            f"int8 loses {self.num_lost} of {counted(self.num_labels, 'label')}, {self.points:.2f} points with a "
            f"sampling error of {self.error_points:.2f}; one label is {100.0 / max(1, self.num_labels):.2g} points"
        )


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
        return self.drop.points

    @property
    def drop(self) -> LabelDrop:
        """The labels that int8 costs."""
        return LabelDrop(
            num_labels=self.num_predictions,
            num_lost=self.num_correct_float - self.num_correct_int8,
            num_different=self.num_predictions - self.num_agreeing,
        )

    @property
    def rise_percent(self) -> float:
        """Percent that int8 adds to the squared error; negative if int8 reduces it."""
        added = self.squares_int8 - self.squares_float
        reference = max(self.squares_float, SMALL_ERROR * self.squares_wanted)
        return 100.0 * added / reference if reference else math.inf * added if added else 0.0

    def values(self, *, has_errors: bool) -> dict[str, float]:
        """Return the means of every evaluation by name.

        Args:
            has_errors: Whether the targets of a model of values have the form of its output.
        """
        num_examples = max(1, self.num_examples)
        values = {"loss": self.loss_sum / num_examples}
        if self.num_predictions:
            return values | {
                "accuracy": self.accuracy_float,
                "accuracy_int8": self.accuracy_int8,
                "int8_agreement": self.agreement,
            }
        if not has_errors:
            return values
        return values | {
            "squared_error": self.squares_float / num_examples,
            "squared_error_int8": self.squares_int8 / num_examples,
        }

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
        num_labels: Labels that both predict; 0 for a regression model.
        agreement: Share of labels for which both models predict the same class; 1.0 for a regression model.
        relative_error: Root mean square difference of the predicted values, relative to the spread of the float
            model's values, or to ``SMALL_SPREAD`` of their size; 0.0 for a classifier.
        hardly_varies: Whether the spread is smaller than that share.
    """

    num_examples: int
    num_labels: int = 0
    agreement: float = 1.0
    relative_error: float = 0.0
    hardly_varies: bool = False

    @property
    def is_good(self) -> bool:
        """Whether both are within tolerance, so that no warning is printed. A share has its sampling error."""
        error = CONFIDENT * math.sqrt(self.agreement * (1.0 - self.agreement) / max(1, self.num_labels))
        return self.agreement + error >= MIN_AGREEMENT and self.relative_error <= MAX_RELATIVE_ERROR

    def __str__(self) -> str:
        where = f"on {self.num_examples} calibration examples"
        if self.hardly_varies and self.relative_error:
            return (
                f"the outputs hardly vary: float's spread is below {100 * SMALL_SPREAD:g} % of their size, and int8 "
                f"differs by {100 * SMALL_SPREAD * self.relative_error:.2g} % of it {where}"
            )
        if self.relative_error:
            return f"int8 differs from float by {100 * self.relative_error:.2f} % of the values' spread {where}"
        return f"int8 and float agree on {100 * self.agreement:.2f} % of the labels {where}"


def check_drop(what: str, quality: Quality, max_drop: float | None = None) -> str:
    """Check that int8 does not cost too much: more than the limit and, of labels, than the sampling error above it.

    Args:
        what: The Version, for the error message.
        quality: The measured quality.
        max_drop: Limit in points of accuracy (default 1.0), or in percent of the squared error of a regression model
            (default 10.0).

    Returns:
        A note if the drop exceeds the limit within the sampling error, else "".

    Raises:
        InvalidVersion: The cost exceeds the limit.
    """
    if quality.num_predictions:
        drop, limit = quality.drop, MAX_DROP_POINTS if max_drop is None else max_drop
        is_too_large, text = (
            drop.exceeds(limit),
            f"int8 is {drop.points:.2f} points worse than float ({quality}): {drop}",
        )
    else:
        cost, limit = quality.rise_percent, MAX_RISE_PERCENT if max_drop is None else max_drop
        is_too_large = not cost <= limit
        text = f"int8's squared error is {cost:.2f} % above float's ({quality})"
        if quality.has_other_targets:
            text = (
                f"the mean square of the difference between int8's and float's outputs is {cost:.2f} % of a hundredth "
                f"of the variance of float's ({quality})"
            )
    if is_too_large:
        raise InvalidVersion(
            f"{what}: {text}, expected at most {limit:g}; export again with calibration data like the devices' data, "
            "set quantization_aware in the recipe, or allow a larger drop (fanin export --max-int8-drop)",
            code="FN-0375",
        )
    if quality.num_predictions and quality.drop_points > limit:
        return (
            f"{what}: {quality.drop}. The limit is {limit:g}, and this sample cannot judge the difference of "
            f"{quality.drop_points - limit:.2f} points; use at least {quality.drop.num_needed(limit)} labels"
        )
    return ""
