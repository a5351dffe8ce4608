"""Algorithms over gRPC, whose devices and coordinator are killed: each Run ends with the bits of the undisturbed one.

Real processes and real SIGKILLs, at moments that a seed draws. ``fanin verify`` recomputes each Version.
"""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.processes import Site

from fanin.edge.bundles.keys import SigningKey
from fanin.protos.messages import CodecSpec, StageSpec, Training, VersionPublished
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, StopPlan
from fanin.simulation import synthetic_bundle

PUBLISHER = SigningKey(bytes(range(32)))
NUM_ROUNDS = 4
SHAPES = {"a": (300, 200), "b": (3,)}
FEEDBACK = StageSpec(name="error_feedback")
MOMENTS = ("GoOn", "KeepDeadline", "Accumulate", "Close", "Fold", "Publish")
SEEDS = range(3)


@dataclass(frozen=True)
class Algorithm:
    """What a Plan names, and the number of its devices."""

    codec: CodecSpec
    stages: tuple[StageSpec, ...] = ()
    aggregation: AggregationPlan = field(default_factory=AggregationPlan)
    num_devices: int = 3

    @property
    def plan(self) -> Plan:
        """The Plan. Only a Round with all devices closes, so that time decides nothing."""
        num = self.num_devices
        return Plan(
            name="story",
            cohort=CohortPlan(concurrency=num, buffer=num, quorum=num, deadline_s=120.0),
            training=Training(epochs=1, learning_rate=0.1, seed=5),
            codec=self.codec,
            stages=self.stages,
            aggregation=self.aggregation,
            stop=StopPlan(max_rounds=NUM_ROUNDS),
        )


ALGORITHMS = {
    "top 1 % and error feedback": Algorithm(
        codec=CodecSpec(name="topk", max_shift=12, options={"fraction": 0.01, "bits": 8}), stages=(FEEDBACK,)
    ),
    "top 2 % of 2 bits and error feedback": Algorithm(
        codec=CodecSpec(name="topk", max_shift=12, options={"fraction": 0.02, "bits": 2}), stages=(FEEDBACK,)
    ),
    "SCAFFOLD, int4 and error feedback": Algorithm(
        codec=CodecSpec(name="int4", max_shift=12),
        stages=(StageSpec(name="scaffold", options={"num_devices": 3.0}), FEEDBACK),
    ),
    "FedAdam and Krum": Algorithm(
        codec=CodecSpec(name="fixed32", max_shift=0),
        aggregation=AggregationPlan(
            rule="krum", rule_options={"f": 1}, outer_optimizer="fedadam", outer_options={"learning_rate": 0.01}
        ),
        num_devices=5,
    ),
}


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[tuple[Site, Site]]:
    """Two folders for coordinators. Their processes are killed at the end."""
    both = Site(tmp_path / "undisturbed"), Site(tmp_path / "killed")
    for site in both:
        site.folder.mkdir()
    yield both
    for site in both:
        site.close()


def begin(site: Site, algorithm: Algorithm) -> None:
    """Start the Run."""
    has_control = any(stage.name == "scaffold" for stage in algorithm.stages)
    bundle = synthetic_bundle(site.folder / "bundle", PUBLISHER, SHAPES, scaffold=has_control)
    site.start_run(algorithm.plan, bundle, PUBLISHER)


def digests(site: Site) -> list[str]:
    """Check the Run with ``fanin verify``, and return the digests of its Versions."""
    events = [entry.event for entry in site.events()]
    command = [sys.executable, "-m", "fanin.commands.main", "verify", "run", "--state", str(site.state)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stdout.count(": verified") == NUM_ROUNDS + 1
    return [event.version_sha256 for event in events if isinstance(event, VersionPublished)]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_whose_processes_are_killed_has_the_bits_of_the_undisturbed_run(
    sites: tuple[Site, Site], name: str, seed: int
) -> None:
    algorithm, (undisturbed, killed) = ALGORITHMS[name], sites
    undisturbed.serve()
    begin(undisturbed, algorithm)
    for index in range(algorithm.num_devices):
        undisturbed.device(index)
    expected = digests(undisturbed)
    assert len(set(expected)) == NUM_ROUNDS
    undisturbed.close()

    rng = random.Random(f"{name} {seed}")
    moment = f"{rng.choice(('before', 'after'))}:{rng.choice(MOMENTS)}:{rng.randint(2, NUM_ROUNDS - 1)}"
    coordinator = killed.serve(kill_at=moment)
    begin(killed, algorithm)
    # One device has stored its Update and its state, but not sent it, when it is killed.
    first = rng.randrange(algorithm.num_devices)
    devices = [
        killed.device(index, die_at="phase:upload" if index == first else "") for index in range(algorithm.num_devices)
    ]
    assert devices[first].wait(60.0) == -9, devices[first].text()
    devices[first] = killed.device(first)
    for _ in range(2):
        time.sleep(rng.uniform(0.0, 1.0))
        victim = rng.randrange(algorithm.num_devices)
        devices[victim].kill()
        devices[victim] = killed.device(victim)
    assert coordinator.wait(120.0) == -9, coordinator.text()
    victim = rng.randrange(algorithm.num_devices)
    devices[victim].kill()
    killed.serve()
    devices[victim] = killed.device(victim)
    assert digests(killed) == expected
