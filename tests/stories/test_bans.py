"""A ban or a removal takes effect on the calls of a device under way, and frees its place."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support import federations as f
from support.commands import Fanin, fanin_in_process
from support.hosted import Hosted
from support.peers import Peer, pieces, sign, upload_bytes

from fanin.edge.codecs.fixed import CODECS
from fanin.protos import messages as m
from fanin.protos.errors import Conflict, FaninError, PermissionDenied, Unauthenticated
from fanin.v1 import fleet_pb2

CAPABILITIES = m.Capabilities(codecs=tuple(CODECS), runtimes=("synthetic 1",), graph_formats=("onnx",))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    host = Hosted(tmp_path).start()
    yield host
    host.stop()


@pytest.fixture
def peers(host: Hosted, tmp_path: Path) -> list[Peer]:
    """Two devices of a Run whose Rounds have one place."""
    bundle = f.bundle_in(tmp_path)
    plan = f.plan()
    host.start_run(replace(plan, cohort=replace(plan.cohort, concurrency=1, buffer=1, quorum=1)), bundle, f.PUBLISHER)
    return [Peer(host, bundle, number, tmp_path / f"device-{number}") for number in range(2)]


def change(host: Hosted, peer: Peer, what: object) -> m.DeviceInfo:
    with host.administrator() as administrator:
        return administrator.change_device(m.DeviceChange(device_id=peer.device_id, what=what))


def info_of(host: Hosted, peer: Peer) -> m.DeviceInfo:
    with host.administrator() as administrator:
        return administrator.device(peer.device_id)


def in_background(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run work on a thread. Return the thread, and the list to which it adds the result or the error."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(work())
        except FaninError as exc:
            results.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


def check_in(peer: Peer) -> m.CheckInAnswer:
    with peer.transport() as transport:
        transport.enroll(peer.host.device_token)
        return transport.check_in(m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=30.0))


def await_state(host: Hosted, peer: Peer, state: m.DeviceState) -> None:
    """Return when a device is in a state; the test's time limit ends the wait."""
    while True:
        with host.administrator() as administrator:
            devices = list(administrator.devices(m.DeviceQuery(state=state)))
        if peer.device_id in [info.device_id for info in devices]:
            return


@pytest.mark.parametrize(("what", "error"), [(m.BanDevice(), PermissionDenied), (m.RemoveDevice(), Unauthenticated)])
def test_a_parked_check_in_ends_with_a_ban_or_a_removal(
    host: Hosted, peers: list[Peer], what: object, error: type[FaninError]
) -> None:
    peers[0].begin()
    thread, results = in_background(lambda: check_in(peers[1]))
    await_state(host, peers[1], m.DeviceState.WAITING)
    change(host, peers[1], what)
    thread.join(10.0)
    assert [type(result) for result in results] == [error]


