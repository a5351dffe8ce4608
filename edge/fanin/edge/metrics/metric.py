"""A metric of predictions, the metrics of fanin, and those of other distributions by the entry point ``fanin.metrics``.

A metric receives all predictions and targets of a data set at once, in the process that evaluates. It says whether it
wants the predicted classes or the logits.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, SupportsFloat

import numpy as np

from fanin.edge.metrics.logits import auc, ece, nll, top_k
from fanin.edge.runtimes.base import Inputs
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.edge.runtimes.measure import Observation
from fanin.edge.tensors import Float64s
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.protos.plans.keys import shown
from fanin.protos.plans.named import blamed, named

GROUP: Final = "fanin.metrics"
"""The entry point group of metrics in other distributions. An entry is a ``Metric``."""
INT8: Final = "_int8"
"""Suffix of a metric of the int8 model."""
SET_SEPARATOR: Final = "."
"""Between the name of a test set and its metric."""
PREDICTIONS: Final = "predictions"
LOGITS: Final = "logits"
FORMS: Final = (PREDICTIONS, LOGITS)
"""What a metric may want of a model."""
MetricFunction = Callable[[Inputs, Inputs], float | None]
"""Computes a metric of predictions and targets. See ``Metric.function``."""
NO_METRICS: Final[Mapping[str, "Metric"]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricScale:
    """The values that a metric can have, and whether a larger one is better."""

    higher_is_better: bool = True
    least: float = -math.inf
    most: float = math.inf


SHARE: Final = MetricScale(least=0.0, most=1.0)
DISTANCE: Final = MetricScale(higher_is_better=False, least=0.0)
OUR_VALUES: Final[Mapping[str, MetricScale]] = MappingProxyType(
    {
        # The loss of an App may be negative.
        "loss": MetricScale(higher_is_better=False),
        "accuracy": SHARE,
        "accuracy_int8": SHARE,
        "int8_agreement": SHARE,
        "squared_error": DISTANCE,
        "squared_error_int8": DISTANCE,
    }
)
"""The values of every evaluation."""


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
        least: Smallest value that the metric can have. A target below it is refused.
        most: Largest value that it can have.
        wants: ``predictions``, or ``logits``: then the first argument for a model with labels has the logits of the
            classes (n, num_classes) float32 instead of the classes. For a model of values both are its output.
    """

    function: MetricFunction
    higher_is_better: bool = True
    least: float = -math.inf
    most: float = math.inf
    wants: str = PREDICTIONS

    def __post_init__(self) -> None:
        if self.wants not in FORMS:
            raise InvalidInput(
                f"metric: wants: got {self.wants!r}, expected one of {list(FORMS)}: the classes that a model predicts, "
                "or their logits",
                code="FN-1890",
            )


def scale_of(best: str, metrics: Mapping[str, Metric]) -> MetricScale:
    """Return the scale of a metric, also of the int8 model and of a test set.

    Args:
        best: ``METRIC``, ``METRIC_int8``, or one of these of a test set, ``SET.METRIC``.
        metrics: The further metrics by name.
    """
    name = best
    while name not in OUR_VALUES and name.removesuffix(INT8) not in metrics and SET_SEPARATOR in name:
        # A name of a set may have dots.
        name = name.partition(SET_SEPARATOR)[2]
    metric = metrics.get(name.removesuffix(INT8))
    if metric is None:
        return OUR_VALUES.get(name, MetricScale())
    return MetricScale(higher_is_better=metric.higher_is_better, least=metric.least, most=metric.most)


