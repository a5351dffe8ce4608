"""A Run with secure aggregation and noise on devices over gRPC. Two of its device processes drop out in each Round.

The coordinator is killed in each phase. Each of its successors continues from the record: the Run has the Versions of
its Plan, its ledger has one row for each attempt that closed, and ``fanin verify`` recomputes each Version.
"""

import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from support.processes import Running, Site

from fanin.edge.bundles.keys import SigningKey
from fanin.protos.messages import CodecSpec, RoundFailed, Training, VersionPublished
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, PrivacyPlan, RoundPlan, StopPlan
from fanin.server.folder import open_archive
from fanin.simulation import synthetic_bundle

PUBLISHER: Final = SigningKey(bytes(range(32)))
SHAPES: Final = {"a": (60, 10), "b": (3,)}
NUM_STEADY: Final = 6
LIMIT_S: Final = 900.0
"""Devices pause longer after each failed connection, so the time is that of their pauses."""
NUM_DROPOUTS: Final = 2
DROPOUTS: Final = ("phase:sharing", "phase:upload", "phase:training", "phase:unmasking")
"""Where two devices of each Round are killed: before they share keys, before the upload, after it, and before they
unmask."""
KILLS: Final = {
    "advertising of Round 1": "before:Freeze:1",
    "sharing of Round 1": "before:Freeze:2",
    "closing of Round 2": "before:Close:2",
    "closed set of Round 2": "after:Close:1",
    "unmasking of Round 2": "before:Freeze:1",
    "folding of Round 2": "before:Fold:1",
    "folded sum of Round 3": "after:Fold:2",
    "publishing of Round 3": "before:Publish:1",
    "training of Round 4": "before:Accumulate:2",
}
"""The effects before or after which a coordinator kills itself, counted in its own life."""
PLAN: Final = Plan(
    name="story",
    cohort=CohortPlan(
        concurrency=8, buffer=8, quorum=6, deadline_s=240.0, min_report_s=8.0, report_factor=2.0, max_extension_s=0.0
    ),
    training=Training(epochs=1, learning_rate=0.1, seed=5),
    codec=CodecSpec(name="int8", max_shift=0),
    aggregation=AggregationPlan(max_examples=1),
    stop=StopPlan(max_rounds=len(DROPOUTS)),
    round=RoundPlan(protocol="secagg", options={"min_survivors": 6, "dropout_fraction": 0.25}),
    privacy=PrivacyPlan(
        mechanism="skellam",
        clip_norm=1.0,
        noise_multiplier=2.0,
        epsilon=50.0,
        delta=1e-3,
        population="phones",
        population_size=100,
    ),
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


class Cast:
    """The devices that drop out: two in each Round. They wait for their Round until those of the Round before died."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._left = list(DROPOUTS)
        self.dying: list[Running] = []
        self.dead: list[Running] = []

    def act(self) -> None:
        """Send the next two devices once the last two died."""
        if any(device.process.poll() is None for device in self.dying):
            return
        self.dead += self.dying
        moment = self._left.pop(0) if self._left else ""
        first = NUM_STEADY + len(self.dead)
        self.dying = [self._site.device(first + index, die_at=moment) for index in range(NUM_DROPOUTS * bool(moment))]


def is_finished(site: Site) -> bool:
    """Return whether the Run has all its Versions."""
    with sqlite3.connect(site.state / "fanin.db") as database:
        return bool(database.execute("SELECT state FROM runs").fetchone() == ("finished",))


def rows(site: Site) -> list[tuple[int, float]]:
    """Return Round and epsilon of each row of the ledger."""
    with sqlite3.connect(site.state / "fanin.db") as database:
        return database.execute("SELECT round, epsilon FROM privacy_ledger ORDER BY number").fetchall()


@pytest.mark.nightly
def test_a_private_masked_run_survives_dropouts_and_a_coordinator_killed_in_each_phase(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    started_s, kills = time.monotonic(), list(KILLS.values())
    coordinator = site.serve(kill_at=kills.pop(0))
    site.start_run(PLAN, synthetic_bundle(site.folder / "bundle", PUBLISHER, SHAPES), PUBLISHER)
    for index in range(NUM_STEADY):
        site.device(index)
    cast, num_killed = Cast(site), 0
    while not is_finished(site):
        cast.act()
        if coordinator.process.poll() is not None:
            assert coordinator.process.returncode == -9, coordinator.text()
            num_killed += 1
            coordinator = site.serve(kill_at=kills.pop(0) if kills else "")
        assert time.monotonic() < started_s + LIMIT_S, (num_killed, coordinator.text())
        time.sleep(0.05)
    events = [entry.event for entry in site.events()]
    for device in cast.dying:
        device.wait(30.0)
    cast.act()
    elapsed_s = time.monotonic() - started_s

    published = [event for event in events if isinstance(event, VersionPublished) and event.round]
    failures = [event.reason for event in events if isinstance(event, RoundFailed)]
    archive = open_archive(site.state)
    attempts = [archive.rounds.round("run", number) for number in range(1, len(published) + len(failures) + 1)]
    closed = {record.round: record.num_accepted for record in attempts if record is not None and record.num_accepted}
    ledger = rows(site)
    command = [sys.executable, "-m", "fanin.commands.main", "verify", "run", "--state", str(site.state)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    with capsys.disabled():
        print(
            f"\n{len(published)} versions; updates by closed round: {closed}; {len(failures)} failed rounds, "
            f"{num_killed} kills of the coordinator, {len(cast.dead)} killed devices, {elapsed_s:.0f} s\n"
            f"ledger: {', '.join(f'round {number} epsilon {epsilon:.3f}' for number, epsilon in ledger)}\n"
            f"{completed.stdout.strip()}"
        )
    assert (len(published), num_killed) == (len(DROPOUTS), len(KILLS))
    # An attempt that closed is charged, also if it could not be unmasked.
    assert [number for number, _ in ledger] == sorted(closed)
    assert min(closed.values()) >= PLAN.cohort.quorum
    assert [epsilon for _, epsilon in ledger] == sorted(epsilon for _, epsilon in ledger)
    assert len(cast.dead) == NUM_DROPOUTS * len(DROPOUTS)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stdout.count(": verified") == len(DROPOUTS) + 1
