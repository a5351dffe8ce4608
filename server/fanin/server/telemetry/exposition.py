"""The metrics of one coordinator in the text format of Prometheus.

A scrape reads the state that the coordinator has anyway: the Runs in memory, the events of the record since the last
scrape, the counters of ``instruments``, the disk and the certificates. Each coordinator has a registry of its own,
because a process may have several.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.utils import floatToGoString

from fanin.protos.messages import PrivacyPopulation, RunState
from fanin.protos.release import __version__
from fanin.server.access.limits import Limits
from fanin.server.care.backup import LastBackup
from fanin.server.care.certificates import Certificates
from fanin.server.care.forecast import DiskWatch, Forecast
from fanin.server.care.space import DiskSpace
from fanin.server.fleet.coordinator import Coordinator
from fanin.server.health import Readiness
from fanin.server.runs.catalog import Runs
from fanin.server.runs.driving.driver import RunDriver
from fanin.server.runs.view import RunView
from fanin.server.storage.lanes import Durations
from fanin.server.storage.retention import DAY_S
from fanin.server.storage.stores import CoordinatorState
from fanin.server.telemetry.audit import AuditCounts
from fanin.server.telemetry.instruments import Instruments
from fanin.server.telemetry.record import RecordFollower, RunTally
from fanin.server.telemetry.table import MAX_RUNS, METRICS, SHOWN_S, MetricKind

_FAMILIES: Final = MappingProxyType(
    {
        MetricKind.COUNTER: CounterMetricFamily,
        MetricKind.GAUGE: GaugeMetricFamily,
        MetricKind.HISTOGRAM: HistogramMetricFamily,
    }
)
Sample = tuple[tuple[str, ...], float | Durations]
"""The values of a metric's labels, and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSources:
    """What the metrics are read from.

    Attributes:
        runs: The Runs.
        state: The durable state.
        coordinator: The device side.
        limits: The limits of its load.
        readiness: Whether the coordinator can serve.
        instruments: The observers.
        disk: The disk of the durable state.
        certificates: The certificate that is served.
        last_backup: Returns the newest backup of the coordinator's folder, None without one.
    """

    runs: Runs
    state: CoordinatorState
    coordinator: Coordinator
    limits: Limits
    readiness: Readiness
    instruments: Instruments
    disk: DiskWatch
    certificates: Certificates
    last_backup: Callable[[], LastBackup | None]