class MetricRows:
    """The predictions of a data set, batch by batch, for some metrics.

    Args:
        metrics: The metrics by name. Without any, no prediction is kept.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self._rows: list[Observation] = []
        self._wants = {metric.wants for metric in metrics.values()}

    @property
    def needs_logits(self) -> bool:
        """See ``fanin.edge.runtimes.measure.BatchObserver``."""
        return LOGITS in self._wants

    def add(self, observation: Observation) -> None:
        """Keep a batch. See ``fanin.edge.runtimes.measure.BatchObserver``."""
        if self._metrics:
            self._rows.append(observation)

    def values(self, num_classes: int) -> dict[str, float]:
        """Return the metrics of the float model as ``NAME`` and of the int8 model as ``NAME_int8``.

        A metric that has no value on these examples is NaN.

        Args:
            num_classes: Number of labels of the model; 0 for a model of values.

        Raises:
            InvalidPlan: A metric raised an error, or its value is not finite. Or it wants logits, and the graph does
                not return them.
        """
        if not self._rows:
            return {}
        forms = {wants: self._arrays(wants, num_classes) for wants in self._wants}
        values = {}
        for name, metric in self._metrics.items():
            arrays = forms[metric.wants]
            if arrays is None:
                raise InvalidPlan(
                    f"metric {name!r}: wants logits, and the graph 'evaluate' of this bundle has no output 'logits'; "
                    "export the App again, or add the output to the graph for fanin assemble",
                    code="FN-1891",
                )
            targets, *outputs = arrays
            for suffix, output in zip(("", INT8), outputs, strict=True):
                values[name + suffix] = value_of(name, metric, output, targets)
        return values

    def _arrays(self, wants: str, num_classes: int) -> tuple[Inputs, Inputs, Inputs] | None:
        """Return the targets, and the outputs of the float and of the int8 model; None without logits."""
        if wants == LOGITS and num_classes:
            rows = [
                (each.labels, each.logits, each.logits_int8)
                for each in self._rows
                if each.labels is not None and each.logits is not None and each.logits_int8 is not None
            ]
            if len(rows) < len(self._rows):
                return None
            labels, logits, logits_int8 = (np.concatenate(column) for column in zip(*rows, strict=True))
            return labels, logits, logits_int8
        columns = zip(*((each.targets, each.in_float, each.in_int8) for each in self._rows), strict=True)
        targets, in_float, in_int8 = (np.concatenate(column) for column in columns)
        if not num_classes:
            return targets, in_float, in_int8
        has_label = targets != NO_TOKEN
        return targets[has_label], in_float[has_label], in_int8[has_label]


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


def value_of(name: str, metric: Metric, predictions: Inputs, targets: Inputs) -> float:
    """Return the value of a metric; NaN if it is None, or without examples.

    Raises InvalidPlan if it raised an error or is no finite number.
    """
    if not len(targets):
        return math.nan
    advice = "correct its function, or remove the metric"
    with blamed(f"metric {name!r}", advice):
        result: object = metric.function(_unchangeable(predictions), _unchangeable(targets))
        if result is None:
            return math.nan
        value = math.nan
        # ``float`` also accepts a text, and a comparison of all examples.
        if isinstance(result, SupportsFloat) and not isinstance(result, str | bool | np.bool_):
            value = float(result)
    if not math.isfinite(value):
        raise InvalidPlan(f"metric {name!r}: got {shown(result)}, expected a finite number; {advice}", code="FN-0390")
    return value


def _unchangeable(array: Inputs) -> Inputs:
    """Return a view through which a metric cannot change the values that the next metric reads."""
    view = array.view()
    view.flags.writeable = False
    return view


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

    return Metric(function=recall, least=0.0, most=1.0)


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
        "nll": Metric(function=nll, higher_is_better=False, least=0.0, wants=LOGITS),
        "auc": Metric(function=auc, least=0.0, most=1.0, wants=LOGITS),
        "ece": Metric(function=ece, higher_is_better=False, least=0.0, most=1.0, wants=LOGITS),
        **{
            f"top{num}_accuracy": Metric(function=top_k(num), least=0.0, most=1.0, wants=LOGITS)
            for num in (2, 3, 5, 10)
        },
        "macro_f1": Metric(function=macro_f1, least=0.0, most=1.0),
        "balanced_accuracy": Metric(function=balanced_accuracy, least=0.0, most=1.0),
        "absolute_error": Metric(function=absolute_error, higher_is_better=False, least=0.0),
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
