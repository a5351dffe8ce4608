"""The metrics of a Version on a data set, from its ``evaluate`` graph in float and its ``infer`` graph in int8.

A Plan names further metrics in ``evaluation.metrics``. They run in the evaluating process only.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.metrics.metric import INT8, NO_METRICS, Metric, MetricRows, scale_of
from fanin.edge.runtimes.base import PaddedBatch, Runtime, VersionValues
from fanin.edge.runtimes.graphs import has_output_targets
from fanin.edge.runtimes.measure import measure
from fanin.protos.errors import InvalidPlan

OF_LABELS: Final = ("accuracy", "accuracy_int8", "int8_agreement", "loss")
OF_VALUES: Final = ("loss", "squared_error", "squared_error_int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionMetrics:
    """The metrics of one Version.

    Attributes:
        num_examples: Examples of the data set.
        values: The metrics by name.
    """

    num_examples: int
    values: Mapping[str, float]


def evaluate_version(
    runtime: Runtime,
    bundle: Bundle,
    version: VersionValues,
    batches: Iterable[PaddedBatch],
    metrics: Mapping[str, Metric] = NO_METRICS,
) -> VersionMetrics:
    """Evaluate a Version on a data set.

    Args:
        runtime: Runs the graphs.
        bundle: Has the graphs.
        version: The parameters of the Version (num_values,) and its ranges. Personal parameters have their initial
            values, unless the parameters are those of a device with its own (num_model_values,).
        batches: The data set.
        metrics: Further metrics by name.

    Returns:
        All models have ``loss``. A model with labels also has ``accuracy``, ``accuracy_int8`` and ``int8_agreement``.
        A model of values also has ``squared_error`` and ``squared_error_int8``, unless its targets have another shape
        than its output, or are integers. Each of these is a mean. Each further metric adds ``NAME`` and ``NAME_int8``;
        they are NaN if it has no value on this data set.

    Raises:
        ValueError: The loss is not finite, or the data does not fit the graphs.
        InvalidBundle: The runtime cannot open or run a graph.
        InvalidVersion: The parameters are not finite.
        InvalidPlan: A metric raised an error, or its value is not finite.
    """
    rows = MetricRows(metrics)
    if len(version.parameters) == bundle.manifest.table.num_values:
        version = replace(version, parameters=bundle.completed(version.parameters))
    quality = measure(runtime, bundle, version, batches, rows)
    values = quality.values(has_errors=has_output_targets(bundle.manifest)) | rows.values(bundle.manifest.num_classes)
    return VersionMetrics(num_examples=quality.num_examples, values=values)


def unknown_values(metrics: Iterable[str]) -> VersionMetrics:
    """Return NaN for each further metric: the metrics of a Version that is not evaluated."""
    names = [name + suffix for name in metrics for suffix in ("", INT8)]
    return VersionMetrics(num_examples=0, values=dict.fromkeys(names, math.nan))


def check_best(best: str, metrics: Iterable[str], *, sets: Iterable[str] = (), has_labels: bool) -> None:
    """Raise InvalidPlan unless a model can have the metric ``best``. The check needs no graph.

    Args:
        best: The metric that ranks Versions.
        metrics: The names of further metrics.
        sets: The names of test sets, each with the metrics ``SET.METRIC``.
        has_labels: Whether the model predicts labels, and no values.
    """
    names = {*(OF_LABELS if has_labels else OF_VALUES), *unknown_values(metrics).values}
    names |= {f"{each}.{name}" for each in sets for name in names}
    if best not in names:
        raise _unknown_best(best, names)


def _unknown_best(best: str, names: Iterable[str]) -> InvalidPlan:
    return InvalidPlan(f"plan: evaluation.best: got {best!r}, expected one of {sorted(names)}", code="FN-0232")


def score_of(best: str, values: Mapping[str, float], metrics: Mapping[str, Metric] = NO_METRICS) -> float:
    """Return the value that ranks Versions by the metric ``best``: larger is better.

    Raises:
        InvalidPlan: There is no such metric.
    """
    if best not in values:
        raise _unknown_best(best, values)
    return values[best] if scale_of(best, metrics).higher_is_better else -values[best]
