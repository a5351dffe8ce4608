"""The virtual device: its cache, and what errors of a coordinator are to it."""

import random
from pathlib import Path

import pytest
from support.errors import raises
from support.one_device import Rounds, rounds, take_part
from support.values import PUBLISHER, STRANGER

from fanin.clients.testing import LoopbackTransport, SyntheticTrainer, VirtualDevice
from fanin.protos.errors import STATUS, Conflict, FaninError

ROUNDS = 5


def device_of(fleet: Rounds, trusted: str = PUBLISHER.public) -> VirtualDevice:
    line = LoopbackTransport(fleet=fleet, device="device", latency_s=0.01)
    return VirtualDevice(line, SyntheticTrainer(partition=0), (trusted,), random.Random(1), lambda rng: 1.0)


def test_the_cache_holds_the_newest_assignment_alone(tmp_path: Path) -> None:
    fleet = rounds(tmp_path, ROUNDS)
    last = fleet.works[-1]
    device = device_of(fleet)
    take_part(fleet, device)
    assert device.session.num_accepted == ROUNDS
    graph = fleet.bundle.manifest.artifacts["graph"]
    needed = (*last.bundle.manifest.chunks, *graph.chunks, *last.version.parameters.chunks)
    assert device.cached == {ref.sha256 for ref in needed}


def test_a_fetch_that_fails_leaves_nothing_more_in_the_cache(tmp_path: Path) -> None:
    fleet = rounds(tmp_path, ROUNDS)
    manifest = fleet.works[0].bundle.manifest
    device = device_of(fleet, trusted=STRANGER.public)
    take_part(fleet, device)
    assert len(fleet.failures) == ROUNDS
    assert device.cached == {ref.sha256 for ref in manifest.chunks}


@pytest.mark.parametrize("call", ["check_in", "download", "upload", "report"])
@pytest.mark.parametrize("kind", sorted(STATUS, key=lambda kind: kind.__name__))
def test_every_error_of_a_coordinator_has_a_place_in_the_session(
    tmp_path: Path, call: str, kind: type[FaninError]
) -> None:
    fleet = rounds(tmp_path, ROUNDS)
    fleet.faults = {call: kind("boom")}
    device = device_of(fleet, trusted=STRANGER.public if call == "report" else PUBLISHER.public)
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
