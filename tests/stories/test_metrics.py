"""The metrics of a coordinator with devices over real gRPC: names, values, and what Prometheus says of them."""

import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.dashboards import expressions, names_in
from support.federations import NUM_DEVICES, PUBLISHER, SHAPES, bundle_in, plan
from support.processes import Site, start
from support.scrape import Scrape, page_url, promtool, scrape, scrape_until, serve

from fanin.clients.operator import Operator
from fanin.clients.transport import Connection, GrpcTransport
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.calls import device_id_of
from fanin.protos.errors import NotFound, Unauthenticated
from fanin.protos.messages import Report, RoundFailed, VersionPublished
from fanin.server.telemetry.table import METRICS

NUM_ROUNDS = 3


@dataclass(frozen=True)
class Measured:
    """A finished Run of a coordinator that still serves."""

    site: Site
    url: str
    last: Scrape


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    """A coordinator after a Run of three Rounds with three devices."""
    site = Site(tmp_path_factory.mktemp("metrics"))
    try:
        url = page_url(serve(site, "--log-format", "json"))
        before = scrape(url)
        assert before.value("fanin_runs", state="running") == 0
        site.start_run(plan(NUM_ROUNDS), bundle_in(site.folder, SHAPES), PUBLISHER)
        for index in range(NUM_DEVICES):
            site.device(index)
        site.events()
        last = scrape_until(url, lambda one: one.value("fanin_checkins_parked") == NUM_DEVICES)
        yield Measured(site, url, last)
    finally:
        site.close()


def test_the_metrics_of_a_run_equal_its_record(measured: Measured) -> None:
    last, published = measured.last, []
    for entry in measured.site.events():
        assert not isinstance(entry.event, RoundFailed)
        if isinstance(entry.event, VersionPublished):
            published.append(entry)
    assert len(published) == NUM_ROUNDS
    assert last.value("fanin_runs", state="finished") == 1
    assert last.value("fanin_run_state", run="run", state="finished") == 1
    assert last.value("fanin_run_state", run="run", state="running") == 0
    assert last.value("fanin_run_version", run="run") == NUM_ROUNDS
    assert last.value("fanin_run_round", run="run") == NUM_ROUNDS
    assert last.value("fanin_rounds_total", run="run", outcome="published") == NUM_ROUNDS
    assert last.value("fanin_rounds_total", run="run", outcome="failed") == 0
    assert last.value("fanin_round_duration_seconds_count", run="run") == NUM_ROUNDS
    seconds = sum(entry.event.round_s for entry in published)
    assert last.value("fanin_round_duration_seconds_sum", run="run") == pytest.approx(seconds)
    assert last.value("fanin_run_last_success_timestamp_seconds", run="run") == published[-1].time
    num_bytes = sum(entry.event.bytes_up for entry in published)
    assert last.value("fanin_run_received_bytes_total", run="run") == num_bytes
    assert last.value("fanin_run_sent_bytes_total", run="run") == sum(entry.event.bytes_down for entry in published)


def test_the_work_of_devices_is_counted(measured: Measured) -> None:
    last, num_updates = measured.last, NUM_ROUNDS * NUM_DEVICES
    assert last.value("fanin_updates_total", run="run", outcome="accepted", code="") == num_updates
    assert last.value("fanin_update_commit_duration_seconds_count") == num_updates
    assert last.value("fanin_checkins_total", outcome="assigned") == num_updates
    assert last.value("fanin_devices_enrolled") == NUM_DEVICES
    assert last.value("fanin_uploads_active") == 0
    # A device ends the call of an upload after its verdict, maybe before the coordinator does.
    calls = [
        last.samples.get(("fanin_calls_total", frozenset({"method": "Upload", "status": status}.items())), 0.0)
        for status in ("OK", "CANCELLED")
    ]
    assert sum(calls) == num_updates
    assert last.value("fanin_call_duration_seconds_count", method="Enroll") == NUM_DEVICES
    # The header of an Update is not in these bytes.
    assert 0 < last.value("fanin_received_bytes_total") < last.value("fanin_run_received_bytes_total", run="run")
    assert last.value("fanin_sent_bytes_total") >= last.value("fanin_run_sent_bytes_total", run="run")
    assert last.value("fanin_database_write_duration_seconds_count") > num_updates


def test_the_parts_of_a_round_add_up_to_it(measured: Measured) -> None:
    last = measured.last
    phases = ("waiting", "training", "closing", "folding", "stepping", "publishing")
    for phase in phases:
        count = last.value("fanin_round_part_duration_seconds_count", run="run", phase=phase)
        assert count == NUM_ROUNDS, phase
    parts_s = sum(last.value("fanin_round_part_duration_seconds_sum", run="run", phase=phase) for phase in phases)
    # The event of a Version is dated before its transaction.
    assert parts_s == pytest.approx(last.value("fanin_round_duration_seconds_sum", run="run"), abs=0.2 * NUM_ROUNDS)


