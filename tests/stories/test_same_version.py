"""One Plan over real gRPC and in memory: the same closed set gives the same Version, however it arrives."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support import federations as f
from support.hosted import Hosted
from support.peers import PIECE_BYTES, Peer, pieces
from support.scenarios import PATIENT_S, WILD, members

from fanin.protos import messages as m
from fanin.protos.chunks import CHUNK_BYTES
from fanin.protos.messages import RoundClosed
from fanin.protos.plans import Plan
from fanin.simulation import Outcome, Scenario, play

FAST = replace(WILD, piece_s=0.01, cut=0.1)
"""An Update of 1.2 MB has 293 pieces on a loopback transport."""


def patient_plan(num_rounds: int) -> Plan:
    """Return the stories' Plan, with a deadline that no device misses."""
    plan = f.plan(num_rounds=num_rounds)
    return replace(plan, cohort=replace(plan.cohort, deadline_s=PATIENT_S))


@pytest.fixture(scope="module")
def memory_outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Two Rounds on a virtual clock. Devices misbehave as badly as they can, and the coordinator restarts."""
    folder = tmp_path_factory.mktemp("memory")
    scenario = Scenario(
        plan=patient_plan(2),
        bundle=f.bundle_in(folder),
        publisher=f.PUBLISHER,
        members=members([FAST] * f.NUM_DEVICES),
        seed=1,
        stops_s=(30.0, 90.0),
    )
    outcome = play(scenario, folder)
    assert {"stops", "is back"} <= {entry.what for entry in outcome.log}
    assert any(entry.what.startswith("lies: ") for entry in outcome.log)
    return outcome


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    """The same Plan behind gRPC and TLS."""
    host = Hosted(tmp_path).start()
    host.start_run(patient_plan(2), f.bundle_in(tmp_path), f.PUBLISHER)
    yield host
    host.stop()


def uploads_in_order(host: Hosted, devices: list[Peer]) -> None:
    """Let the devices take part in their order."""
    for device in devices:
        device.take_part()


def uploads_in_reverse_over_restarts(host: Hosted, devices: list[Peer]) -> None:
    """Let the devices take part in reverse order, and restart the coordinator after each."""
    for device in reversed(devices):
        device.take_part()
        host.stop()
        host.start()


def interleaved_uploads_over_a_restart(host: Hosted, devices: list[Peer]) -> None:
    """Send half of each Update, restart, and then send the rest of each.

    No data that was stored before the restart is sent again.
    """
    updates = []
    for device in devices:
        device.begin()
        header, payload = device.update()
        half = f.NUM_VALUES * 4 // PIECE_BYTES * PIECE_BYTES
        device.send(header, pieces(payload, 0, half))
        updates.append((device, header, payload))
    host.stop()
    host.start()
    for device, header, payload in reversed(updates):
        assert device.upload(header, payload).update_state is m.UpdateState.ACCEPTED


def concurrent_uploads(host: Hosted, devices: list[Peer]) -> None:
    """Let the devices take part at once, each on a thread."""
    with ThreadPoolExecutor(len(devices)) as threads:
        list(threads.map(Peer.take_part, devices))


Way = Callable[[Hosted, list[Peer]], None]


@pytest.mark.parametrize(
    ("first", "second"),
    [(uploads_in_order, uploads_in_reverse_over_restarts), (interleaved_uploads_over_a_restart, concurrent_uploads)],
    ids=lambda way: way.__name__,
)
def test_the_same_closed_set_is_the_same_version(
    host: Hosted, memory_outcome: Outcome, first: Way, second: Way
) -> None:
    devices = f.peers(host, f.bundle_in(host.folder), host.folder)
    for number, way in enumerate((first, second), start=1):
        host.await_round("run", number)
        way(host, devices)
    versions = host.published_versions()
    assert tuple(event.version_sha256 for event in versions) == memory_outcome.digests
    # The complete Chunk of each half that was stored before the restart.
    expected = f.NUM_DEVICES * CHUNK_BYTES if first is interleaved_uploads_over_a_restart else 0
    assert versions[0].bytes_up_resumed == expected


def test_the_order_of_arrival_differs_between_the_rounds(host: Hosted, memory_outcome: Outcome) -> None:
    devices = f.peers(host, f.bundle_in(host.folder), host.folder)
    uploads_in_order(host, devices)
    host.await_round("run", 2)
    uploads_in_reverse_over_restarts(host, devices)
    with host.operator() as operator:
        events = [entry.event for entry in operator.watch("run")]
    names = {device.device_id: index for index, device in enumerate(devices)}
    orders = [[names[device] for device in event.accepted] for event in events if isinstance(event, RoundClosed)]
    assert orders == [[0, 1, 2], [2, 1, 0]]
