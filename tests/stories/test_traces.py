"""Traces over real processes: the spans of a Round form one tree, across a coordinator and its devices."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.collector import Collector, Received, by_parent, collecting
from support.federations import NUM_DEVICES, PUBLISHER, bundle_in, plan
from support.processes import Site, start
from support.scrape import serve

from fanin.edge.spans import ATTRIBUTES, root_of

SHAPES = {"a": (600, 500), "b": (3,)}
PARTS = {"select", "collect", "close", "fold", "outer step", "publish"}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A site without processes."""
    return Site(tmp_path)


def batches(milliseconds: int = 100) -> dict[str, str]:
    """Return the environment of a process that sends its spans soon."""
    return {"OTEL_BSP_SCHEDULE_DELAY": str(milliseconds)}


def traced_device(site: Site, index: int, url: str) -> None:
    """Start a device that sends its own spans."""
    script = str(Path(__file__).parent.parent / "support" / "device.py")
    arguments = [script, str(site.folder), str(index), site.listen, "", url]
    site.started.append(start(arguments, site.folder / f"device-{index}.log", batches()))


def rounds_of(collector: Collector, num_rounds: int) -> list[list[Received]]:
    """Return the spans of each Round once all have ended, in their order."""
    spans = collector.wait(lambda all_of: sum(one.name == "round" for one in all_of) == num_rounds)
    roots = sorted((one for one in spans if one.name == "round"), key=lambda one: one.began_ns)
    names = Counter(one.name for one in spans)
    spans = collector.wait(lambda all_of: Counter(one.name for one in all_of)["upload"] >= names["upload"])
    return [[one for one in spans if one.trace_id == root.trace_id] for root in roots]


def test_the_spans_of_a_round_form_one_tree_across_processes(site: Site) -> None:
    with collecting() as collector:
        try:
            serve(site, "--traces", collector.url, environment=batches())
            site.start_run(plan(2), bundle_in(site.folder, SHAPES), PUBLISHER)
            # The last device sends no spans: its calls are children of its assignment.
            for index in range(NUM_DEVICES - 1):
                traced_device(site, index, collector.url)
            site.device(NUM_DEVICES - 1)
            site.events()
            num_uploads = 2 * (NUM_DEVICES - 1)
            collector.wait(lambda all_of: sum(one.name == "upload" for one in all_of) == num_uploads)
            rounds = rounds_of(collector, 2)
        finally:
            site.close()
    assert len({one.trace_id for spans in rounds for one in spans}) == 2
    for number, spans in enumerate(rounds, 1):
        check_round(spans, number)
    # Nothing else was sent, and nothing that a training has computed.
    assert {one.trace_id for one in collector.spans} == {spans[0].trace_id for spans in rounds}
    assert {key for one in collector.spans for key in one.attributes} <= ATTRIBUTES


def check_round(spans: list[Received], number: int) -> None:
    """Check the tree of one Round."""
    children = by_parent(spans)
    (root,) = children[""]
    assert root.name == "round"
    assert root.attributes == {"fanin.run": "run", "fanin.round": number, "fanin.outcome": "published"}
    assert len({one.span_id for one in spans}) == len(spans)
    assert set(children) - {""} <= {one.span_id for one in spans}, "each parent is in the trace"
    below = children[root.span_id]
    assert Counter(one.name for one in below) == Counter([*PARTS, *["assignment"] * NUM_DEVICES])
    assert all(one.service == "fanin-coordinator" for one in below)
    assignments = [one for one in below if one.name == "assignment"]
    assert {one.attributes["fanin.outcome"] for one in assignments} == {"accepted"}
    assert len({one.attributes["fanin.device"] for one in assignments}) == NUM_DEVICES
    num_traced = 0
    for assignment in assignments:
        steps = sorted(children[assignment.span_id], key=lambda one: one.began_ns)
        if "train" in {one.name for one in steps}:
            num_traced += 1
            assert [one.name for one in steps] == ["download", "train", "upload"]
            assert {one.service for one in steps} == {"fanin-device"}
            uploads = children[steps[2].span_id]
            assert {one.name for one in children[steps[0].span_id]} <= {"Fleet/Download"}
            assert not children[steps[1].span_id]
        else:
            assert {one.name for one in steps} <= {"Fleet/Download", "Fleet/Upload"}
            uploads = [one for one in steps if one.name == "Fleet/Upload"]
        (upload,) = uploads
        assert upload.name == "Fleet/Upload"
        (commit,) = children[upload.span_id]
        assert commit.name == "commit"
        assert upload.began_ns <= commit.began_ns <= commit.ended_ns <= upload.ended_ns
    assert num_traced == NUM_DEVICES - 1
    assert all(root.began_ns <= one.began_ns and one.ended_ns <= root.ended_ns for one in below)


def test_a_coordinator_that_starts_again_continues_the_trace(site: Site) -> None:
    with collecting() as collector:
        try:
            environment = {**batches(), "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
            first = serve(site, environment=environment)
            site.start_run(plan(1), bundle_in(site.folder, {"a": (3, 5)}), PUBLISHER)
            traced_device(site, 0, collector.url)
            collector.wait(lambda all_of: any(one.name == "assignment" for one in all_of))
            first.kill()
            serve(site, environment=environment)
            for index in range(1, NUM_DEVICES):
                traced_device(site, index, collector.url)
            site.events()
            (spans,) = rounds_of(collector, 1)
        finally:
            site.close()
    # The assignment of before the kill and those of after it have one parent.
    (root,) = [one for one in spans if one.name == "round"]
    assignments = [one for one in spans if one.name == "assignment"]
    assert len(assignments) == NUM_DEVICES
    assert {one.parent for one in assignments} == {root.span_id}


def test_without_a_destination_nothing_of_opentelemetry_is_loaded() -> None:
    code = (
        "import sys; from fanin.edge.spans import open_spans; import fanin.commands.serve.command; "
        "assert open_spans('x') is None; print(*[name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == ""


def test_the_context_of_a_round_is_that_of_its_names() -> None:
    one = root_of("run", "1", "1.5")
    assert one == root_of("run", "1", "1.5")
    assert one != root_of("run", "2", "1.5")
    assert one.child("x") == one.child("x") != one.child("y")
    assert one.child() != one.child()
