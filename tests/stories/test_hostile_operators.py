"""People with a valid token, and programs that send requests which no client of ours sends.

Nobody may make the audit log unreadable, lift a ban by a detour, or take the last admin away.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from support import federations as f
from support.commands import Fanin, fanin_in_process
from support.hosted import Hosted
from support.peers import Peer, sign

from fanin.protos import calls
from fanin.protos import messages as m
from fanin.v1 import access_pb2, access_pb2_grpc, control_pb2, fleet_pb2, fleet_pb2_grpc

CALL_S = 20.0
Metadata = Sequence[tuple[str, str | bytes]]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    host = Hosted(tmp_path).start()
    (host.state / "tokens").mkdir()
    (host.state / "tokens" / "operator.token").write_text(host.operator_token)
    (host.state / "address").write_text(host.address)
    yield host
    host.stop()


@pytest.fixture
def channel(host: Hosted) -> Iterator[grpc.Channel]:
    with grpc.secure_channel(host.address, grpc.ssl_channel_credentials(host.ca)) as channel:
        yield channel


@pytest.fixture
def access(channel: grpc.Channel) -> access_pb2_grpc.AccessStub:
    return access_pb2_grpc.AccessStub(channel)


@pytest.fixture
def device(host: Hosted, tmp_path: Path) -> Peer:
    """A device that has enrolled."""
    peer = Peer(host, f.bundle_in(tmp_path), 0, tmp_path / "device")
    with peer.transport() as transport:
        transport.enroll(host.device_token)
    return peer


def bearer(token: str) -> Metadata:
    return ((calls.AUTHORIZATION, f"{calls.BEARER}{token}"),)


def code_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Return the status and our code of a refused call."""
    assert isinstance(error, grpc.Call)
    return error.code(), str(dict(error.trailing_metadata() or ()).get(calls.CODE, ""))


def refused(call: object, request: Message, metadata: Metadata) -> str:
    """Return the code with which a call is refused."""
    with pytest.raises(grpc.RpcError) as caught:
        call(request, metadata=metadata, timeout=CALL_S)  # type: ignore[operator]
    status, code = code_of(caught.value)
    assert status is not grpc.StatusCode.INTERNAL, caught.value
    return code


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def create(access: access_pb2_grpc.AccessStub, by: str, name: str, role: int, **more: float) -> str:
    """Create a token, and return its secret."""
    secret = f"the secret of {name}"
    request = access_pb2.CreateTokenRequest(name=name, role=role, sha256=digest(secret), **more)
    access.CreateToken(request, metadata=bearer(by), timeout=CALL_S)
    return secret


def test_names_of_tags_to_remove_are_checked_like_those_to_set(
    host: Hosted, access: access_pb2_grpc.AccessStub, device: Peer
) -> None:
    for name in ("x" * 262_130, "two\nlines", "", "x" * 65):
        request = access_pb2.ChangeDeviceRequest(device_id=device.device_id, tag=access_pb2.TagDevice(remove=[name]))
        assert refused(access.ChangeDevice, request, bearer(host.operator_token)) == "FN-1404"
    entries = access.ListAudit(access_pb2.ListAuditRequest(), metadata=bearer(host.operator_token)).entries
    assert "ChangeDevice" not in [entry.call for entry in entries]


@pytest.mark.nightly
def test_the_longest_valid_changes_leave_the_audit_log_readable(
    host: Hosted, access: access_pb2_grpc.AccessStub, device: Peer, fanin: Fanin
) -> None:
    tags = {f"{number:x}" * 64: "\U0001f600" * 128 for number in range(16)}
    for _ in range(510):
        request = access_pb2.ChangeDeviceRequest(device_id=device.device_id, tag=access_pb2.TagDevice(set=tags))
        access.ChangeDevice(request, metadata=bearer(host.operator_token), timeout=CALL_S)
    with host.administrator() as administrator:
        assert administrator.verify_audit().num_entries > 510
    listed = fanin("audit", "list", "--state", host.state)
    assert (listed.status, listed.out.count("ChangeDevice")) == (0, 510)


@pytest.mark.nightly
def test_devices_that_report_the_longest_names_leave_the_list_of_devices_readable(host: Hosted, device: Peer) -> None:
    text = "\U0001f600" * 125
    names, tags = (tuple(f"{each:03}{text}" for each in range(16)), {f"{each:x}" * 64: text for each in range(16)})
    with host.administrator() as administrator:
        token = m.NewToken(name="ward", role=m.Role.DEVICE, sha256=digest("ward"), label=text, tags=tags)
        administrator.create_token(token)
    for number in range(110):
        peer = Peer(host, device.bundle, number + 1, host.folder / f"device-{number + 1}")
        with peer.transport() as transport:
            transport.enroll("ward")
            work = m.Capabilities(codecs=("fixed32",), runtimes=names, graph_formats=("onnx",))
            transport.check_in(m.CheckIn(protocol=m.PROTOCOL, capabilities=work, wait_s=0.0))
    with host.administrator() as administrator:
        infos = list(administrator.devices())
    assert len(infos) == len({info.device_id for info in infos}) == 111
    assert sum(len(info.runtimes) for info in infos) == 110 * 16


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    return fanin_in_process(capsys, monkeypatch)


