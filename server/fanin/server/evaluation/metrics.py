"""The metrics of a Version on a data set, from its ``evaluate`` graph in float and its ``infer`` graph in int8.

A Plan names further metrics in ``evaluation.metrics``: ours (``METRICS``), or those of other distributions by the entry
point group ``fanin.metrics``. They run in the evaluating process only.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.base import Inputs, PaddedBatch, Runtime
from fanin.edge.runtimes.graphs import NO_TOKEN, has_output_targets
from fanin.edge.runtimes.measure import measure
from fanin.edge.runtimes.quality import Quality
from fanin.edge.tensors import Float32s, Float64s
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans.named import blamed, named

GROUP: Final = "fanin.metrics"
"""The entry point group of metrics in other distributions. An entry is a ``Metric``."""
INT8: Final = "_int8"
"""Suffix of a metric of the int8 model."""
LOWER_IS_BETTER: Final = frozenset({"loss", "squared_error", "squared_error_int8"})
"""The metrics of every model of which the smallest value is the best."""
OUR_VALUES: Final = LOWER_IS_BETTER | {"accuracy", "accuracy_int8", "int8_agreement"}
NO_METRICS: Final[Mapping[str, "Metric"]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of predictions.

    Attributes:
        function: A function ``(predictions, targets) -> value`` of all examples at once. A model with labels has int32
            classes of the shape (n,), for sequences those of all labelled positions. A model of values has float32
            values of the shape (n, ...), as its output has and as the targets have. The result is a finite number.
        higher_is_better: Whether a larger value is better.
    """

    function: Callable[[Inputs, Inputs], float]
    higher_is_better: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionMetrics:
    """The metrics of one Version.

    Attributes:
        num_examples: Examples of the data set.
        values: The metrics by name.
    """

    num_examples: int
    values: Mapping[str, float]


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
                f"not end in {INT8}: these values are always computed"
            )
        metric = named("evaluation.metrics", name, METRICS, GROUP)
        if not isinstance(metric, Metric):
            raise InvalidPlan(
                f"plan: evaluation.metrics: {name!r}: got {type(metric).__name__}, expected a Metric; correct that "
                "package"
            )
        metrics[name] = metric
    return metrics


def evaluate_version(
    runtime: Runtime,
    bundle: Bundle,
    parameters: Float32s,
    batches: Iterable[PaddedBatch],
    metrics: Mapping[str, Metric] = NO_METRICS,
) -> VersionMetrics:
    """Evaluate a Version on a data set.

    Args:
        runtime: Runs the graphs.
        bundle: Has the graphs.
        parameters: The parameters of the Version (num_values,).
        batches: The data set.
        metrics: Further metrics by name.

    Returns:
        ``loss``, and for a model with labels ``accuracy``, ``accuracy_int8`` and ``int8_agreement``, or for a model of
        values ``squared_error`` and ``squared_error_int8``, each a mean, unless its targets have another shape than its
        output. Each further metric adds ``NAME`` and ``NAME_int8``.

    Raises:
        ValueError: The loss is not finite, or the data does not fit the graphs.
        InvalidBundle: The runtime cannot open or run a graph.
        InvalidVersion: The parameters are not finite.
        InvalidPlan: A metric raised an error, or its value is not finite.
    """
    rows: list[tuple[Inputs, Inputs, Inputs]] = []

    def observe(targets: Inputs, in_float: Inputs, in_int8: Inputs) -> None:
        if metrics:
            rows.append((targets, in_float, in_int8))

    quality = measure(runtime, bundle, parameters, batches, observe)
    values = _values(quality, has_output_targets(bundle.manifest))
    if metrics:
        targets, in_float, in_int8 = (np.concatenate(column) for column in zip(*rows, strict=True))
        has_label = targets != NO_TOKEN if bundle.manifest.num_classes else np.full(len(targets), True)
        for name, metric in metrics.items():
            for suffix, predictions in (("", in_float), (INT8, in_int8)):
                values[name + suffix] = value_of(name, metric, predictions[has_label], targets[has_label])
    return VersionMetrics(num_examples=quality.num_examples, values=values)


def unknown_values(metrics: Iterable[str]) -> VersionMetrics:
    """Return NaN for each further metric: the metrics of a Version that is not evaluated."""
    names = [name + suffix for name in metrics for suffix in ("", INT8)]
    return VersionMetrics(num_examples=0, values=dict.fromkeys(names, math.nan))


def value_of(name: str, metric: Metric, predictions: Inputs, targets: Inputs) -> float:
    """Return the value of a metric. Raises InvalidPlan if it raised an error or is not finite."""
    with blamed(f"plan: evaluation.metrics: {name!r}", "remove the metric, or correct its package"):
        value = float(metric.function(predictions, targets))
    if not math.isfinite(value):
        raise InvalidPlan(
            f"plan: evaluation.metrics: {name!r}: got {value}, expected a finite number; remove the metric, or correct "
            "its package"
        )
    return value


def score_of(best: str, values: Mapping[str, float], metrics: Mapping[str, Metric] = NO_METRICS) -> float:
    """Return the value that ranks Versions by the metric ``best``: larger is better.

    Raises:
        InvalidPlan: There is no such metric.
    """
    if best not in values:
        raise InvalidPlan(f"plan: evaluation.best: got {best!r}, expected one of {sorted(values)}")
    metric = metrics.get(best.removesuffix(INT8))
    is_lower = best in LOWER_IS_BETTER if metric is None else not metric.higher_is_better
    return -values[best] if is_lower else values[best]


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


def absolute_error(predictions: Inputs, targets: Inputs) -> float:
    """Return the mean absolute error of values."""
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
    if targets.dtype.kind != "i":
        raise ValueError(f"got targets of {targets.dtype}, expected labels; choose a metric of values")
    size = int(max(predictions.max(), targets.max())) + 1
    correct = targets[predictions == targets]
    hits, predicted, wanted = (
        np.bincount(row, minlength=size).astype(float) for row in (correct, predictions, targets)
    )
    return hits, predicted, wanted


def _values(quality: Quality, has_errors: bool) -> dict[str, float]:
    num_examples = max(1, quality.num_examples)
    values = {"loss": quality.loss_sum / num_examples}
    if quality.num_predictions:
        return values | {
            "accuracy": quality.accuracy_float,
            "accuracy_int8": quality.accuracy_int8,
            "int8_agreement": quality.agreement,
        }
    if not has_errors:
        return values
    return values | {
        "squared_error": quality.squares_float / num_examples,
        "squared_error_int8": quality.squares_int8 / num_examples,
    }
