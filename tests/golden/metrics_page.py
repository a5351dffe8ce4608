"""Generates docs/reference/metrics.md, the page of all metrics of a coordinator, from their declarations.

    python tests/golden/metrics_page.py

``test_metrics_page`` compares the page in the repository with ``page()``.
"""

from pathlib import Path
from typing import Final

from fanin.server.telemetry.table import MAX_RUNS, METRICS, SHOWN_S, MetricKind

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
HEAD: Final = f"""\
# Metrics

`/metrics` of a coordinator's page has these metrics in the text format of Prometheus.
[Monitor a coordinator](../howto/monitor.md) describes how to collect, show and alert on them.

- Durations are in seconds, sizes in bytes, shares between 0 and 1.
- Counters begin with 0 when the coordinator starts, those of Runs and of the audit log at the first scrape. Gauges
  are read from its record and are right at once.
- The label `run` is the id of a Run. At most {MAX_RUNS} Runs have series: those that are running or paused, then failed
  ones, then those that changed last. A failed Run keeps its series until somebody resumes or stops it, and one that
  finished or was stopped for {SHOWN_S / 3600:g} hours. `fanin_runs` counts all Runs.
- The label `code` is the [code of an error](errors.md), "" for none, and `other` for that of another package.
- No label names a device. [Logs and traces](../howto/monitor.md#traces) do.
- `process_*` and `python_*` are the usual metrics of a Python process: memory, processor time, open descriptors.

This page is generated. After you change a metric, run `python tests/golden/metrics_page.py`.
"""
TITLES: Final = {
    MetricKind.GAUGE: "Gauges",
    MetricKind.COUNTER: "Counters",
    MetricKind.HISTOGRAM: "Histograms",
}
VALUES: Final = {
    "`state`": "`running`, `paused`, `finished`, `failed`, `stopped`",
    "`phase` of `fanin_run_phase`": "the [phases of a Round](../explanation/rounds.md)",
    "`phase` of `fanin_round_part_duration_seconds`": "`waiting` until a quorum of devices has Assignments, `training` "
    "until the Round closes, `closing`, `folding`, `stepping` (the outer step), `publishing`",
    "`outcome` of `fanin_rounds_total`": "`published`, `failed`",
    "`outcome` of `fanin_updates_total`": "`accepted`, `discarded`, `refused`, `gave_up`",
    "`outcome` of `fanin_checkins_total`": "`assigned`, `wait`, `rejected`",
    "`kind`": "`run`, `publication`, `token`, `device`, `enrollment`, `process` (start and stop), `other`",
    "`method`": "the calls of `Fleet` and `Control`, and those of gRPC's health and reflection services",
    "`status`": "the statuses of gRPC. A device ends the call of an upload when it has the verdict, so `CANCELLED` is "
    "as usual there as `OK`",
    "`part`": "`database`, `blobs`, `updates`, `spool`, `other`",
    "`role`": "`server`, `authority`",
}


def page() -> str:
    """Return the text of docs/reference/metrics.md."""
    parts = [HEAD]
    for kind, title in TITLES.items():
        parts.append(f"\n## {title}\n\n| metric | labels | meaning |\n|---|---|---|\n")
        for metric in METRICS.values():
            if metric.kind is kind:
                labels = ", ".join(f"`{label}`" for label in metric.labels)
                parts.append(f"| `{metric.name}` | {labels} | {metric.meaning} |\n")
    parts.append("\n## Values of labels\n\n| label | values |\n|---|---|\n")
    parts += [f"| {label} | {values} |\n" for label, values in VALUES.items()]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