def test_a_call_with_two_credentials_is_refused(
    host: Hosted, access: access_pb2_grpc.AccessStub, channel: grpc.Channel, device: Peer
) -> None:
    viewer = create(access, host.operator_token, "viewer", access_pb2.ROLE_VIEWER)
    request = access_pb2.ListDevicesRequest()
    for pair in ((viewer, host.operator_token), (host.operator_token, viewer), (viewer, viewer)):
        assert refused(access.ListDevices, request, [*bearer(pair[0]), *bearer(pair[1])]) == "FN-1506"
    work = fleet_pb2.CheckInRequest(protocol=m.PROTOCOL, wait_s=0.0)
    fleet = fleet_pb2_grpc.FleetStub(channel)
    for key in (calls.DEVICE, calls.TIME, calls.SIGNATURE):
        metadata = sign(device.key, "CheckIn", work.SerializeToString()).metadata
        twice = [*metadata, *(pair for pair in metadata if pair[0] == key)]
        assert refused(fleet.CheckIn, work, twice) == "FN-1506"


def test_the_removal_of_a_banned_device_does_not_lift_the_ban(
    host: Hosted, access: access_pb2_grpc.AccessStub, device: Peer, fanin: Fanin
) -> None:
    fanin("device", "ban", device.device_id, "--state", host.state)
    request = access_pb2.ChangeDeviceRequest(device_id=device.device_id, remove=access_pb2.RemoveDevice())
    assert refused(access.ChangeDevice, request, bearer(host.operator_token)) == "FN-1499"
    outcome = fanin("device", "remove", device.device_id, "--state", host.state)
    assert outcome.status == 1
    assert "fanin device unban" in outcome.err
    with device.transport() as transport, pytest.raises(Exception, match="FN-1413"):
        transport.enroll(host.device_token)
    assert fanin("device", "unban", device.device_id, "--state", host.state).status == 0
    assert fanin("device", "remove", device.device_id, "--state", host.state).status == 0


def test_an_admin_that_expires_cannot_revoke_the_last_one_that_does_not(
    host: Hosted, access: access_pb2_grpc.AccessStub
) -> None:
    with host.administrator() as administrator:
        (lasting,) = [token.name for token in administrator.tokens() if token.role is m.Role.ADMIN]
    brief = create(access, host.operator_token, "brief", access_pb2.ROLE_ADMIN, lifetime_s=60.0)
    request = access_pb2.RevokeTokenRequest(name=lasting)
    assert refused(access.RevokeToken, request, bearer(brief)) == "FN-1409"
    # One that expires may go in any case, and the lasting one with another one.
    access.RevokeToken(access_pb2.RevokeTokenRequest(name="brief"), metadata=bearer(host.operator_token))
    other = create(access, host.operator_token, "other", access_pb2.ROLE_ADMIN)
    access.RevokeToken(request, metadata=bearer(other), timeout=CALL_S)


def test_no_token_has_an_empty_secret(host: Hosted, access: access_pb2_grpc.AccessStub, device: Peer) -> None:
    by = bearer(host.operator_token)
    request = access_pb2.CreateTokenRequest(name="all", role=access_pb2.ROLE_DEVICE, sha256=digest(""))
    assert refused(access.CreateToken, request, by) == "FN-1402"
    create(access, host.operator_token, "ward", access_pb2.ROLE_DEVICE)
    rotation = access_pb2.RotateTokenRequest(name="ward", sha256=digest(""))
    assert refused(access.RotateToken, rotation, by) == "FN-1402"


NUMBERS = (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_SINT64)
SERVICES = [
    *fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].methods,
    *control_pb2.DESCRIPTOR.services_by_name["Control"].methods,
    *access_pb2.DESCRIPTOR.services_by_name["Access"].methods,
]


def paths(message: Descriptor, depth: int = 4) -> Iterator[list[str]]:
    """Yield the paths of the numbers of a message: single fields, and those of single parts."""
    for field in message.fields:
        if field.is_repeated:
            continue
        if field.type in NUMBERS:
            yield [field.name]
        elif field.message_type is not None and depth:
            yield from ([field.name, *rest] for rest in paths(field.message_type, depth - 1))


def with_number(kind: Descriptor, path: Sequence[str], number: int) -> Message:
    """Return a request with valid names and one such number."""
    request: Message = GetMessageClass(kind)()
    for name in ("run_id", "name", "command_id", "device_id"):
        if name in kind.fields_by_name:
            setattr(request, name, "run")
    part = request
    for name in path[:-1]:
        part = getattr(part, name)
    bits = {FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_SINT64: 63}
    field = part.DESCRIPTOR.fields_by_name[path[-1]]
    setattr(part, path[-1], min(number, (1 << bits.get(field.type, 64)) - 1))
    return request


@pytest.mark.parametrize("number", [1 << 63, (1 << 64) - 1])
def test_no_number_of_a_request_ends_in_an_internal_error(
    host: Hosted, channel: grpc.Channel, device: Peer, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    host.start_run(f.plan(), device.bundle, f.PUBLISHER)
    tried = 0
    for method in SERVICES:
        for path in paths(method.input_type):
            tried += 1
            request = with_number(method.input_type, path, number)
            status = status_of(host, channel, device, method, request)
            assert status is not grpc.StatusCode.INTERNAL, (method.full_name, path)
    assert tried > 60
    assert "Traceback" not in caplog.text


def status_of(
    host: Hosted, channel: grpc.Channel, device: Peer, method: MethodDescriptor, request: Message
) -> grpc.StatusCode:
    """Return the status of a call with this request."""
    body = request.SerializeToString()
    is_fleet = method.containing_service.name == "Fleet"
    metadata = sign(device.key, method.name, body).metadata if is_fleet else bearer(host.operator_token)
    path = f"/{method.containing_service.full_name}/{method.name}"
    call = channel.stream_stream(path)(iter([body]), metadata=metadata, timeout=1.0)
    try:
        list(call)
    except grpc.RpcError as exc:
        return code_of(exc)[0]
    return grpc.StatusCode.OK
