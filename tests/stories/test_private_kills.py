"""A private Run over gRPC, with devices and a coordinator in processes of their own: noise is drawn once a Round.

The coordinator is killed before and after the close, after the fold and before the publication. Its successor publishes
the Version that the first process computed: no other byte with noise exists.
"""

import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes import Site

from fanin.edge.bundles.keys import SigningKey
from fanin.protos.messages import CodecSpec, Training, VersionPublished
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, PrivacyPlan, StopPlan
from fanin.server.folder import open_archive
from fanin.simulation import synthetic_bundle

PUBLISHER = SigningKey(bytes(range(32)))
NUM_DEVICES = 3
NUM_ROUNDS = 2
SHAPES = {"a": (300, 100), "b": (3,)}
NUM_BUNDLE_BLOBS = 2
PLAN = Plan(
    name="story",
    cohort=CohortPlan(concurrency=NUM_DEVICES, buffer=NUM_DEVICES, quorum=NUM_DEVICES, deadline_s=120.0),
    training=Training(epochs=1, learning_rate=0.1, seed=5),
    codec=CodecSpec(name="fixed32", max_shift=0),
    aggregation=AggregationPlan(max_examples=1),
    stop=StopPlan(max_rounds=NUM_ROUNDS),
    privacy=PrivacyPlan(
        mechanism="central",
        clip_norm=1.0,
        noise_multiplier=2.0,
        epsilon=50.0,
        delta=1e-3,
        population="phones",
        population_size=100,
    ),
)
INT8 = replace(PLAN, codec=CodecSpec(name="int8", max_shift=0))
ADAPTIVE = replace(PLAN, privacy=replace(PLAN.privacy, target_quantile=0.5, bits_noise=3.0, keep_seed_rounds=9))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


def play(site: Site, plan: Plan, kill_at: str) -> set[str]:
    """Run the federation with a coordinator that kills itself. Return the digests of its blobs at that moment."""
    coordinator = site.serve(kill_at=kill_at)
    site.start_run(plan, synthetic_bundle(site.folder / "bundle", PUBLISHER, SHAPES), PUBLISHER)
    for index in range(NUM_DEVICES):
        site.device(index)
    assert coordinator.wait(60.0) == -9, coordinator.text()
    before = blobs(site)
    site.serve()
    return before


def blobs(site: Site) -> set[str]:
    """Return the digests of the stored Chunks of Versions."""
    names = (path.name for path in (site.state / "blobs").rglob("*") if path.is_file())
    return {name for name in names if re.fullmatch("[0-9a-f]{64}", name)}


def used(site: Site) -> set[str]:
    """Return the digests of the Chunks that the record names."""
    archive = open_archive(site.state)
    run = archive.runs.run("run")
    assert run is not None
    bundle = archive.runs.bundle(run.start.version.bundle_sha256)
    assert bundle is not None
    versions = [archive.runs.version("run", number) for number in range(NUM_ROUNDS + 1)]
    artifacts = [version.parameters for version in versions if version is not None]
    for number in range(1, NUM_ROUNDS + 1):
        artifacts += archive.rounds.outer_state("run", number).values()
    return {ref.sha256 for artifact in artifacts for ref in artifact.chunks}


def check(site: Site) -> None:
    """Verify the Run by the command."""
    command = [sys.executable, "-m", "fanin.commands.main", "verify", "run", "--state", str(site.state)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stdout.count(": verified") == NUM_ROUNDS + 1


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [PLAN, INT8, ADAPTIVE], ids=["fixed32", "int8", "adaptive"])
@pytest.mark.parametrize("kill_at", ["before:Close:1", "after:Close:1", "after:Fold:1", "before:Publish:2"])
def test_a_successor_publishes_the_same_noise(site: Site, plan: Plan, kill_at: str) -> None:
    before = play(site, plan, kill_at)
    published = [entry.event for entry in site.events() if isinstance(entry.event, VersionPublished)]
    assert len(published) == NUM_ROUNDS
    bundle = blobs(site) - used(site)
    # What the record does not name is the Bundle: neither process left another Version, or another noised sum.
    assert len(bundle) == NUM_BUNDLE_BLOBS
    assert before <= blobs(site)
    check(site)


@pytest.mark.nightly
def test_a_round_of_coins_counts_those_who_were_drawn_and_came(site: Site) -> None:
    """The roster is enrolled before the Run starts. One device never comes back, and the coordinator is killed."""
    privacy = replace(PLAN.privacy, sampling="coins", sampling_rate=0.7, population_size=NUM_DEVICES, delta=1e-2)
    cohort = CohortPlan(
        concurrency=NUM_DEVICES, buffer=NUM_DEVICES, quorum=0, deadline_s=6.0, min_report_s=float("inf")
    )
    coordinator = site.serve(kill_at="after:Close:1")
    (site.folder / "publisher.pub").write_text(PUBLISHER.public)
    devices = [site.device(index) for index in range(NUM_DEVICES)]
    with sqlite3.connect(site.state / "fanin.db") as database:
        until = time.monotonic() + 20.0
        while database.execute("SELECT count(*) FROM devices").fetchone() != (NUM_DEVICES,):
            assert time.monotonic() < until, [device.text() for device in devices]
            time.sleep(0.05)
    devices[0].kill()
    site.start_run(
        replace(PLAN, cohort=cohort, privacy=privacy),
        synthetic_bundle(site.folder / "bundle", PUBLISHER, SHAPES),
        PUBLISHER,
    )
    late = site.device(NUM_DEVICES)
    assert coordinator.wait(60.0) == -9, coordinator.text()
    site.serve()
    events = [entry.event for entry in site.events()]
    assert len([event for event in events if isinstance(event, VersionPublished) and event.round]) == NUM_ROUNDS
    archive = open_archive(site.state)
    records = [archive.rounds.round("run", number) for number in range(1, NUM_ROUNDS + 1)]
    assert all(record is not None and record.num_accepted <= NUM_DEVICES - 1 for record in records)
    assert late.process.poll() is None
    check(site)
