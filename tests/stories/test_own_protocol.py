"""The round protocol of the docs, from outside the package: over gRPC, with processes that are killed."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.outside import file_block
from support.processes import Site
from support.protocols import PAGE, install_protocols

from fanin.edge.bundles.keys import SigningKey
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import CodecSpec, Training, VersionPublished
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, RoundPlan, StopPlan
from fanin.simulation import synthetic_bundle

PUBLISHER = SigningKey(bytes(range(32)))
NUM_DEVICES = 3
PLAN = Plan(
    name="story",
    cohort=CohortPlan(concurrency=NUM_DEVICES, buffer=NUM_DEVICES, quorum=NUM_DEVICES, deadline_s=120.0),
    training=Training(epochs=1, learning_rate=0.1, seed=5),
    codec=CodecSpec(name="fixed32", max_shift=0),
    aggregation=AggregationPlan(),
    stop=StopPlan(max_rounds=1),
    round=RoundPlan(protocol="commit_reveal", options={"deadline_s": 60.0}),
)
KILLS = {
    "committing": "before:Freeze:1",
    "after the commitments": "after:Freeze:1",
    "revealing": "before:Freeze:2",
    "after the shares": "after:Freeze:2",
    "training": "before:Accumulate:2",
    "closing": "before:Close:1",
    "folding": "before:Fold:1",
    "publishing": "before:Publish:1",
}


@pytest.fixture
def new_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Site]]:
    """A function that creates sites. The processes of this test have the packages of the docs page."""
    install_protocols(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    sites: list[Site] = []

    def create(name: str) -> Site:
        site = Site(tmp_path / name)
        site.folder.mkdir()
        sites.append(site)
        return site

    yield create
    for site in sites:
        site.close()


def digests(site: Site) -> list[str]:
    """Check the Run with ``fanin verify``, and return the digests of its Versions."""
    events = [entry.event for entry in site.events()]
    command = [sys.executable, "-m", "fanin.commands.main", "verify", "run", "--state", str(site.state)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return [event.version_sha256 for event in events if isinstance(event, VersionPublished)]


def federate(site: Site, kill_at: str = "", protocol: str = "commit_reveal") -> list[str]:
    """Run a Round whose coordinator is killed, and return the digest of its Version."""
    coordinator = site.serve(kill_at=kill_at)
    plan = PLAN if protocol == "commit_reveal" else replace(PLAN, round=RoundPlan(protocol=protocol))
    site.start_run(plan, synthetic_bundle(site.folder / "bundle", PUBLISHER, {"a": (60, 10), "b": (3,)}), PUBLISHER)
    for index in range(NUM_DEVICES):
        site.device(index)
    if kill_at:
        assert coordinator.wait(60.0) == -9, coordinator.text()
        site.serve()
    return digests(site)


def test_the_example_has_fewer_than_80_lines() -> None:
    assert len(file_block(PAGE.read_text(), "commit_reveal.py").splitlines()) < 80


def test_a_round_over_grpc_continues_after_a_kill_between_its_phases(new_site: Callable[[str], Site]) -> None:
    assert len(federate(new_site("killed"), KILLS["revealing"])) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("phase", KILLS)
def test_a_coordinator_killed_in_each_phase_publishes_the_same_bits(
    new_site: Callable[[str], Site], phase: str
) -> None:
    # The protocol exchanges messages and leaves the Updates alone.
    expected = federate(new_site("plain"), protocol="plain")
    assert federate(new_site("killed"), KILLS[phase]) == expected


@pytest.mark.nightly
def test_an_unknown_protocol_starts_no_run(new_site: Callable[[str], Site]) -> None:
    site = new_site("unknown")
    site.serve()
    bundle = synthetic_bundle(site.folder / "bundle", PUBLISHER, {"a": (3,)})
    with pytest.raises(InvalidPlan, match=r"did you mean commit_reveal\?") as excinfo:
        site.start_run(replace(PLAN, round=RoundPlan(protocol="comit_reveal")), bundle, PUBLISHER)
    assert excinfo.value.code == "FN-0210"
