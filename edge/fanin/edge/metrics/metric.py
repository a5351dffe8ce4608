"""A metric of predictions, the metrics of fanin, and those of other distributions by the entry point ``fanin.metrics``.

A metric receives all predictions and targets of a data set at once, in the process that evaluates.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, SupportsFloat

import numpy as np

from fanin.edge.runtimes.base import Inputs
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.edge.tensors import Float64s
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans.keys import shown
from fanin.protos.plans.named import blamed, named

GROUP: Final = "fanin.metrics"
"""The entry point group of metrics in other distributions. An entry is a ``Metric``."""
INT8: Final = "_int8"
"""Suffix of a metric of the int8 model."""
OUR_VALUES: Final = frozenset(
    {"loss", "accuracy", "accuracy_int8", "int8_agreement", "squared_error", "squared_error_int8"}
)
"""The values of every evaluation."""
MetricFunction = Callable[[Inputs, Inputs], float | None]
"""Computes a metric of predictions and targets. See ``Metric.function``."""
NO_METRICS: Final[Mapping[str, "Metric"]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of predictions.

    Attributes:
        function: A function ``(predictions, targets) -> value`` of all examples at once. A model with labels has int32
            classes of the shape (n,), for sequences those of all labelled positions. A model of values has float32
            values of the shape (n, ...), as its output has and as the targets have. Declared targets of an App may have
            another shape, and may be int32. The result is a finite number, or None if these examples do not determine
            the metric, such as the recall of a class that they lack.
        higher_is_better: Whether a larger value is better.
    """

    function: MetricFunction
    higher_is_better: bool = True


class MetricRows:
    """The predictions of a data set, batch by batch, for some metrics.

    Args:
        metrics: The metrics by name. Without any, no prediction is kept.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self._rows: list[tuple[Inputs, Inputs, Inputs]] = []

    def add(self, targets: Inputs, in_float: Inputs, in_int8: Inputs) -> None:
        """Keep a batch. See ``fanin.edge.runtimes.measure.Observe``."""
        if self._metrics:
            self._rows.append((targets, in_float, in_int8))

    def values(self, num_classes: int) -> dict[str, float]:
        """Return the metrics of the float model as ``NAME`` and of the int8 model as ``NAME_int8``. None is left out.

        Args:
            num_classes: Number of labels of the model; 0 for a model of values.

        Raises:
            InvalidPlan: A metric raised an error, or its value is not finite.
        """
        if not self._rows:
            return {}
        targets, in_float, in_int8 = (np.concatenate(column) for column in zip(*self._rows, strict=True))
        has_label = targets != NO_TOKEN if num_classes else np.full(len(targets), True)
        values = {
            name + suffix: value_of(name, metric, predictions[has_label], targets[has_label])
            for name, metric in self._metrics.items()
            for suffix, predictions in (("", in_float), (INT8, in_int8))
        }
        return {name: value for name, value in values.items() if value is not None}


def metrics_of(names: Iterable[str]) -> dict[str, Metric]:
    """Return the metrics of a Plan by name.

    Raises:
        InvalidPlan: A metric is not installed, is no ``Metric``, or its name is that of another value.
    """
    metrics = {}
    for name in names:
        if name in OUR_VALUES or name.endswith(INT8):
            raise InvalidPlan(
                f"plan: evaluation.metrics: got {name!r}, expected a name that is not in {sorted(OUR_VALUES)} and does "
                f"not end in {INT8}: these values are always computed",
                code="FN-0229",
            )
        metric = class_recall(name) or named("evaluation.metrics", name, METRICS, GROUP)
        if not isinstance(metric, Metric):
            raise InvalidPlan(
                f"plan: evaluation.metrics: {name!r}: got {type(metric).__name__}, expected a Metric; correct that "
                "package",
                code="FN-0214",
            )
        metrics[name] = metric
    return metrics


def value_of(name: str, metric: Metric, predictions: Inputs, targets: Inputs) -> float | None:
    """Return the value of a metric, or None. Raises InvalidPlan if it raised an error or is no finite number."""
    advice = "correct its function, or remove the metric"
    with blamed(f"metric {name!r}", advice):
        result: object = metric.function(predictions, targets)
        if result is None:
            return None
        value = math.nan
        # ``float`` also accepts a text, and a comparison of all examples.
        if isinstance(result, SupportsFloat) and not isinstance(result, str | bool | np.bool_):
            value = float(result)
    if not math.isfinite(value):
        raise InvalidPlan(f"metric {name!r}: got {shown(result)}, expected a finite number; {advice}", code="FN-0390")
    return value


def macro_f1(predictions: Inputs, targets: Inputs) -> float:
    """Return the mean F1 of the classes that occur in the targets or in the predictions."""
    hits, num_predicted, num_targets = _counts(predictions, targets)
    occurs = num_predicted + num_targets > 0
    return float((2 * hits[occurs] / (num_predicted + num_targets)[occurs]).mean())


def balanced_accuracy(predictions: Inputs, targets: Inputs) -> float:
    """Return the mean recall of the classes that occur in the targets."""
    hits, _, num_targets = _counts(predictions, targets)
    occurs = num_targets > 0
    return float((hits[occurs] / num_targets[occurs]).mean())


def class_recall(name: str) -> Metric | None:
    """Return the metric ``recall_K``, the share of class K that is predicted correctly; None for another name.

    It is None on examples that lack the class.
    """
    match = re.fullmatch(r"recall_(0|[1-9]\d{0,8})", name)
    if match is None:
        return None
    number = int(match.group(1))

    def recall(predictions: Inputs, targets: Inputs) -> float | None:
        is_ours = targets == number
        return float((predictions[is_ours] == number).mean()) if is_ours.any() else None

    return Metric(function=recall)


def absolute_error(predictions: Inputs, targets: Inputs) -> float:
    """Return the mean absolute error of values.

    Raises:
        ValueError: The arrays have labels, or other shapes. Broadcasting them would return a meaningless number.
    """
    if predictions.dtype.kind != "f":
        raise ValueError(f"got predictions of {predictions.dtype}, expected values; choose a metric of labels")
    if predictions.shape != targets.shape:
        raise ValueError(
            f"got predictions {predictions.shape} and targets {targets.shape}, expected equal shapes; write a metric "
            "for targets of another form"
        )
    return float(np.abs(predictions.astype(np.float64) - targets).mean())


METRICS: Final = MappingProxyType(
    {
        "macro_f1": Metric(function=macro_f1),
        "balanced_accuracy": Metric(function=balanced_accuracy),
        "absolute_error": Metric(function=absolute_error, higher_is_better=False),
    }
)
"""The further metrics of fanin by name."""


def _counts(predictions: Inputs, targets: Inputs) -> tuple[Float64s, Float64s, Float64s]:
    """Return for each class the correct predictions, all predictions and all targets."""
    for name, array in (("targets", targets), ("predictions", predictions)):
        if array.dtype.kind != "i":
            raise ValueError(f"got {name} of {array.dtype}, expected labels; choose a metric of values")
    size = int(max(predictions.max(), targets.max())) + 1
    correct = targets[predictions == targets]
    hits, predicted, wanted = (
        np.bincount(row, minlength=size).astype(float) for row in (correct, predictions, targets)
    )
    return hits, predicted, wanted
