"""The metrics of a coordinator by name: kind, labels and meaning. ``docs/reference/metrics.md`` is generated from it.

Names and units follow the conventions of Prometheus: seconds, bytes, ratios of 1, and ``_total`` for counters. The
number of series is bounded. A label has one of a few fixed values, the code of an error, or the id of a Run: at most
``MAX_RUNS``, and none that finished or was stopped longer than ``SHOWN_S`` ago. No label names a device.

Reference: https://prometheus.io/docs/practices/naming/
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

MAX_RUNS: Final = 100
"""Runs with series of their own: those that run or are paused, then failed ones, then those that changed last."""
SHOWN_S: Final = 86_400.0
"""Seconds for which a finished or stopped Run keeps its series. A failed one keeps them until somebody acts."""


class MetricKind(Enum):
    """The kind of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredMetric:
    """One metric.

    Attributes:
        name: Its name. The samples of a counter end in ``_total``, which the name has, too.
        kind: Its kind.
        labels: Its labels.
        meaning: The text of its HELP line.
    """

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    meaning: str


def _table(kind: MetricKind, *rows: tuple[str, str, str]) -> dict[str, DeclaredMetric]:
    return {
        name: DeclaredMetric(name=name, kind=kind, labels=tuple(labels.split()), meaning=meaning)
        for name, labels, meaning in rows
    }


METRICS: Final[Mapping[str, DeclaredMetric]] = MappingProxyType(
    {
        **_table(
            MetricKind.GAUGE,
            ("fanin_build_info", "version", "The release of fanin; the value is 1."),
            ("fanin_privacy_epsilon", "population", "The epsilon that all Runs of a population have spent."),
            ("fanin_privacy_budget_epsilon", "population", "The largest epsilon of a population."),
            (
                "fanin_privacy_charge_due",
                "population",
                "1: the ledger may lack releases that are not charged, so its epsilon is a lower bound. Else 0.",
            ),
            ("fanin_ready", "", "Whether the coordinator can write its state: 1 or 0."),
            ("fanin_runs", "state", "Runs of the record by state."),
            ("fanin_runs_unserved", "", "Runs that this coordinator could not continue, or that another one drives."),
            ("fanin_run_state", "run state", "State of a Run: 1 for the current one, 0 for the others."),
            ("fanin_run_hindered", "run", "Whether something other than missing Updates keeps a Run from progress."),
            ("fanin_run_version", "run", "Number of the newest Version of a Run."),
            ("fanin_run_round", "run", "Number of the last Round of a Run that this coordinator opened or resumed."),
            ("fanin_run_phase", "run phase", "Phase of the Round under way: 1 for the current one, 0 for the others."),
            ("fanin_run_devices_at_work", "run", "Devices that hold a place in the open Round."),
            ("fanin_run_updates_committed", "run", "Updates that are committed to the open Round."),
            ("fanin_run_quorum_updates", "run", "Updates without which a Round cannot be published."),
            ("fanin_run_last_success_timestamp_seconds", "run", "End of the last Round that published a Version."),
            ("fanin_evaluation_version", "run", "Number of the Version to which the evaluation by devices belongs."),
            ("fanin_evaluation_loss", "run", "Mean validation loss on the devices, in nats."),
            ("fanin_evaluation_float_accuracy_ratio", "run", "Accuracy of the float model on the devices."),
            ("fanin_evaluation_int8_accuracy_ratio", "run", "Accuracy of the int8 model on the devices."),
            ("fanin_train_loss", "run", "Mean training loss of the last Round."),
            ("fanin_held_out_version", "run", "Number of the last Version that was evaluated on held-out data."),
            ("fanin_held_out_loss", "run", "Loss of that Version on held-out data."),
            ("fanin_held_out_float_accuracy_ratio", "run", "Accuracy of its float model on held-out data."),
            ("fanin_held_out_int8_accuracy_ratio", "run", "Accuracy of its int8 model on held-out data."),
            ("fanin_devices_enrolled", "", "Devices that have enrolled."),
            ("fanin_devices_banned", "", "Devices that are banned."),
            ("fanin_checkins_parked", "", "Check-ins that wait for work."),
            ("fanin_checkins_parked_limit", "", "Check-ins that may wait for work at a time."),
            ("fanin_uploads_active", "", "Uploads under way."),
            ("fanin_uploads_active_limit", "", "Uploads that may be under way at a time."),
            ("fanin_calls_active", "", "Calls under way, check-ins that wait included."),
            ("fanin_disk_free_bytes", "", "Bytes that the coordinator may still write to the disk of its folder."),
            ("fanin_disk_size_bytes", "", "Size of the disk of the coordinator's folder."),
            ("fanin_disk_used_bytes", "part", "Bytes of files in the coordinator's folder; read once a minute."),
            ("fanin_disk_growth_bytes_per_second", "", "Growth of the folder over the last days."),
            ("fanin_disk_full_timestamp_seconds", "", "When the disk is full at this growth; none without growth."),
            ("fanin_backup_last_success_timestamp_seconds", "", "When the last backup was written; none without one."),
            ("fanin_certificate_not_after_timestamp_seconds", "role", "When a certificate that is served ends."),
            ("fanin_certificate_renewal_failed", "", "Whether the last renewal of the certificate failed."),
        ),
        **_table(
            MetricKind.COUNTER,
            ("fanin_rounds_total", "run outcome", "Rounds that ended."),
            ("fanin_run_received_bytes_total", "run", "Bytes of the Updates of published Rounds."),
            ("fanin_run_sent_bytes_total", "run", "Bytes that devices report to have downloaded for published Rounds."),
            ("fanin_run_saturated_values_total", "run", "Values of Updates beyond the largest encoded value."),
            ("fanin_run_clamped_values_total", "run", "Values of Versions that were set to the end of their range."),
            ("fanin_run_stale_updates_total", "run", "Updates that were trained from an older Version."),
            ("fanin_run_devices_gone_total", "run", "Devices that were silent for so long that a Round went on."),
            ("fanin_updates_total", "run outcome code", "Work of devices that ended; code names why it was refused."),
            ("fanin_checkins_total", "outcome", "Check-ins that were answered."),
            ("fanin_received_bytes_total", "", "Bytes of Updates that were stored, also of those that did not count."),
            ("fanin_sent_bytes_total", "", "Bytes of Chunks that devices downloaded."),
            ("fanin_audit_entries_total", "kind", "Entries of the audit log, of a change with two the second one."),
            ("fanin_calls_total", "method status", "Calls of devices and operators that ended."),
            ("fanin_calls_refused_total", "code", "Calls that ended with an error of fanin, by its code."),
        ),
        **_table(
            MetricKind.HISTOGRAM,
            ("fanin_round_duration_seconds", "run", "Durations of Rounds that published a Version."),
            ("fanin_round_part_duration_seconds", "run phase", "Durations of the parts of a Round."),
            ("fanin_update_commit_duration_seconds", "", "Durations from the last Chunk of an Update to its commit."),
            ("fanin_call_duration_seconds", "method", "Durations of calls; a check-in includes its wait for work."),
            ("fanin_database_write_duration_seconds", "", "Durations of transactions that write."),
        ),
    }
)
"""All metrics of fanin. The metrics of the process, ``process_*`` and ``python_*``, are those of prometheus-client."""
