"""What ended the runs of a published federation of eight hospitals on another platform, repeated here.

The list is F1 to F10 of ``docs/SWARM_FAILURE_MODES.md`` in github.com/KatherLab/MediSwarm (2026). Each test says what
happened there. Sites that train for hours are on the virtual clock, with the coordinator and the client of production.
"""

import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from support import federations as f
from support.doors import listening
from support.linear import NUM_CLASSES, NUM_INPUTS, linear_graphs
from support.processes import Running, Site, start
from support.scenarios import bundle_in, outcome_of
from support.values import PUBLISHER
from support.values import plan as small_plan
from support.virtual import PUBLISHER as VIRTUAL_PUBLISHER
from support.virtual import plan as virtual_plan

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.commands.console.show import event_row
from fanin.edge.assembly.assemble import assemble
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import (
    Assignment,
    DevicesGone,
    LoggedEvent,
    RoundClosed,
    RoundFailed,
    RunRested,
    VersionPublished,
)
from fanin.protos.plans import ParticipantsPlan
from fanin.server.access.authority import local_identity
from fanin.simulation import Habits, Member, Scenario, SyntheticTrainer, play

HOUR_S = 3600.0
NUM_SITES = 8
USUAL = Habits(work_s=(0.5 * HOUR_S, HOUR_S))
LARGEST = Habits(work_s=(8.5 * HOUR_S, 9.0 * HOUR_S))
"""The largest site has nine times the data of the others."""
WAIT_S = 60.0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A folder for a coordinator's process, which is killed at the end."""
    site = Site(tmp_path)
    yield site
    site.close()


def failed(events: Iterable[LoggedEvent]) -> list[str]:
    """Return the reasons of the Rounds that failed."""
    return [entry.event.reason for entry in events if isinstance(entry.event, RoundFailed)]


def accepted(events: Iterable[LoggedEvent]) -> list[int]:
    """Return the number of the accepted Updates of each Round that was published."""
    return [entry.event.num_accepted for entry in events if isinstance(entry.event, RoundClosed)]


@pytest.mark.nightly
def test_f1_a_site_that_trains_for_nine_hours_is_not_declared_dead(tmp_path: Path) -> None:
    """There a site that reported nothing for two hours ended the run, although it was training."""
    plan = virtual_plan(concurrency=NUM_SITES, buffer=NUM_SITES, quorum=NUM_SITES, deadline_s=24 * HOUR_S, max_rounds=5)
    outcome = outcome_of(tmp_path, plan, [USUAL] * (NUM_SITES - 1) + [LARGEST])
    assert accepted(outcome.events) == [NUM_SITES] * 5
    assert failed(outcome.events) == []
    assert not any(isinstance(entry.event, DevicesGone) for entry in outcome.events)


@dataclass(frozen=True)
class LosesItsAccelerator(SyntheticTrainer):
    """A trainer whose device fails in two Rounds, as one whose GPU is taken away until its container restarts."""

    def train(self, model: OpenedModel, assignment: Assignment, should_continue: ShouldContinue) -> Change:
        """Train, except in Rounds 2 and 3."""
        if assignment.round in (2, 3):
            raise InvalidInput("training: Failed to initialize NVML: Unknown Error", code="FN-0848")
        return super().train(model, assignment, should_continue)


def test_f2_a_site_that_loses_its_accelerator_gives_up_its_rounds_and_returns(tmp_path: Path) -> None:
    """There the training of the site crashed about once a day, until somebody repaired the host."""
    plan = virtual_plan(concurrency=4, buffer=4, quorum=3, deadline_s=3 * HOUR_S, max_rounds=8)
    members = [
        Member(device=f"site-{index}", trainer=SyntheticTrainer(partition=index), habits=USUAL) for index in range(3)
    ]
    members.append(Member(device="site-3", trainer=LosesItsAccelerator(partition=3), habits=USUAL))
    scenario = Scenario(plan=plan, bundle=bundle_in(tmp_path), publisher=VIRTUAL_PUBLISHER, members=tuple(members))
    outcome = play(scenario, tmp_path)
    assert accepted(outcome.events)[1:3] == [3, 3]
    assert accepted(outcome.events)[-1] == 4, "the repaired site takes part again"
    assert failed(outcome.events) == []


