"""Who may speak: every refusal is Unauthenticated, and tells the caller nothing."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.errors import raises
from support.values import DEVICE_KEY, STRANGER

from fanin.edge.keys import CALL_CONTEXT, SigningKey
from fanin.protos.calls import MAX_CLOCK_SKEW_S, Call, device_id_of
from fanin.protos.errors import Conflict, Unauthenticated, public_text
from fanin.protos.messages import Enrollment
from fanin.server.disk import Durability
from fanin.server.population import Device
from fanin.server.registry import Registry, token_sha256
from fanin.server.store.devices import DeviceStore, Role
from fanin.server.store.engine import open_engine

NOW_S = 1_000_000
DEVICE_ID = device_id_of(DEVICE_KEY.public)
METHOD = "/fanin.v1.Fleet/Enroll"
CALL = Call(method=METHOD, device_id=DEVICE_ID, time_s=NOW_S, nonce="00", body_sha256="ab")
DEVICE = Device(public_key=DEVICE_KEY.public)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DeviceStore]:
    engine = open_engine(tmp_path / "fanin.db", Durability.PROCESS)
    yield DeviceStore(engine)
    engine.dispose()


@pytest.fixture
def registry(store: DeviceStore) -> Registry:
    return Registry(store, lambda: float(NOW_S))


def sign(call: Call, key: SigningKey = DEVICE_KEY) -> bytes:
    return key.sign(CALL_CONTEXT, call.signed_bytes())


def wish(token: str, key: SigningKey = DEVICE_KEY) -> Enrollment:
    return Enrollment(protocol=1, token=token, public_key=key.public)


def test_a_device_enrolls_with_a_token_and_is_known(registry: Registry, store: DeviceStore) -> None:
    token = registry.new_token(Role.DEVICE)
    for _ in range(2):
        device = registry.check_enrollment(wish(token), CALL, sign(CALL))
        registry.enroll(device)
    assert (device, device.device_id, store.num_devices) == (DEVICE, DEVICE_ID, 1)
    assert registry.device(DEVICE_ID) == DEVICE
    registry.authenticate(DEVICE, CALL, sign(CALL))


def test_a_wrong_token_or_one_for_operators_enrolls_nobody(registry: Registry, store: DeviceStore) -> None:
    for token in ("", "guess", registry.new_token(Role.OPERATOR)):
        with raises(Unauthenticated, "enroll: got a token that was not made here, expected an enrollment token"):
            registry.check_enrollment(wish(token), CALL, sign(CALL))
    assert store.num_devices == 0


@pytest.mark.parametrize("protocol", [0, 2])
def test_a_protocol_that_is_not_spoken_here_enrolls_nobody(
    registry: Registry, store: DeviceStore, protocol: int
) -> None:
    wanted = replace(wish(registry.new_token(Role.DEVICE)), protocol=protocol)
    with raises(Conflict, f"protocol: got {protocol}, expected 1 to 1; install another fanin"):
        registry.check_enrollment(wanted, CALL, sign(CALL))
    assert store.num_devices == 0


def test_a_key_enrolls_under_its_own_id_only(registry: Registry, store: DeviceStore) -> None:
    token, own = registry.new_token(Role.DEVICE), device_id_of(STRANGER.public)
    with raises(Unauthenticated, f"enroll: got device id {DEVICE_ID!r}, expected {own}, of its own key"):
        registry.check_enrollment(wish(token, STRANGER), CALL, sign(CALL, STRANGER))
    assert store.num_devices == 0


def test_a_key_that_the_caller_does_not_hold_is_not_enrolled(registry: Registry, store: DeviceStore) -> None:
    token = registry.new_token(Role.DEVICE)
    with raises(Unauthenticated, f"call: the signature on {METHOD} is not by device {DEVICE_ID}"):
        registry.check_enrollment(wish(token), CALL, sign(CALL, STRANGER))
    assert store.num_devices == 0


def test_an_unknown_device_is_refused(registry: Registry) -> None:
    with raises(Unauthenticated, f"call: got device {DEVICE_ID!r}, which is not enrolled here"):
        registry.device(DEVICE_ID)
    with raises(Unauthenticated, f"call: got device {'x' * 64!r}, which is not enrolled here"):
        registry.device("x" * 5000)


@pytest.mark.parametrize(
    "call",
    [
        replace(CALL, method="/fanin.v1.Fleet/Upload"),
        replace(CALL, time_s=NOW_S + 1),
        replace(CALL, nonce="01"),
        replace(CALL, body_sha256="cd"),
        replace(CALL, device_id="other"),
    ],
    ids=["method", "time", "nonce", "body", "device"],
)
def test_a_signature_is_good_for_its_call_only(registry: Registry, call: Call) -> None:
    with raises(Unauthenticated, f"call: the signature on {call.method} is not by device {DEVICE_ID}"):
        registry.authenticate(DEVICE, call, sign(CALL))


@pytest.mark.parametrize("skew_s", [-MAX_CLOCK_SKEW_S - 1, MAX_CLOCK_SKEW_S + 1])
def test_a_clock_that_is_off_is_refused_though_well_signed(registry: Registry, skew_s: float) -> None:
    call = replace(CALL, time_s=NOW_S + int(skew_s))
    with raises(Unauthenticated, f"call: the device's clock is {skew_s:.0f} s off, expected at most 300"):
        registry.authenticate(DEVICE, call, sign(call))
    for within in (-300, 300):
        call = replace(CALL, time_s=NOW_S + within)
        registry.authenticate(DEVICE, call, sign(call))


def test_operators_have_tokens_of_their_own(registry: Registry) -> None:
    registry.check_operator(registry.new_token(Role.OPERATOR))
    for token in ("", "guess", registry.new_token(Role.DEVICE)):
        with raises(Unauthenticated, "control: got a token that was not made here, expected an operator token"):
            registry.check_operator(token)


def test_no_refusal_says_which_check_it_was() -> None:
    assert public_text(Unauthenticated("call: the device's clock is 900 s off")) == "not authenticated"


def test_tokens_differ_and_only_their_digest_is_kept(tmp_path: Path, registry: Registry, store: DeviceStore) -> None:
    tokens = {registry.new_token(Role.DEVICE) for _ in range(10)}
    assert len(tokens) == 10
    assert all(len(token) >= 32 and store.has_token(token_sha256(token), Role.DEVICE) for token in tokens)
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert not [token for token in tokens if token.encode() in written]