def test_a_ban_ends_an_upload_and_gives_its_place_to_a_device_that_waits(host: Hosted, peers: list[Peer]) -> None:
    peers[0].begin()
    assert info_of(host, peers[0]).state is m.DeviceState.WORKING
    header, payload = peers[0].update()
    has_sent, may_end = threading.Event(), threading.Event()

    def requests() -> Iterator[bytes]:
        yield upload_bytes(header)
        yield upload_bytes(replace(pieces(payload)[0], data=payload[: len(payload) // 2]))
        has_sent.set()
        may_end.wait(20.0)

    def upload() -> object:
        with peers[0].connection() as connection:
            call = sign(peers[0].key, "Upload", upload_bytes(header))
            path = "/fanin.v1.Fleet/Upload"
            return list(connection.stream_stream(path, requests(), fleet_pb2.UploadReply.FromString, call))

    thread, results = in_background(upload)
    assert has_sent.wait(10.0)
    waiting, answers = in_background(lambda: check_in(peers[1]))
    await_state(host, peers[1], m.DeviceState.WAITING)
    banned = change(host, peers[0], m.BanDevice(reason="stolen"))
    assert banned.ban is not None and banned.ban.by.startswith("admin ")
    waiting.join(10.0)
    thread.join(10.0)
    may_end.set()
    assert [type(result) for result in results] == [PermissionDenied]
    assert "stolen" not in str(results[0])
    assert [type(answer) for answer in answers] == [m.Assigned]
    for again in (lambda: check_in(peers[0]), lambda: peers[0].upload(header, payload)):
        with pytest.raises(PermissionDenied, match="FN-1413"):
            again()


@pytest.mark.nightly
def test_the_devices_own_program_ends_with_a_ban_and_takes_part_again_after_it(host: Hosted, peers: list[Peer]) -> None:
    check = in_background(lambda: check_in(peers[0]))
    check[0].join(10.0)
    change(host, peers[0], m.BanDevice())
    with pytest.raises(Conflict, match="by an operator of this coordinator"):
        peers[0].take_part()
    assert info_of(host, peers[0]).state is m.DeviceState.BANNED
    change(host, peers[0], m.UnbanDevice())
    peers[0].take_part()
    assert info_of(host, peers[0]).num_updates == 1


def test_a_banned_device_stays_banned_after_a_restart_and_a_removed_one_enrolls_again(
    host: Hosted, peers: list[Peer]
) -> None:
    peers[0].begin()
    change(host, peers[0], m.BanDevice())
    host.stop()
    host.start()
    with pytest.raises(PermissionDenied, match="FN-1413"):
        check_in(peers[0])
    change(host, peers[0], m.UnbanDevice())
    change(host, peers[0], m.RemoveDevice())
    assert isinstance(check_in(peers[0]), m.Assigned)
    assert info_of(host, peers[0]).ban is None


def test_a_removed_device_comes_back_under_its_id_with_the_updates_of_its_key(
    host: Hosted, peers: list[Peer], fanin: Fanin
) -> None:
    peers[0].begin()
    peers[0].upload(*peers[0].update())
    change(host, peers[0], m.LabelDevice(label="cart 7"))
    before = info_of(host, peers[0])
    change(host, peers[0], m.RemoveDevice())
    with peers[0].transport() as transport:
        assert transport.enroll(host.device_token) == peers[0].device_id
    after = info_of(host, peers[0])
    assert (before.num_updates, after.num_updates, after.label) == (1, 1, "")
    assert after.enrolled_at > before.enrolled_at
    (host.folder / "ca.pem").write_bytes(host.ca)
    (host.folder / "token").write_text(host.operator_token)
    words = ("--server", host.address, "--ca", host.folder / "ca.pem", "--token-file", host.folder / "token")
    assert "1 accepted of this key, in all its enrollments" in fanin("device", "show", peers[0].device_id, *words).out


def test_an_operator_sees_what_a_device_reports_and_why_its_update_was_refused(host: Hosted, peers: list[Peer]) -> None:
    condition = m.DeviceCondition(battery_percent=7, is_charging=False, network=m.NetworkKind.CELLULAR)
    with peers[0].transport() as transport:
        transport.enroll(host.device_token)
        assert info_of(host, peers[0]).state is m.DeviceState.NEW
        seen = m.CheckIn(
            protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=5.0, condition=condition, fanin_version="0.1"
        )
        answer = transport.check_in(seen)
    assert isinstance(answer, m.Assigned)
    info = info_of(host, peers[0])
    assert (info.runtimes, info.fanin_version, info.condition) == (("synthetic 1",), "0.1", condition)
    assert (info.state, info.last_rejection) == (m.DeviceState.WORKING, "")
    peers[0].work = answer.assignment
    header, payload = peers[0].update()
    with pytest.raises(FaninError):
        peers[0].upload(replace(header, version_sha256="0" * 64), payload)
    info = info_of(host, peers[0])
    assert "FN-" in info.last_rejection
    assert info.rejected_at is not None
