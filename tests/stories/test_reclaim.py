"""A stolen state folder signs the highest Version number, and the publisher takes the Run back, with real processes."""

import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support.processes import Site

from fanin.clients.device.client import Client, ClientOptions, ClientParts
from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.updates import Change
from fanin.clients.transport import Connection, GrpcTransport
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.versions import sign_version
from fanin.protos import messages as m
from fanin.protos.messages import CodecSpec, RoundFailed, Training, VersionPublished
from fanin.protos.names import MAX_NUMBER
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, StopPlan
from fanin.server.storage.disk import Durability
from fanin.server.storage.sqlite.engine import open_engine, writing
from fanin.server.storage.sqlite.runs import SqliteRuns, add_version
from fanin.simulation import synthetic_bundle

PUBLISHER = SigningKey(bytes(range(32)))
PLAN = Plan(
    name="story",
    cohort=CohortPlan(concurrency=1, buffer=1, quorum=1, deadline_s=120.0),
    training=Training(epochs=1, learning_rate=0.1, seed=5),
    codec=CodecSpec(name="fixed32", max_shift=0),
    aggregation=AggregationPlan(),
    stop=StopPlan(max_rounds=2),
)
STOLEN = MAX_NUMBER - 2
"""2^63 - 3. A Round from it can still publish one Version."""
WAIT_S = 60.0


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[tuple[Site, Site]]:
    """The publisher's coordinator, and the thief's. All processes are killed at the end."""
    pair = Site(tmp_path / "own"), Site(tmp_path / "thief")
    for site in pair:
        site.folder.mkdir()
    yield pair
    for site in pair:
        site.close()


def fanin(site: Site, *words: str) -> str:
    """Run a command of an operator, who needs no file of the publisher but its key."""
    (site.folder / "publisher.key").write_text(PUBLISHER.private_bytes().hex())
    command = [sys.executable, "-m", "fanin.commands.main", *words, "--state", str(site.state)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=site.folder)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def until(what: str, is_done: Callable[[], bool]) -> None:
    """Wait for a condition."""
    limit = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < limit, what
        time.sleep(0.05)


def highest(site: Site) -> list[int]:
    """Return the highest (epoch, number) that the device has recorded."""
    return json.loads((site.folder / "device-0" / "seen.json").read_text())["run"]


def reason(site: Site) -> str:
    """Return why the Run waits."""
    with site.operator() as operator:
        return operator.run("run").reason


def steal(site: Site, thief: Site) -> None:
    """Copy the state folder, and sign Version 2^63 - 3 with the Run's key."""
    shutil.copytree(site.state, thief.state)
    thief.listen = site.listen
    engine = open_engine(thief.state / "fanin.db", Durability.PROCESS)
    runs = SqliteRuns(engine)
    newest, run = runs.version("run"), runs.run("run")
    assert newest is not None and run is not None
    key = SigningKey(runs.run_key("run", 1, b"", 0.0))
    signed = sign_version(
        key,
        parent=replace(newest, number=STOLEN - 1),
        run_id="run",
        bundle_sha256=newest.bundle_sha256,
        parameters=newest.parameters,
    )
    with writing(engine) as connection:
        add_version(connection, replace(signed, delegation=run.start.delegation), None, 0.0)
    engine.dispose()


