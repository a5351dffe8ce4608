"""The files of examples/operations: Prometheus accepts them, and they name metrics that exist."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from support.dashboards import BOARD, FOLDER, expressions, names_in, queries, schema_errors
from support.scrape import promtool

from fanin.server.telemetry.table import METRICS, MetricKind

pytestmark = pytest.mark.heavy
OF_PROCESS = {
    "up",
    "process_open_fds",
    "process_max_fds",
    "process_resident_memory_bytes",
    "process_cpu_seconds_total",
}
"""Metrics of Prometheus itself and of prometheus-client."""


def labels_in(expression: str) -> Iterator[tuple[str, str]]:
    """Yield the metrics of an expression with a label by which they are selected."""
    for name, selectors in re.findall(r"\b((?:fanin|process)_\w+|up)\{([^}]*)\}", expression):
        for label in re.findall(r"(\w+)(?:=~|!=|=)", selectors):
            yield name, label


def known() -> Mapping[str, tuple[str, ...]]:
    """Return the labels of all names."""
    names = dict.fromkeys(OF_PROCESS, ())
    for metric in METRICS.values():
        suffixes = ("_bucket", "_sum", "_count") if metric.kind is MetricKind.HISTOGRAM else ("",)
        names |= {f"{metric.name}{suffix}": metric.labels for suffix in suffixes}
    return names


def test_each_name_and_label_in_rules_and_dashboard_exists() -> None:
    found = expressions()
    assert len(found) > 50
    assert {name for one in found for name in names_in(one)} <= known().keys()
    for name, label in (pair for one in found for pair in labels_in(one)):
        assert label in (*known()[name], "job", "instance", "le"), f"{name} has no label {label}"


def test_a_wrong_name_is_detected() -> None:
    assert names_in('sum by (fanin_x) (rate(fanin_y_total{run="fanin_z"}[5m])) > up') == {"fanin_y_total", "up"}
    assert list(labels_in('fanin_ready{a="b", c=~"d"}')) == [("fanin_ready", "a"), ("fanin_ready", "c")]


def test_each_metric_is_shown_or_alerts() -> None:
    used = {name for one in expressions() for name in names_in(one)}
    unused = {name for name in METRICS if not any(one.startswith(name) for one in used)}
    # Numbers that belong to others, as text in a table.
    assert unused <= {
        "fanin_devices_enrolled",
        "fanin_run_round",
        "fanin_run_phase",
        "fanin_evaluation_version",
        "fanin_held_out_version",
        "fanin_checkins_parked_limit",
        "fanin_run_received_bytes_total",
        "fanin_run_sent_bytes_total",
    }


def test_prometheus_accepts_the_configuration_and_the_rules() -> None:
    assert "SUCCESS: 1 rule files found" in promtool("check", "config", "prometheus.yml", folder=FOLDER)
    assert "rules found" in promtool("check", "rules", "alerts.yml", folder=FOLDER)


def test_the_alerts_fire_and_rest_as_they_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts.test.yml", folder=FOLDER)


def test_each_alert_is_tested(tmp_path: Path) -> None:
    alerts = set(re.findall(r"- alert: (\w+)", (FOLDER / "alerts.yml").read_text()))
    tests = (FOLDER / "alerts.test.yml").read_text()
    assert {name for name in alerts if tests.count(name) < 2} == set()
    # The tests notice a rule that never fires.
    for name in ("alerts.yml", "alerts.test.yml"):
        shutil.copy(FOLDER / name, tmp_path / name)
    rules = (tmp_path / "alerts.yml").read_text()
    (tmp_path / "alerts.yml").write_text(rules.replace("fanin_ready == 0", "fanin_ready == 2"))
    with pytest.raises(AssertionError, match="FaninCoordinatorNotReady"):
        promtool("test", "rules", "alerts.test.yml", folder=tmp_path)


def test_the_dashboard_can_be_provisioned() -> None:
    board = json.loads(BOARD.read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels)
    assert all(panel["title"] and panel["description"] for panel in panels)
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in panels]
    for index, (x, y, w, h) in enumerate(places):
        assert x + w <= 24
        assert not any(x < a + c and a < x + w and y < b + d and b < y + h for a, b, c, d in places[index + 1 :])


def test_the_dashboard_has_the_keys_and_values_of_grafanas_schema() -> None:
    assert schema_errors(json.loads(BOARD.read_text())) == []


@pytest.mark.parametrize(
    ("text", "other", "place"),
    [
        ('"legendFormat"', '"legend"', "panels[1].targets[0].legend: unknown key"),
        ('"colorMode": "value"', '"colorMode": "values"', "panels[1].options.color_mode"),
        ('"graphTooltip": 1', '"graphTooltip": "1"', "graph_tooltip"),
        ('"showPoints"', '"points"', "custom.points: unknown key"),
        ('"h": 4', '"h": "4"', "panels[1].grid_pos.h"),
        ('"refresh": 2', '"refresh": 7', "templating.list_val[1].refresh"),
    ],
)
def test_a_wrong_key_or_value_of_a_dashboard_is_detected(text: str, other: str, place: str) -> None:
    board = BOARD.read_text()
    assert text in board
    assert any(place in error for error in schema_errors(json.loads(board.replace(text, other, 1))))


def test_prometheus_parses_each_query_of_the_dashboard() -> None:
    plain = [query.replace("$__rate_interval", "5m") for query in queries()]
    assert f"{len(plain)} rules found" in check_queries(plain)
    with pytest.raises(AssertionError, match="could not parse expression"):
        check_queries([f"{plain[0]} +"])


def check_queries(plain: Sequence[str]) -> str:
    """Return what promtool says of rules with these queries."""
    rules = [{"record": f"query:{index}", "expr": query} for index, query in enumerate(plain)]
    groups = {"groups": [{"name": "queries", "rules": rules}]}
    return promtool("check", "rules", "/dev/stdin", given=json.dumps(groups))
