"""docs/reference/metrics.md is the page that the declarations of the metrics generate."""

import re

from golden.metrics_page import PAGE, page

from fanin.server.telemetry.table import METRICS, MetricKind


def test_the_page_of_metrics_is_generated() -> None:
    assert PAGE.read_text() == page(), "run python tests/golden/metrics_page.py"


def test_names_follow_the_conventions() -> None:
    for metric in METRICS.values():
        assert re.fullmatch(r"fanin_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        assert metric.meaning.endswith(".")
        if metric.kind is MetricKind.HISTOGRAM:
            assert metric.name.endswith("_seconds")
        assert not set(metric.labels) & {"device", "le"}