def test_disk_and_certificates_are_measured(measured: Measured) -> None:
    last = measured.last
    assert 0 < last.value("fanin_disk_free_bytes") < last.value("fanin_disk_size_bytes")
    assert last.value("fanin_disk_used_bytes", part="database") > 0
    for role in ("server", "authority"):
        assert last.value("fanin_certificate_not_after_timestamp_seconds", role=role) > time.time() + 86_400
    assert last.value("process_open_fds") > 0


def test_prometheus_accepts_the_metrics(measured: Measured) -> None:
    assert promtool("check", "metrics", given=measured.last.text) == ""


def test_each_metric_of_the_table_is_served_and_no_label_names_a_device(measured: Measured) -> None:
    last = measured.last
    ours = {name for name in last.names if name.startswith("fanin_")}
    assert set(METRICS) <= ours
    labels = {key for _, pairs in last.samples for key, _ in pairs} - {"version", "le"}
    assert {label for metric in METRICS.values() for label in metric.labels} >= labels - {
        *("generation", "implementation", "major", "minor", "patchlevel")
    }
    devices = [each.name for each in measured.site.folder.glob("state/updates/*/*/*.payload")]
    ids = {name.partition(".")[0] for name in devices}
    assert not any(one in last.text for one in ids if len(one) == 32)


def test_each_name_in_rules_and_dashboard_is_served(measured: Measured) -> None:
    names = {name for expression in expressions() for name in names_in(expression)}
    # Prometheus itself makes `up`.
    assert names - measured.last.names == {"up"}


def test_refused_calls_are_counted_by_code(measured: Measured) -> None:
    line = Connection(measured.site.address, measured.site.ca)
    with pytest.raises(Unauthenticated):
        Operator(line, "not-a-token").run("run")
    line.close()
    last = scrape(measured.url)
    assert last.value("fanin_calls_refused_total", code="FN-0670") == 1
    assert last.value("fanin_calls_total", method="GetRun", status="UNAUTHENTICATED") == 1


def test_the_log_has_an_object_on_each_line(measured: Measured) -> None:
    line = Connection(measured.site.address, measured.site.ca)
    key = SigningKey(bytes.fromhex((measured.site.folder / "device-0" / "device.key").read_text().strip()))
    with pytest.raises(NotFound):
        GrpcTransport(line, key).report(Report(assignment_id="run.1.other"))
    line.close()
    lines = measured.site.started[0].text().splitlines()
    entries = [json.loads(one) for one in lines if one.startswith("{")]
    # The others are standard output.
    assert all(one.startswith(("serving on ", "  ")) for one in lines if not one.startswith("{"))
    assert all({"time", "level", "logger", "message"} <= entry.keys() for entry in entries)
    (refused,) = [entry for entry in entries if entry.get("code") == "FN-0613"]
    assert refused["device"] == device_id_of(key.public)
    assert refused["time"].endswith("Z")


def test_metrics_beyond_this_machine_need_a_token(tmp_path: Path) -> None:
    words = ["serve", "--state", str(tmp_path / "state"), "--listen", "127.0.0.1:0", "--web", "0.0.0.0:0"]
    running = start(["-m", "fanin.commands.main", *words], tmp_path / "log")
    try:
        url = page_url(running)
        context = ssl.create_default_context(cafile=str(tmp_path / "state" / "tls" / "ca.pem"))
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}metrics", timeout=10, context=context)
        assert refused.value.code == 401
        assert "FN-" in refused.value.read().decode()
        device = (tmp_path / "state" / "tokens" / "device.token").read_text().strip()
        wrong = urllib.request.Request(f"{url}metrics", headers={"Authorization": f"Bearer {device}"})
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(wrong, timeout=10, context=context)
        token = (tmp_path / "state" / "tokens" / "operator.token").read_text().strip()
        request = urllib.request.Request(f"{url}metrics", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=10, context=context) as reply:
            assert b"fanin_ready 1.0" in reply.read()
        assert token not in running.text()
    finally:
        running.kill()


def test_a_restarted_coordinator_shows_the_run_and_counts_from_zero(measured: Measured) -> None:
    site = measured.site
    site.started[0].kill()
    after = scrape(page_url(serve(site)))
    success = measured.last.value("fanin_run_last_success_timestamp_seconds", run="run")
    assert after.value("fanin_run_last_success_timestamp_seconds", run="run") == pytest.approx(success, abs=0.01)
    assert after.value("fanin_rounds_total", run="run", outcome="published") == 0
    assert after.value("fanin_run_version", run="run") == NUM_ROUNDS
