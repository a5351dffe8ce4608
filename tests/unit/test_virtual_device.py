"""The virtual device: its cache, and its reaction to errors of a coordinator."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.errors import raises
from support.one_device import Rounds, rounds, take_part
from support.values import PUBLISHER, STRANGER

from fanin.clients.device.contract import Countdown, example_model
from fanin.clients.device.storage.states import StateLabel
from fanin.protos import messages as m
from fanin.protos.errors import STATUS, Conflict, FaninError
from fanin.simulation import LoopbackTransport, SyntheticTrainer, VirtualDevice

ROUNDS = 5


class KilledHere(BaseException):
    """The end of a process. No code catches it."""


def device_of(fleet: Rounds, publisher: str = PUBLISHER.public) -> VirtualDevice:
    transport = LoopbackTransport(fleet=fleet, device="device", latency_s=0.01)
    return VirtualDevice(transport, SyntheticTrainer(partition=0), (publisher,), random.Random(1), lambda *_: 1.0)


def test_the_cache_holds_the_newest_assignment_alone(tmp_path: Path) -> None:
    fleet = rounds(tmp_path, ROUNDS)
    last = fleet.works[-1]
    device = device_of(fleet)
    take_part(fleet, device)
    assert device.session.num_accepted == ROUNDS
    graph = fleet.bundle.manifest.artifacts["graph"]
    chunks = (*last.bundle.manifest.chunks, *graph.chunks, *last.version.parameters.chunks)
    assert set(device.folder.chunks) == {ref.sha256 for ref in chunks}


def test_a_fetch_that_fails_leaves_nothing_more_in_the_cache(tmp_path: Path) -> None:
    fleet = rounds(tmp_path, ROUNDS)
    manifest = fleet.works[0].bundle.manifest
    device = device_of(fleet, publisher=STRANGER.public)
    take_part(fleet, device)
    assert len(fleet.failures) == ROUNDS
    assert set(device.folder.chunks) == {ref.sha256 for ref in manifest.chunks}


def add_stages(fleet: Rounds) -> None:
    """Give a Run error feedback with a coarse grid; every Round publishes a Version."""
    fleet.works = [
        replace(
            work,
            stages=(m.StageSpec(name="error_feedback"),),
            grid=(-8, -8),
            state=m.StageState(lineage=0, round=work.round - 1),
        )
        for work in fleet.works
    ]


def test_a_virtual_device_applies_stages_and_keeps_their_states(tmp_path: Path) -> None:
    fleet = rounds(tmp_path, ROUNDS)
    add_stages(fleet)
    works, table = list(fleet.works), fleet.bundle.manifest.table
    device = device_of(fleet)
    take_part(fleet, device)
    assert sorted(device.folder.states.files) == [("run", ROUNDS - 1), ("run", ROUNDS)]
    residual = np.zeros(table.num_values, np.float32)
    for work in works:
        change = SyntheticTrainer(partition=0).train(example_model(fleet.bundle), work, Countdown()).values
        total = change + residual
        residual = total - (np.rint(total * 256) / 256).astype(np.float32)
    label = StateLabel(run_id="run", lineage=0, round=ROUNDS)
    first = {"error_feedback": {"residual": np.zeros_like(residual)}}
    assert np.array_equal(device.folder.states.get(label, first)["error_feedback"]["residual"], residual)


@pytest.mark.parametrize("call", ["check_in", "download", "upload"])
def test_a_virtual_device_that_restarts_has_the_same_states(tmp_path: Path, call: str) -> None:
    states = []
    for name in ("whole", "restarted"):
        fleet = rounds(tmp_path / name, ROUNDS)
        add_stages(fleet)
        device = device_of(fleet)
        if name == "restarted":
            fleet.faults = {call: KilledHere()}
            with pytest.raises(KilledHere):
                take_part(fleet, device)
            device.restart()
            # The second virtual clock has its own event loop.
            fleet.done = asyncio.Event()
        take_part(fleet, device)
        states.append(device.folder.states.files)
    assert states[0] == states[1]


@pytest.mark.parametrize("call", ["check_in", "download", "upload", "report"])
@pytest.mark.parametrize("kind", sorted(STATUS, key=lambda kind: kind.__name__))
def test_every_error_of_a_coordinator_has_a_place_in_the_session(
    tmp_path: Path, call: str, kind: type[FaninError]
) -> None:
    fleet = rounds(tmp_path, ROUNDS)
    fleet.faults = {call: kind("boom")}
    device = device_of(fleet, publisher=STRANGER.public if call == "report" else PUBLISHER.public)
    try:
        take_part(fleet, device)
    except Conflict as exc:
        assert str(exc) == "boom"
    else:
        assert device.session.num_accepted + len(fleet.failures) >= ROUNDS


def test_a_check_in_that_is_refused_for_good_ends_the_device(tmp_path: Path) -> None:
    fleet = rounds(tmp_path, ROUNDS)
    fleet.faults = {"check_in": Conflict("no")}
    with raises(Conflict, "no"):
        take_part(fleet, device_of(fleet))