@pytest.mark.nightly
def test_a_publisher_takes_a_run_back_from_a_stolen_state_folder(sites: tuple[Site, Site]) -> None:
    site, thief = sites
    own = site.serve()
    site.start_run(PLAN, synthetic_bundle(site.folder / "bundle", PUBLISHER, {"a": (3, 5)}), PUBLISHER)
    site.device(0)
    site.events()
    assert highest(site) == [1, 1]
    own.kill()

    # The device takes the thief's Version, because the stolen key may sign every number of its epoch.
    steal(site, thief)
    stolen = thief.serve()
    fanin(thief, "resume", "run", "--rounds", "1")
    until("the device did not take the stolen version", lambda: highest(site) == [1, STOLEN])
    thief.events()
    stolen.kill()

    # From now on the device refuses the work of its own coordinator.
    own = site.serve()
    fanin(site, "resume", "run", "--rounds", "2")
    older = f"version 2 of run run: older than version {STOLEN}, which this device has verified; rejected"
    until("the device did not refuse", lambda: older in reason(site))

    # One command of the publisher takes the Run back, while its Round is open.
    text = fanin(site, "reclaim", "run", "--version", "1", "--rounds", "2")
    assert text == "run run is running, its newest version is 3, in epoch 2\n"
    events = [entry.event for entry in site.events()]
    published = [event for event in events if isinstance(event, VersionPublished)]
    assert [(event.number, event.parent, event.new_epoch) for event in published[2:]] == [
        (3, 2, 2),
        (4, 3, 0),
        (5, 4, 0),
    ]
    assert published[2].version_sha256 == published[0].version_sha256 != published[1].version_sha256
    assert (published[2].adopted_run_id, published[2].adopted_number) == ("run", 1)
    assert RoundFailed(round=3, reason="the publisher reclaimed the run with version 3") in events
    assert highest(site) == [2, 4]
    assert fanin(site, "verify", "run").count(": verified") == 6
    assert "  epoch     2\n" in fanin(site, "describe", "run")
    assert "its publisher reclaimed the run: epoch 2" in fanin(site, "watch", "run")

    # The device refuses a replay of the stolen epoch, also after a restart of its process.
    own.kill()
    site.started[1].kill()
    stolen = thief.serve()
    fanin(thief, "resume", "run", "--rounds", "1")
    site.device(0)
    until("the device did not refuse the replay", lambda: "of epoch 2, not 1" in reason(thief))
    assert highest(site) == [2, 4]
    stolen.kill()

    # The key of the first epoch is no longer in the folder.
    engine = open_engine(site.state / "fanin.db", Durability.PROCESS)
    with engine.connect() as connection:
        keys = connection.exec_driver_sql("SELECT run_id, epoch FROM run_keys").all()
    engine.dispose()
    assert [tuple(row) for row in keys] == [("run", 2)]


@dataclass(frozen=True, slots=True)
class EndlessTrainer:
    """A trainer whose training never ends by itself. It notes each Version that it trains from."""

    versions: list[int] = field(default_factory=list)
    runtime: str = "synthetic 1"
    graph_format: str = "onnx"

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """Train until the device must stop."""
        self.versions.append(assignment.version.number)
        while should_continue():
            time.sleep(0.02)
        raise AssertionError("should_continue raises")


def test_a_device_in_training_stops_once_its_assignment_is_unknown(sites: tuple[Site, Site]) -> None:
    """The publisher reclaims the Run, and the coordinator is killed before the device hears of it."""
    site, _ = sites
    site.serve()
    plan = replace(PLAN, cohort=replace(PLAN.cohort, deadline_s=60.0))
    site.start_run(plan, synthetic_bundle(site.folder / "bundle", PUBLISHER, {"a": (3, 5)}), PUBLISHER)
    trainer, cache = EndlessTrainer(), Cache(site.folder / "device")
    line = Connection(site.address, site.ca)
    parts = ClientParts(
        transport=GrpcTransport(line, cache.key()),
        cache=cache,
        trainer=trainer,
        trusted=(PUBLISHER.public,),
        rng=random.Random(0),
    )
    client = Client(parts, ClientOptions(token=site.device_token))
    thread = threading.Thread(target=client.run, daemon=True)
    thread.start()
    try:
        until("the device did not begin", lambda: trainer.versions == [0])
        fanin(site, "reclaim", "run")
        site.started[0].kill()
        site.serve()
        until("the device did not stop", lambda: trainer.versions == [0, 1])
    finally:
        client.stop()
        thread.join(WAIT_S)
        line.close()