@pytest.mark.nightly
def test_f3_a_site_that_was_killed_starts_again_and_nobody_removes_a_lock(site: Site) -> None:
    """There a file with the number of a dead process kept the site from starting, and it looked healthy."""
    site.serve()
    site.start_run(f.plan(), f.bundle_in(site.folder, f.SMALL_SHAPES), f.PUBLISHER)
    first = site.device(0)
    await_text(first, "training")
    first.kill()
    for index in range(f.NUM_DEVICES):
        site.device(index)
    assert isinstance(site.events()[-1].event, RunRested)


def await_text(running: Running, text: str) -> None:
    """Wait until a process has written a text."""
    until = time.monotonic() + WAIT_S
    while text not in running.text():
        assert time.monotonic() < until and running.process.poll() is None, running.text()
        time.sleep(0.02)


def joined(site: Site, *options: object, ca: Path | None = None) -> Running:
    """Start ``fanin join`` for a site with data of its own."""
    (site.folder / "token").write_text(site.device_token)
    (site.folder / "publisher.pub").write_text(PUBLISHER.public)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((20, NUM_INPUTS)).astype(np.float32)
    np.savez(site.folder / "data.npz", x=x, y=rng.integers(0, NUM_CLASSES, 20).astype(np.int32))
    files = {"--token-file": "token", "--publisher": "publisher.pub", "--data": "data.npz"}
    words = [str(word) for option, name in files.items() for word in (option, site.folder / name)]
    words += ["--ca", str(ca or site.state / "tls" / "ca.pem"), "--runtime", "onnx", *map(str, options)]
    running = start(["-m", "fanin.commands.main", "join", "--server", site.listen, *words], site.folder / "joined.log")
    site.started.append(running)
    return running


def test_f4_a_folder_that_cannot_be_written_is_named_before_the_site_calls_anybody(site: Site) -> None:
    """There the cache lay below a read-only mount, and the training crashed at once in each round."""
    site.serve()
    running = joined(site, "--state", "/proc/fanin-site")
    assert running.wait(WAIT_S) != 0
    (line,) = running.text().splitlines()
    assert "/proc/fanin-site" in line and "[FN-" in line, line
    with site.operator() as operator:
        site.start_run(f.plan(), f.bundle_in(site.folder, f.SMALL_SHAPES), f.PUBLISHER)
        assert operator.describe("run").num_devices == 0


def test_f5_a_site_that_is_late_is_left_out_of_one_round_and_never_ends_the_run(tmp_path: Path) -> None:
    """There a late model of an earlier round was not recognized, and ended the run."""
    late = Habits(work_s=(3.0 * HOUR_S, 3.2 * HOUR_S))
    plan = virtual_plan(concurrency=3, buffer=3, quorum=2, deadline_s=24 * HOUR_S, max_rounds=8)
    outcome = outcome_of(tmp_path / "strict", plan, [USUAL, USUAL, late])
    assert failed(outcome.events) == []
    assert set(accepted(outcome.events)) == {2}
    stale = virtual_plan(concurrency=3, buffer=2, quorum=2, deadline_s=24 * HOUR_S, max_rounds=8, max_staleness=8)
    outcome = outcome_of(tmp_path / "stale", stale, [USUAL, USUAL, late])
    assert failed(outcome.events) == []
    closed = [entry.event for entry in outcome.events if isinstance(entry.event, RoundClosed)]
    assert any("device-2" in event.accepted for event in closed), "with staleness its Update counts in a later Round"


