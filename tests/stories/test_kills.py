"""The failures that fanin claims to survive, with real processes and real SIGKILLs.

Each story ends with the bits of the undisturbed federation, and ``fanin verify`` agrees. ``test_every_kill`` does this
at every possible moment, on a virtual clock.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from support.processes import Site

from fanin.edge.bundles.keys import SigningKey
from fanin.protos.messages import CodecSpec, RoundFailed, RoundLacks, Training, VersionPublished
from fanin.protos.plans import AggregationPlan, CohortPlan, ParticipantsPlan, Plan, StopPlan
from fanin.server.protocols.events import (
    Assign,
    Effect,
    Fail,
    Freeze,
    LookForAbsent,
    RecordExtension,
    RecordGone,
    RecordLack,
    Warn,
)
from fanin.simulation import synthetic_bundle

PUBLISHER = SigningKey(bytes(range(32)))
OTHERS = (Assign, Fail, Freeze, RecordExtension, RecordLack, RecordGone, Warn, LookForAbsent)
EFFECTS = [effect.__name__ for effect in get_args(Effect) if effect not in OTHERS]
NUM_DEVICES = 3
NUM_ROUNDS = 2
SHAPES = {"a": (600, 1000), "b": (3,)}
"""2.4 MB for each Update: three Chunks, so that a device can die in the middle."""
PLAN = Plan(
    name="story",
    cohort=CohortPlan(concurrency=NUM_DEVICES, buffer=NUM_DEVICES, quorum=NUM_DEVICES, deadline_s=120.0),
    training=Training(epochs=1, learning_rate=0.1, seed=5),
    codec=CodecSpec(name="fixed32", max_shift=0),
    aggregation=AggregationPlan(),
    stop=StopPlan(max_rounds=NUM_ROUNDS),
)


@pytest.fixture
def new_site(tmp_path: Path) -> Iterator[Callable[[str], Site]]:
    """A function that creates sites. The processes that are left in them are killed at the end."""
    sites: list[Site] = []

    def create(name: str) -> Site:
        site = Site(tmp_path / name)
        site.folder.mkdir()
        sites.append(site)
        return site

    yield create
    for site in sites:
        site.close()


def begin(site: Site) -> None:
    """Start the Run."""
    site.start_run(PLAN, synthetic_bundle(site.folder / "bundle", PUBLISHER, SHAPES), PUBLISHER)


def digests(site: Site) -> list[str]:
    """Check the Run with ``fanin verify``, and return the digests of its Versions."""
    events = [entry.event for entry in site.events()]
    command = [sys.executable, "-m", "fanin.commands.main", "verify", "run", "--state", str(site.state)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stdout.count(": verified") == NUM_ROUNDS + 1
    return [event.version_sha256 for event in events if isinstance(event, VersionPublished)]


@pytest.fixture(scope="module")
def expected_digests(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests of the undisturbed federation's Versions."""
    site = Site(tmp_path_factory.mktemp("undisturbed"))
    try:
        site.serve()
        begin(site)
        for index in range(NUM_DEVICES):
            site.device(index)
        version_digests = digests(site)
        assert len(version_digests) == NUM_ROUNDS
        return version_digests
    finally:
        site.close()


@pytest.mark.nightly
def test_a_device_killed_in_mid_upload_resumes_it(new_site: Callable[[str], Site], expected_digests: list[str]) -> None:
    site = new_site("device")
    site.serve()
    begin(site)
    for index in range(NUM_DEVICES - 1):
        site.device(index)
    device = site.device(NUM_DEVICES - 1, die_at=str(1_500_000))
    assert device.wait(60.0) == -9, device.text()
    # The complete first Chunk remains, and the incomplete one does not count. The other devices leave only their
    # Updates.
    sizes = [path.stat().st_size for path in (site.state / "spool").glob("*.part")]
    assert 1 << 20 in sizes, sizes
    site.device(NUM_DEVICES - 1)
    assert digests(site) == expected_digests


@pytest.mark.nightly
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("effect", EFFECTS)
def test_a_coordinator_killed_around_any_effect_resumes_the_same_round(
    new_site: Callable[[str], Site], expected_digests: list[str], effect: str, side: str
) -> None:
    site = new_site("coordinator")
    # The first GoOn opens the first Round, while an operator still waits for the reply to its start of the Run.
    coordinator = site.serve(kill_at=f"{side}:{effect}:{2 if effect == 'GoOn' else 1}")
    begin(site)
    for index in range(NUM_DEVICES):
        site.device(index)
    assert coordinator.wait(60.0) == -9, coordinator.text()
    site.serve()
    assert digests(site) == expected_digests


@pytest.mark.nightly
def test_a_coordinator_killed_while_devices_upload_keeps_the_accepted_updates(
    new_site: Callable[[str], Site], expected_digests: list[str]
) -> None:
    site = new_site("accumulate")
    coordinator = site.serve(kill_at="before:Accumulate:2")
    begin(site)
    for index in range(NUM_DEVICES):
        site.device(index)
    assert coordinator.wait(60.0) == -9, coordinator.text()
    time.sleep(0.5)
    site.serve()
    assert digests(site) == expected_digests


@pytest.mark.nightly
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_coordinator_killed_while_a_round_waits_for_participants_waits_again(
    new_site: Callable[[str], Site], expected_digests: list[str], side: str
) -> None:
    site = new_site("lacking")
    waiting = replace(
        PLAN,
        cohort=replace(PLAN.cohort, quorum=1, deadline_s=2.0),
        participants=ParticipantsPlan(min_devices=NUM_DEVICES, on_missing="wait"),
    )
    coordinator = site.serve(kill_at=f"{side}:RecordLack:1")
    site.start_run(waiting, synthetic_bundle(site.folder / "bundle", PUBLISHER, SHAPES), PUBLISHER)
    for index in range(NUM_DEVICES - 1):
        site.device(index)
    assert coordinator.wait(60.0) == -9, coordinator.text()
    site.serve()
    time.sleep(4.0)
    site.device(NUM_DEVICES - 1)
    assert digests(site) == expected_digests
    events = [entry.event for entry in site.events()]
    assert not [event for event in events if isinstance(event, RoundFailed)]
    assert next(event.missing for event in events if isinstance(event, RoundLacks)) == {"min_devices": 1}
