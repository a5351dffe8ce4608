"""What a Version is worth, in float and as the int8 model that devices serve: one measurement for all who ask.

Devices measure it on their own examples each Round, a publisher on validation data before it signs. Where there is no
such data the two forms are compared with each other.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.base import Batch, Inputs, Runtime
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidVersion

MAX_DROP_POINTS: Final = 1.0
"""What int8 may cost in accuracy: published per-channel quantization costs less than a point (see docs)."""
MAX_RISE_PERCENT: Final = 10.0
"""What int8 may add to a model of values' squared error."""
SMALL_ERROR: Final = 0.01
"""Of the wanted values' variance: a smaller error counts as this. To 8 bits a hundredth and a thousandth are alike."""
MIN_AGREEMENT: Final = 0.97
"""Float and int8 should choose the same class so often. Where they part the choice is close, and costs less."""
MAX_RELATIVE_ERROR: Final = 0.05
"""Between float and int8 values, of the float values' spread: its square is a quarter of ``SMALL_ERROR``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Sums over examples: the loss in float, and how many of the labels asked for were found in either form.

    A model of values has no labels: ``num_predictions`` is 0, and ``squares_float`` and ``squares_int8`` sum up the
    squared errors of all values in either form, ``squares_wanted`` what the wanted values are from their mean.
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
        # Of whole numbers, so that what is just at a limit is not beyond it by a rounding.
        return 100.0 * (self.num_correct_float - self.num_correct_int8) / max(1, self.num_predictions)

    @property
    def rise_percent(self) -> float:
        """How many percent of the squared error int8 adds to it; below 0 where it takes some away."""
        added, held = self.squares_int8 - self.squares_float, max(self.squares_float, SMALL_ERROR * self.squares_wanted)
        return 100.0 * added / held if held else math.inf * added if added else 0.0

    def __str__(self) -> str:
        if not self.num_predictions:
            return (
                f"mean loss {self.loss_sum / max(1, self.num_examples):.4f} on {self.num_examples} examples, "
                f"int8's squared error {self.rise_percent:+.2f} %"
            )
        return (
            f"float {100 * self.accuracy_float:.2f} %, int8 {100 * self.accuracy_int8:.2f} %, "
            f"agreeing {100 * self.agreement:.2f} % on {self.num_predictions} labels"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What both forms say to the same inputs, whatever is right.

    ``agreement`` is the share of classes or tokens that both chose (1.0 for a model of values); ``relative_error`` the
    root of the mean squared difference of their values, of the float values' spread (0.0 for a model of classes).
    """

    num_examples: int
    agreement: float = 1.0
    relative_error: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether they are near enough for nobody to be told."""
        return self.agreement >= MIN_AGREEMENT and self.relative_error <= MAX_RELATIVE_ERROR

    def __str__(self) -> str:
        where = f"on {self.num_examples} calibration examples"
        if self.relative_error:
            return f"int8 is {100 * self.relative_error:.2f} % of their spread off float's values {where}"
        return f"int8 says what float says in {100 * self.agreement:.2f} % {where}"


def measure(runtime: Runtime, bundle: Bundle, parameters: Float32s, batches: Iterable[Batch]) -> Measured:
    """Evaluate parameters (num_values,) in both forms.

    Raises ValueError if the loss is not finite, InvalidBundle or InvalidVersion for what the runtime cannot open.
    """
    sums = np.zeros(5, np.int64)  # examples, labels, correct in float, correct in int8, agreeing
    squares, spread = np.zeros(2), _Spread()
    loss_sum = 0.0
    for said in _both(runtime, bundle, parameters, batches):
        loss_sum += said.loss_sum
        sums[0] += len(said.y)
        if bundle.manifest.num_classes:
            asked = said.y != NO_TOKEN
            in_float, in_int8 = (said.in_float == said.y) & asked, (said.in_int8 == said.y) & asked
            rows = (asked, in_float, in_int8, (said.in_float == said.in_int8) & asked)
            sums[1:] += [int(row.sum()) for row in rows]
        else:
            squares += [_squares(said.in_float, said.y), _squares(said.in_int8, said.y)]
            spread.add(said.y)
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
        squares_float=float(squares[0]),
        squares_int8=float(squares[1]),
        squares_wanted=spread.squares,
    )


def compare(runtime: Runtime, bundle: Bundle, parameters: Float32s, batches: Iterable[Batch]) -> Compared:
    """Ask both forms; what the batches' y holds does not matter. Raises as ``measure`` does."""
    num_examples, num_said, num_agreeing, squares, spread = 0, 0, 0, 0.0, _Spread()
    for said in _both(runtime, bundle, parameters, batches):
        num_examples += len(said.y)
        num_said += said.in_float.size
        if bundle.manifest.num_classes:
            num_agreeing += int((said.in_float == said.in_int8).sum())
        else:
            squares += _squares(said.in_int8, said.in_float)
            spread.add(said.in_float)
    if bundle.manifest.num_classes:
        return Compared(num_examples=num_examples, agreement=num_agreeing / max(1, num_said))
    if not spread.squares:
        return Compared(num_examples=num_examples, relative_error=math.inf if squares else 0.0)
    return Compared(num_examples=num_examples, relative_error=math.sqrt(squares / spread.squares))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What both forms said to the samples of one batch that count: classes, tokens or values; and what they should."""

    loss_sum: float
    y: Inputs
    in_float: Inputs
    in_int8: Inputs


def _both(runtime: Runtime, bundle: Bundle, parameters: Float32s, batches: Iterable[Batch]) -> Iterator[_Said]:
    evaluate, predict = runtime.open_evaluate(bundle), runtime.open_predict(bundle, parameters)
    for batch in batches:
        kept = batch.mask > 0
        found, said = evaluate(parameters, batch), predict(batch.x[kept])
        chosen: Inputs = said.argmax(axis=-1).astype(np.int32) if bundle.manifest.num_classes else said
        yield _Said(loss_sum=found.loss_sum, y=batch.y[kept], in_float=found.predicted[kept], in_int8=chosen)


def _squares(got: Inputs, wanted: Inputs) -> float:
    return float(np.square(got.astype(np.float64) - wanted).sum())


class _Spread:
    """The squared differences of values (n, ...) from their mean over n, batch by batch.

    They are taken from the first batch's mean, so that what all values have in common does not swallow the rest.
    """

    def __init__(self) -> None:
        self._num = 0
        self._origin: npt.NDArray[np.float64] | None = None
        self._sums = np.zeros(())
        self._squares = np.zeros(())

    def add(self, values: Inputs) -> None:
        if not len(values):
            return
        exact = values.astype(np.float64)
        if self._origin is None:
            self._origin = exact.mean(axis=0)
        moved = exact - self._origin
        self._num += len(values)
        self._sums = self._sums + moved.sum(axis=0)
        self._squares = self._squares + np.square(moved).sum(axis=0)

    @property
    def squares(self) -> float:
        """Their sum over all values."""
        return float((self._squares - np.square(self._sums) / max(1, self._num)).clip(min=0.0).sum())


def check_drop(what: str, measured: Measured, max_drop: float | None = None) -> None:
    """Raise InvalidVersion if int8 costs more than ``max_drop``: points of accuracy (by default 1.0), or percent of a
    model of values' squared error (10.0)."""
    if measured.num_predictions:
        cost, limit = measured.drop_points, MAX_DROP_POINTS if max_drop is None else max_drop
        said = f"int8 is {cost:.2f} points worse than float ({measured})"
    else:
        cost, limit = measured.rise_percent, MAX_RISE_PERCENT if max_drop is None else max_drop
        said = f"int8's squared error is {cost:.2f} % above float's ({measured})"
    if not cost <= limit:
        raise InvalidVersion(
            f"{what}: {said}, expected at most {limit:g}; export anew with calibration data like what devices see, "
            "let the recipe be quantization_aware, or allow a larger drop (fanin export --max-int8-drop)"
        )