class Tunnel:
    """What carries connections to an address until it is cut, and again after it is restored."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._open: list[socket.socket] = []
        self._is_up = True

    def serve(self, near: socket.socket) -> None:
        """Carry one connection until either end closes it."""
        if not self._is_up:
            return
        near.settimeout(None)
        with socket.create_connection(self._target) as far:
            self._open += [near, far]
            back = threading.Thread(target=_carry, args=(far, near))
            back.start()
            _carry(near, far)
            back.join()

    def cut(self) -> None:
        """Break all connections, and end new ones."""
        self._is_up = False
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def restore(self) -> None:
        """Carry connections again."""
        self._is_up = True


def _carry(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    with suppress(OSError):
        other.shutdown(socket.SHUT_RDWR)


@pytest.mark.nightly
def test_f6_a_site_whose_tunnel_breaks_during_its_upload_continues_when_it_is_back(site: Site) -> None:
    """There the loss of a VPN for 2.5 hours stalled the round until a timeout of 24 hours, or ended the run."""
    site.serve()
    site.start_run(f.plan(), f.bundle_in(site.folder), f.PUBLISHER)
    tunnel = Tunnel(site.address)
    devices = [site.device(index) for index in range(f.NUM_DEVICES - 1)]
    with listening(tunnel.serve) as address:
        listen, site.listen = site.listen, address
        devices.append(site.device(f.NUM_DEVICES - 1))
        site.listen = listen
        await_text(devices[-1], "uploading")
        tunnel.cut()
        time.sleep(3.0)
        tunnel.restore()
        events = site.events()
        assert [device.process.poll() for device in devices] == [None] * f.NUM_DEVICES
        tunnel.cut()
    assert accepted(events) == [f.NUM_DEVICES]
    assert failed(events) == []


@pytest.mark.nightly
def test_f7_a_site_needs_no_shared_memory(site: Site) -> None:
    """There workers of a data loader died, because a container's /dev/shm is small."""
    site.serve()
    site.start_run(
        small_plan(buffer=1, max_rounds=1), assemble(linear_graphs(), site.folder / "b", PUBLISHER), PUBLISHER
    )
    shared: list[str] = []
    running = joined(site, "--state", site.folder / "device", "--max-updates", "1")
    while running.process.poll() is None:
        with suppress(OSError):
            shared += [line for line in maps_of(running.process.pid) if "/dev/shm" in line]
        time.sleep(0.005)
    assert running.wait(WAIT_S) == 0, running.text()
    assert shared == []


def maps_of(pid: int) -> list[str]:
    """Return the lines of a process's memory map."""
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def test_f8_a_round_without_its_largest_sites_is_never_taken_for_a_complete_one(tmp_path: Path) -> None:
    """There five of seven sites sufficed, and a run without the two largest ones was reported as a success."""
    habits = [USUAL] * (NUM_SITES - 2) + [LARGEST] * 2
    plan = virtual_plan(concurrency=NUM_SITES, buffer=NUM_SITES, quorum=5, deadline_s=24 * HOUR_S, max_rounds=3)
    outcome = outcome_of(tmp_path / "quorum", plan, habits)
    # With a quorum alone the same happens, but each Version says so.
    covered = [version.coverage for version in outcome.versions if version.round]
    assert [coverage and coverage.num_devices for coverage in covered] == [NUM_SITES - 2] * 3
    required = replace(plan, participants=ParticipantsPlan(min_devices=NUM_SITES, on_missing="wait"))
    outcome = outcome_of(tmp_path / "required", required, habits)
    assert accepted(outcome.events) == [NUM_SITES] * 3
    assert failed(outcome.events) == []


def test_f9_a_site_with_the_files_of_an_earlier_coordinator_ends_with_the_reason(site: Site) -> None:
    """There such a site retried for three weeks, and its container was reported as healthy."""
    site.serve()
    earlier = local_identity(site.folder / "earlier", ("localhost",), datetime.now(UTC))
    (site.folder / "old-ca.pem").write_bytes(earlier.ca_certificate)
    running = joined(site, "--state", site.folder / "device", ca=site.folder / "old-ca.pem")
    assert running.wait(WAIT_S) != 0
    assert "authority" in running.text() and "[FN-" in running.text(), running.text()


def test_f10_the_results_of_all_sites_are_in_the_record_before_the_run_ends(site: Site) -> None:
    """There the file of results was written before the results arrived, and was empty although the log named them."""
    site.serve()
    bundle = assemble(linear_graphs(), site.folder / "b", PUBLISHER)
    site.start_run(small_plan(buffer=1, max_rounds=3), bundle, PUBLISHER)
    joined(site, "--state", site.folder / "device", "--max-updates", "3")
    events = site.events()
    assert isinstance(events[-1].event, RunRested)
    rows = [event_row(entry) for entry in events if isinstance(entry.event, VersionPublished)]
    evaluated = [row["evaluation"] for row in rows if row.get("evaluation")]
    assert len(evaluated) == 3, json.dumps(rows)
