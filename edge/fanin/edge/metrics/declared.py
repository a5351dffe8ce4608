"""The metrics that a Plan asks of devices, as statistics on the validation part.

``evaluate.NAME`` is of the Version with what the Round trains, ``global.NAME`` of the global model, and
``personal.NAME`` of the device's own model. A device reports value x validation examples in units of 2^-16, of the
float model as ``evaluate.NAME`` and of the int8 model as ``evaluate.NAME_int8``. The coordinator sums these counts, so
it has the mean over all validation examples.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

from fanin.edge.bundles.manifest import Manifest
from fanin.edge.metrics.metric import INT8, OUR_VALUES, Metric, MetricRows, metrics_of
from fanin.edge.runtimes.evaluations import OF_VALIDATIONS, metric_count
from fanin.edge.runtimes.graphs import has_output_targets
from fanin.edge.runtimes.measure import Observation
from fanin.edge.runtimes.quality import Quality
from fanin.protos.errors import InvalidPlan

LOG = logging.getLogger("fanin.edge.metrics")


def declared_metrics(statistics: Iterable[str]) -> set[str]:
    """Return the names of the metrics that statistics are of, without those of every evaluation."""
    names = {_value_of(each) for each in statistics if each.startswith(OF_VALIDATIONS)}
    return {name.removesuffix(INT8) for name in names - OUR_VALUES.keys()}


class DeclaredMetrics:
    """The metrics of one evaluation.

    A metric that is unknown here or raises an error is logged once and omitted. The training continues. One that has no
    value on these examples is omitted: the device does not count in its mean.

    Args:
        statistics: Names of statistics that begin with one of ``OF_VALIDATIONS``, all of one model.
        own: The device's own metrics by name. They take precedence over installed ones.
    """

    def __init__(self, statistics: Iterable[str], own: Mapping[str, Metric]) -> None:
        self._statistics = tuple(statistics)
        names = sorted(declared_metrics(self._statistics))
        metrics = {name: own[name] if name in own else _installed(name) for name in names}
        self._rows = {name: MetricRows({name: metric}) for name, metric in metrics.items() if metric is not None}

    @property
    def needs_logits(self) -> bool:
        """See ``fanin.edge.runtimes.measure.BatchObserver``."""
        return any(rows.needs_logits for rows in self._rows.values())

    def add(self, observation: Observation) -> None:
        """Keep a batch. See ``fanin.edge.runtimes.measure.BatchObserver``."""
        for rows in self._rows.values():
            rows.add(observation)

    def counts(self, quality: Quality, manifest: Manifest) -> dict[str, int]:
        """Return the statistics by name.

        Args:
            quality: The measurement on the validation part.
            manifest: The manifest of the model.
        """
        values = quality.values(has_errors=has_output_targets(manifest))
        for rows in self._rows.values():
            try:
                values |= rows.values(manifest.num_classes)
            except InvalidPlan as exc:
                _warn(str(exc))
        return {
            name: metric_count(value, quality.num_examples)
            for name in self._statistics
            if not math.isnan(value := values.get(_value_of(name), math.nan))
        }


def _value_of(statistic: str) -> str:
    """Return the name of the value that a statistic is the sum of."""
    return statistic.partition(".")[2]


@lru_cache(maxsize=64)
def _installed(name: str) -> Metric | None:
    """Return ours, or that of an installed package."""
    try:
        return metrics_of([name])[name]
    except InvalidPlan as exc:
        _warn(str(exc))
        return None


@lru_cache(maxsize=64)
def _warn(text: str) -> None:
    """Log a warning once: it would be the same in each Round."""
    LOG.warning("statistics: %s; it is left out", text)
