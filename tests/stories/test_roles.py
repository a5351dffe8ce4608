"""Who may do what: every call by every role, with valid, expired and revoked tokens, over TLS."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from house.tree import ROOT
from support import federations as f
from support.hosted import Hosted
from support.peers import Peer

from fanin.clients.administrator import new_secret
from fanin.protos.errors import Conflict, FaninError, NotFound, PermissionDenied, Unauthenticated
from fanin.protos.messages import NewToken, Role, TokenInfo, TokenRotation
from fanin.server.access.permissions import ROLE_OF
from fanin.v1 import access_pb2, control_pb2

CALLS = {
    f"{service.name}/{name}": method
    for service in (
        control_pb2.DESCRIPTOR.services_by_name["Control"],
        access_pb2.DESCRIPTOR.services_by_name["Access"],
    )
    for name, method in service.methods_by_name.items()
}
PEOPLE = (Role.VIEWER, Role.OPERATOR, Role.ADMIN)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    host = Hosted(tmp_path).start()
    yield host
    host.stop()


def create(host: Hosted, role: Role, name: str, lifetime_s: float | None = None) -> str:
    """Create a token and return its secret."""
    secret, sha256 = new_secret()
    with host.administrator() as administrator:
        administrator.create_token(NewToken(name=name, role=role, sha256=sha256, lifetime_s=lifetime_s))
    return secret


def outcome(host: Hosted, call: str, token: str) -> tuple[str, str, str]:
    """Make a call with an empty request. Return its status, the kind of its error, and its text."""
    method = CALLS[call]
    request, reply = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    credentials = grpc.ssl_channel_credentials(host.ca)
    with grpc.secure_channel(host.address, credentials) as channel:
        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        stub = getattr(channel, kind)(f"/fanin.v1.{call}", request.SerializeToString, reply.FromString)
        argument = iter([request()]) if method.client_streaming else request()
        try:
            answer = stub(argument, metadata=(("authorization", f"Bearer {token}"),), timeout=20.0)
            if method.server_streaming:
                list(answer)
        except grpc.RpcError as exc:
            trailing = dict(exc.trailing_metadata() or ())
            return exc.code().name, str(trailing.get("fanin-error", "")), exc.details() or ""
        return "OK", "", ""


def test_every_call_of_the_protocol_has_a_role() -> None:
    assert set(ROLE_OF) == set(CALLS)


def test_every_call_is_refused_to_roles_below_its_own_and_to_no_other(host: Hosted) -> None:
    tokens = {role: create(host, role, f"a-{role.value}") for role in PEOPLE}
    for call, least in ROLE_OF.items():
        for role, token in tokens.items():
            status, kind, text = outcome(host, call, token)
            is_denied = PEOPLE.index(role) < PEOPLE.index(least)
            assert (status == "PERMISSION_DENIED") == is_denied, f"{call} as {role.value}: {status} {text}"
            assert status != "UNAUTHENTICATED", f"{call} as {role.value}"
            if is_denied:
                assert kind == "PermissionDenied" and f"expected the role {least.value}" in text


REASONS = {
    "unknown": "control: this coordinator has no token with this secret; ",
    "device": "control: the token device enrolls devices, expected one of a person; ",
    "expired": "control: the token bob is expired; ",
    "revoked": "control: the token bob is revoked; ",
}


@pytest.mark.parametrize("fault", REASONS)
def test_a_token_that_is_not_valid_is_refused_by_every_call_with_its_reason(
    host: Hosted, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    token = host.device_token if fault == "device" else "unknown"
    if fault == "expired":
        token = create(host, Role.ADMIN, "bob", lifetime_s=0.05)
        time.sleep(0.1)
    elif fault == "revoked":
        token = create(host, Role.ADMIN, "bob")
        with host.administrator() as administrator:
            administrator.revoke_token("bob")
    for call in CALLS:
        status, kind, text = outcome(host, call, token)
        assert (status, kind) == ("UNAUTHENTICATED", "Unauthenticated") and text.startswith(REASONS[fault]), call
    assert token not in caplog.text
    assert REASONS[fault] in caplog.text


@pytest.mark.parametrize("end", ["revoked", "rotated", "expired"])
def test_an_open_watch_ends_with_its_token(host: Hosted, tmp_path: Path, end: str) -> None:
    host.start_run(f.plan(), f.bundle_in(tmp_path), f.PUBLISHER)
    token = create(host, Role.VIEWER, "eve", lifetime_s=2.0 if end == "expired" else None)
    errors: list[FaninError] = []
    has_begun = threading.Event()

    def watch() -> None:
        try:
            with host.operator(token) as operator:
                for _ in operator.watch("run"):
                    has_begun.set()
        except FaninError as exc:
            errors.append(exc)

    thread = threading.Thread(target=watch)
    thread.start()
    assert has_begun.wait(10.0)
    with host.administrator() as administrator:
        if end == "revoked":
            administrator.revoke_token("eve")
        elif end == "rotated":
            administrator.rotate_token(TokenRotation(name="eve", sha256=new_secret()[1]))
    thread.join(10.0)
    assert [type(error) for error in errors] == [Unauthenticated]
    codes = {"revoked": "FN-1415", "rotated": "FN-1494", "expired": "FN-1492"}
    assert isinstance(errors[0], Unauthenticated) and errors[0].code == codes[end]


def test_operators_manage_enrollment_tokens_and_admins_those_of_people(host: Hosted) -> None:
    operator = create(host, Role.OPERATOR, "olga")
    with host.administrator(operator) as client:
        for role in PEOPLE:
            with pytest.raises(PermissionDenied, match="FN-1416"):
                client.create_token(NewToken(name="x", role=role, sha256=new_secret()[1]))
        rotation = TokenRotation(name="olga", sha256="a" * 64)
        for change in (lambda: client.revoke_token("olga"), lambda: client.rotate_token(rotation)):
            with pytest.raises(PermissionDenied, match="FN-1416"):
                change()
        client.create_token(NewToken(name="ward", role=Role.DEVICE, sha256=new_secret()[1]))
        assert {token.role for token in client.tokens()} == {Role.DEVICE}
        assert client.revoke_token("ward").revoked_at is not None
    with host.administrator() as client:
        assert {token.role for token in client.tokens()} == {Role.DEVICE, Role.OPERATOR, Role.ADMIN}


def test_the_last_admin_and_names_that_are_taken_are_kept(host: Hosted) -> None:
    with host.administrator() as client:
        (first,) = (token for token in client.tokens() if token.role is Role.ADMIN)
        with pytest.raises(Conflict, match="FN-1409"):
            client.revoke_token(first.name)
        create(host, Role.ADMIN, "anna")
        with pytest.raises(Conflict, match="FN-1406"):
            client.create_token(NewToken(name="anna", role=Role.VIEWER, sha256=new_secret()[1]))
        with pytest.raises(NotFound, match="FN-1407"):
            client.revoke_token("nobody")
        assert client.revoke_token(first.name).revoked_at is not None
        # The caller revoked its own token: that call was answered, and the next one is refused.
        with pytest.raises(Unauthenticated):
            list(client.tokens())


def test_no_secret_is_in_the_folder_or_in_a_reply(host: Hosted) -> None:
    secret = create(host, Role.ADMIN, "anna")
    with host.administrator(secret) as client:
        tokens: list[TokenInfo] = list(client.tokens())
    assert secret not in repr(tokens)
    host.stop()
    data = b"".join(path.read_bytes() for path in host.state.rglob("*") if path.is_file())
    assert secret.encode() not in data


def test_a_one_time_token_that_two_devices_race_for_enrolls_one(host: Hosted, tmp_path: Path) -> None:
    secret, sha256 = new_secret()
    new = NewToken(name="once", role=Role.DEVICE, sha256=sha256, max_uses=1, label="<i>", tags={"site": "charite"})
    with host.administrator() as administrator:
        administrator.create_token(new)
    host.device_token = secret
    bundle = f.bundle_in(tmp_path)
    peers = [Peer(host, bundle, number, tmp_path / f"device-{number}") for number in range(4)]
    start, outcomes = threading.Barrier(len(peers)), list[str]()

    def enroll(peer: Peer) -> None:
        with peer.transport() as transport:
            start.wait()
            for _ in range(2):
                try:
                    outcomes.append(transport.enroll(secret))
                except Unauthenticated as exc:
                    assert exc.code == "FN-1412" and "used up, by 1 device;" in str(exc)

    threads = [threading.Thread(target=enroll, args=(peer,)) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The device that won repeated its call, which cost no further use.
    assert len(outcomes) == 2
    assert len(set(outcomes)) == 1
    with host.administrator() as administrator:
        (once,) = (token for token in administrator.tokens() if token.name == "once")
        (info,) = administrator.devices()
    assert once.num_uses == 1
    assert (info.device_id, info.enrolled_by, info.label, dict(info.tags)) == (
        outcomes[0],
        "once",
        "<i>",
        {"site": "charite"},
    )


@pytest.mark.parametrize("fault", ["expired", "revoked"])
def test_an_enrollment_token_that_is_not_valid_enrolls_no_device(host: Hosted, tmp_path: Path, fault: str) -> None:
    secret, sha256 = new_secret()
    lifetime_s = 0.05 if fault == "expired" else None
    with host.administrator() as administrator:
        administrator.create_token(NewToken(name="ward", role=Role.DEVICE, sha256=sha256, lifetime_s=lifetime_s))
        if fault == "revoked":
            administrator.revoke_token("ward")
    time.sleep(0.1)
    device = Peer(host, f.bundle_in(tmp_path), 0, tmp_path / "device")
    with device.transport() as transport, pytest.raises(Unauthenticated, match=f"ward is {fault}; "):
        transport.enroll(secret)


def test_the_page_of_the_docs_has_the_table_of_the_code() -> None:
    page = (ROOT / "docs/howto/access.md").read_text()
    rows = {
        line.split("|")[1].strip(): line.split("|")[2].strip() for line in page.splitlines() if line.startswith("| `")
    }
    listed = {call.strip("` "): role for calls, role in rows.items() for call in calls.split(",")}
    assert {call: role for call, role in listed.items() if "/" in call} == {
        call: role.value for call, role in ROLE_OF.items()
    }
