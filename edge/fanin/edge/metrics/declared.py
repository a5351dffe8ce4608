"""The metrics that a Plan asks of devices: statistics ``evaluate.NAME``, of the Version on the validation part.

A device reports value x validation examples in units of 2^-16, of the float model as ``evaluate.NAME`` and of the int8
model as ``evaluate.NAME_int8``. The coordinator sums these counts, so it has the mean over all validation examples.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

from fanin.edge.metrics.metric import INT8, Metric, MetricRows, metrics_of
from fanin.edge.runtimes.evaluations import OF_VALIDATION, metric_count
from fanin.edge.runtimes.measure import Observation
from fanin.protos.errors import InvalidPlan

LOG = logging.getLogger("fanin.edge.metrics")


class DeclaredMetrics:
    """The metrics of one evaluation.

    A metric that is unknown here or raises an error is logged once and omitted. The training continues. One that has no
    value on these examples is omitted: the device does not count in its mean.

    Args:
        statistics: Names of statistics that begin with ``evaluate.``.
        own: The device's own metrics by name. They take precedence over installed ones.
    """

    def __init__(self, statistics: Iterable[str], own: Mapping[str, Metric]) -> None:
        self._statistics = tuple(statistics)
        names = dict.fromkeys(each.removeprefix(OF_VALIDATION).removesuffix(INT8) for each in self._statistics)
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

    def counts(self, num_examples: int, num_classes: int) -> dict[str, int]:
        """Return the statistics by name.

        Args:
            num_examples: Number of validation examples.
            num_classes: Number of labels of the model; 0 for a model of values.
        """
        values: dict[str, float] = {}
        for rows in self._rows.values():
            try:
                values |= rows.values(num_classes)
            except InvalidPlan as exc:
                _warn(str(exc))
        counts = {
            OF_VALIDATION + name: metric_count(value, num_examples)
            for name, value in values.items()
            if not math.isnan(value)
        }
        return {name: count for name, count in counts.items() if name in self._statistics}


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
    LOG.warning("statistics %s*: %s; it is left out", OF_VALIDATION, text)