class Exposition:
    """Renders the metrics of one coordinator. At most ``max_runs`` Runs have series of their own."""

    def __init__(self, sources: MetricSources, max_runs: int = MAX_RUNS) -> None:
        self._sources = sources
        self._max_runs = max_runs
        self._follower = RecordFollower(sources.state.stores)
        self._audit = AuditCounts(sources.state.stores.audit)
        self._busy = asyncio.Lock()

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics and their content type. ``accept`` is the header of the request, or ""."""
        async with self._busy:
            samples = await self._samples()
        encode, content_type = choose_encoder(accept)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(samples))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        return await self._sources.state.files.run(encode, registry), content_type

    async def _samples(self) -> "ScrapedSamples":
        sources, samples = self._sources, ScrapedSamples()
        views = [publications.view for publications in sources.runs.publications()]
        await self._follower.start(views)
        shown = await self._shown(views)
        kept = frozenset(view.run_id for view, _ in shown)
        self._follower.keep(kept)
        sources.instruments.counts.keep(kept)
        space = await sources.state.files.run(sources.disk.space)
        backup = await sources.state.files.run(sources.last_backup)
        samples.add("fanin_build_info", 1, __version__)
        # As bounded as the Runs, those that changed last first: an operator names populations.
        populations = await sources.state.stores.ledger.populations()
        for population in sorted(populations, key=_changed_at, reverse=True)[: self._max_runs]:
            newest = population.newest
            samples.add("fanin_privacy_epsilon", 0.0 if newest is None else newest.epsilon, population.name)
            samples.add("fanin_privacy_budget_epsilon", population.epsilon, population.name)
            samples.add("fanin_privacy_charge_due", bool(population.uncharged), population.name)
        samples.add("fanin_ready", not sources.readiness.problem)
        states = Counter(view.state for view in views)
        for state in RunState:
            samples.add("fanin_runs", states[state], state.value)
        samples.add("fanin_runs_unserved", len(sources.runs.drivers.broken))
        for view, tally in shown:
            self._add_run(samples, view)
            _add_tally(samples, view.run_id, tally)
            add_quality(samples, view.run_id, tally)
        await self._audit.read()
        for kind, number in self._audit.entries.items():
            samples.add("fanin_audit_entries_total", number, kind)
        self._add_fleet(samples)
        self._add_calls(samples)
        _add_disk(samples, space)
        _add_certificates(samples, sources.certificates)
        _add_growth(samples, sources.disk.forecast)
        if backup is not None:
            samples.add("fanin_backup_last_success_timestamp_seconds", backup.at_s)
        samples.add("fanin_database_write_duration_seconds", sources.state.write_times)
        return samples

    async def _shown(self, views: Sequence[RunView]) -> list[tuple[RunView, RunTally]]:
        """Return the Runs that have series of their own, with their tallies. A failed Run waits for an operator."""
        failed = [view for view in views if view.state is RunState.FAILED]
        live = [view for view in views if view.state.is_live]
        ended = [view for view in views if not view.state.is_live and view.state is not RunState.FAILED]
        resting = ended[: -self._max_runs - 1 : -1]
        now_s = self._sources.state.stores.wall()
        tallies = [(view, await self._follower.tally(view)) for view in resting]
        recent = [each for each in tallies if now_s - each[1].changed_s < SHOWN_S]
        recent.sort(key=lambda each: each[1].changed_s, reverse=True)
        first = (live[-self._max_runs :] + failed[::-1])[: self._max_runs]
        return ([(view, await self._follower.tally(view)) for view in first] + recent)[: self._max_runs]

    def _add_run(self, samples: "ScrapedSamples", view: RunView) -> None:
        run_id, sources = view.run_id, self._sources
        for state in RunState:
            samples.add("fanin_run_state", view.state is state, run_id, state.value)
        samples.add("fanin_run_version", view.newest.number, run_id)
        samples.add("fanin_run_quorum_updates", view.record.start.plan.cohort.quorum, run_id)
        samples.add("fanin_run_hindered", bool(sources.runs.drivers.live(run_id).trouble), run_id)
        if (number := sources.instruments.clock.last_round(run_id)) is not None:
            samples.add("fanin_run_round", number, run_id)
        driver = sources.runs.drivers.find(run_id)
        if driver is not None:
            _add_round(samples, driver)
        fleet = sources.instruments.counts
        for (outcome, code), number in fleet.work(run_id).items():
            samples.add("fanin_updates_total", number, run_id, outcome, code)
        for part, durations in fleet.parts(run_id).items():
            samples.add("fanin_round_part_duration_seconds", durations, run_id, part.value)

    def _add_fleet(self, samples: "ScrapedSamples") -> None:
        sources, fleet = self._sources, self._sources.instruments.counts
        samples.add("fanin_devices_enrolled", sources.state.devices.num_devices)
        samples.add("fanin_devices_banned", sources.state.devices.num_banned)
        samples.add("fanin_checkins_parked", len(sources.runs.parked))
        samples.add("fanin_checkins_parked_limit", sources.limits.max_parked)
        samples.add("fanin_uploads_active", sources.coordinator.uploads.num_active)
        samples.add("fanin_uploads_active_limit", sources.limits.max_uploads)
        for outcome, number in fleet.checkins.items():
            samples.add("fanin_checkins_total", number, outcome)
        samples.add("fanin_received_bytes_total", fleet.received_bytes)
        samples.add("fanin_sent_bytes_total", fleet.sent_bytes)
        samples.add("fanin_update_commit_duration_seconds", fleet.commits)

    def _add_calls(self, samples: "ScrapedSamples") -> None:
        calls = self._sources.instruments.calls
        samples.add("fanin_calls_active", calls.num_active)
        for (method, status), number in calls.ended.items():
            samples.add("fanin_calls_total", number, method, status)
        for code, number in calls.refused.items():
            samples.add("fanin_calls_refused_total", number, code)
        for method, durations in calls.durations.items():
            samples.add("fanin_call_duration_seconds", durations, method)


def _changed_at(population: PrivacyPopulation) -> float:
    return population.begun_at if population.newest is None else population.newest.committed_at


def _add_round(samples: "ScrapedSamples", driver: RunDriver) -> None:
    machine = driver.course.round
    for name, phase in driver.setup.protocol.phases.items():
        samples.add("fanin_run_phase", machine is not None and machine.phase is phase, driver.run_id, name)
    is_open = machine is not None and machine.is_open
    cohort = machine.cohort if machine is not None and is_open else None
    samples.add("fanin_run_devices_at_work", 0 if cohort is None else len(cohort.at_work), driver.run_id)
    samples.add("fanin_run_updates_committed", 0 if cohort is None else len(cohort.accepted), driver.run_id)


def _add_tally(samples: "ScrapedSamples", run_id: str, tally: RunTally) -> None:
    samples.add("fanin_rounds_total", tally.num_published, run_id, "published")
    samples.add("fanin_rounds_total", tally.num_failed, run_id, "failed")
    samples.add("fanin_round_duration_seconds", tally.durations, run_id)
    samples.add("fanin_run_received_bytes_total", tally.received_bytes, run_id)
    samples.add("fanin_run_sent_bytes_total", tally.sent_bytes, run_id)
    samples.add("fanin_run_saturated_values_total", tally.num_saturated, run_id)
    samples.add("fanin_run_clamped_values_total", tally.num_clamped, run_id)
    samples.add("fanin_run_stale_updates_total", tally.num_stale, run_id)
    samples.add("fanin_run_devices_gone_total", tally.num_gone, run_id)
    if tally.last_success_s:
        samples.add("fanin_run_last_success_timestamp_seconds", tally.last_success_s, run_id)


def add_quality(samples: "ScrapedSamples", run_id: str, tally: RunTally) -> None:
    """Add the values of the evaluations of a Run."""
    if tally.newest is not None and tally.newest.train_loss_examples:
        samples.add("fanin_train_loss", tally.newest.train_loss, run_id)
    if tally.evaluated is not None and (evaluation := tally.evaluated.evaluation) is not None:
        # Devices evaluate the Version that they train from.
        samples.add("fanin_evaluation_version", tally.evaluated.parent, run_id)
        samples.add("fanin_evaluation_loss", evaluation.loss, run_id)
        if evaluation.has_labels:
            samples.add("fanin_evaluation_float_accuracy_ratio", evaluation.accuracy_float, run_id)
            samples.add("fanin_evaluation_int8_accuracy_ratio", evaluation.accuracy_int8, run_id)
    if tally.held_out is not None and not tally.held_out.problem:
        samples.add("fanin_held_out_version", tally.held_out.version, run_id)
        names = {"loss": "loss", "accuracy": "float_accuracy_ratio", "accuracy_int8": "int8_accuracy_ratio"}
        for name, suffix in names.items():
            if name in tally.held_out.values:
                samples.add(f"fanin_held_out_{suffix}", tally.held_out.values[name], run_id)


def _add_disk(samples: "ScrapedSamples", space: DiskSpace) -> None:
    samples.add("fanin_disk_free_bytes", space.free_bytes)
    samples.add("fanin_disk_size_bytes", space.size_bytes)
    for part, size_bytes in space.used_bytes.items():
        samples.add("fanin_disk_used_bytes", size_bytes, part)


def _add_certificates(samples: "ScrapedSamples", certificates: Certificates) -> None:
    own, *others = (each.ends_at.timestamp() for each in certificates.ends())
    samples.add("fanin_certificate_not_after_timestamp_seconds", own, "server")
    if others:
        samples.add("fanin_certificate_not_after_timestamp_seconds", min(others), "authority")
    samples.add("fanin_certificate_renewal_failed", certificates.is_renewal_failed)


def _add_growth(samples: "ScrapedSamples", expected: Forecast | None) -> None:
    if expected is None:
        return
    if (growth := expected.bytes_per_day) is not None:
        samples.add("fanin_disk_growth_bytes_per_second", growth / DAY_S)
    if (days := expected.days_left) is not None:
        samples.add("fanin_disk_full_timestamp_seconds", expected.now.at_s + days * DAY_S)


class ScrapedSamples:
    """The samples of one scrape, by metric."""

    def __init__(self) -> None:
        self._samples: dict[str, list[Sample]] = {name: [] for name in METRICS}

    def add(self, name: str, value: float | Durations, *labels: str) -> None:
        """Add a sample of a metric of the table."""
        assert len(labels) == len(METRICS[name].labels), f"{name} has the labels {METRICS[name].labels}"
        self._samples[name].append((labels, value))

    def families(self) -> Iterable[Family]:
        """Return all metrics, also those without a sample: their names and meanings are known from the first scrape."""
        for name, metric in METRICS.items():
            samples = self._samples[name]
            family = _FAMILIES[metric.kind](name, metric.meaning, labels=metric.labels)
            for labels, value in samples:
                if isinstance(value, Durations):
                    assert isinstance(family, HistogramMetricFamily), f"{name} is a {metric.kind.value}"
                    bounds = (*map(floatToGoString, value.bounds_s), "+Inf")
                    buckets = [(bound, float(count)) for bound, count in zip(bounds, value.cumulative(), strict=True)]
                    family.add_metric(labels, buckets=buckets, sum_value=value.sum_s)
                else:
                    assert isinstance(family, CounterMetricFamily | GaugeMetricFamily), f"{name} has durations"
                    family.add_metric(labels, float(value))
            yield family


@dataclass(frozen=True, slots=True)
class _Families:
    """A collector of prometheus-client over the samples of one scrape."""

    samples: ScrapedSamples

    def collect(self) -> Iterable[Family]:
        """Return the metrics."""
        return self.samples.families()
