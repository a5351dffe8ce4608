"""Authentication: every refusal is Unauthenticated, and reveals nothing to the caller."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.errors import raises
from support.values import DEVICE_KEY, STRANGER

from fanin.edge.bundles.keys import CALL_CONTEXT, SigningKey
from fanin.protos.calls import MAX_EARLY_S, MAX_LATE_S, MICROSECONDS, PROBE, DeviceCall, device_id_of
from fanin.protos.errors import Conflict, FaninError, Unauthenticated, Untimely, public
from fanin.protos.messages import Enrollment, PrincipalKind, Role
from fanin.protos.release import __version__
from fanin.server.access.registry import Registry, token_sha256
from fanin.server.storage.disk import Durability
from fanin.server.storage.records import EnrolledDevice
from fanin.server.storage.sqlite.devices import SqliteDevices
from fanin.server.storage.sqlite.engine import open_engine

NOW_S = 1_000_000
DEVICE_ID = device_id_of(DEVICE_KEY.public)
METHOD = "/fanin.v1.Fleet/Enroll"
NOW_US = NOW_S * MICROSECONDS
CALL = DeviceCall(method=METHOD, device_id=DEVICE_ID, time_us=NOW_US, body_sha256="ab")
DEVICE = EnrolledDevice(public_key=DEVICE_KEY.public)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteDevices]:
    engine = open_engine(tmp_path / "fanin.db", Durability.PROCESS)
    yield SqliteDevices(engine)
    engine.dispose()


@pytest.fixture
def registry(store: SqliteDevices) -> Registry:
    return registry_at(store, [0.0])


def registry_at(store: SqliteDevices, uptime_s: list[float]) -> Registry:
    """Return a registry that started a second before ``NOW_S``. ``uptime_s[0]`` is the time since its start."""
    registry = Registry(store, lambda: NOW_S - 1.0, lambda: uptime_s[0])
    uptime_s[0] += 1.0
    return registry


def sign(call: DeviceCall, key: SigningKey = DEVICE_KEY) -> bytes:
    return key.sign(CALL_CONTEXT, call.signed_bytes())


def enrollment_with(token: str, key: SigningKey = DEVICE_KEY) -> Enrollment:
    return Enrollment(protocol=1, token=token, public_key=key.public)


def test_a_device_enrolls_with_a_token_and_is_known(registry: Registry, store: SqliteDevices) -> None:
    token = registry.new_token(Role.DEVICE)
    for _ in range(2):
        device = registry.check_enrollment(enrollment_with(token), CALL, sign(CALL))
        store.enroll([device], 0.0)
    assert (device, device.device_id, store.num_devices) == (DEVICE, DEVICE_ID, 1)
    assert registry.device(DEVICE_ID) == DEVICE
    registry.authenticate(DEVICE, CALL, sign(CALL))


def test_a_wrong_token_or_one_for_operators_enrolls_no_device(registry: Registry, store: SqliteDevices) -> None:
    for token, code in (("", "FN-0670"), ("guess", "FN-0670"), (registry.new_token(Role.OPERATOR), "FN-1493")):
        with pytest.raises(Unauthenticated) as excinfo:
            registry.check_enrollment(enrollment_with(token), CALL, sign(CALL))
        assert excinfo.value.code == code
    assert store.num_devices == 0


@pytest.mark.parametrize("protocol", [0, 2])
def test_an_unsupported_protocol_enrolls_no_device(registry: Registry, store: SqliteDevices, protocol: int) -> None:
    enrollment = replace(enrollment_with(registry.new_token(Role.DEVICE)), protocol=protocol)
    age = "a newer" if protocol else "an older"
    text = (
        f"protocol: got {protocol}, of {age} release on the device, expected 1; install the coordinator's release of "
        f"fanin there: pip install 'fanin=={__version__}'"
    )
    with raises(Conflict, text):
        registry.check_enrollment(enrollment, CALL, sign(CALL))
    assert store.num_devices == 0


def test_an_untimely_enrollment_checks_token_and_protocol_and_uses_nothing(registry: Registry) -> None:
    """``fanin doctor`` makes this call: the error names the first check that fails."""
    good = enrollment_with(registry.new_token(Role.DEVICE))
    early = replace(CALL, time_us=1)
    for enrollment, code in (
        (enrollment_with("wrong"), "FN-0670"),
        (replace(good, protocol=99), "FN-0675"),
        (good, PROBE),
        (good, PROBE),
    ):
        with pytest.raises(FaninError) as excinfo:
            registry.check_enrollment(enrollment, early, sign(early))
        assert excinfo.value.code == code


def test_a_key_enrolls_under_its_own_id_only(registry: Registry, store: SqliteDevices) -> None:
    token, stranger_id = registry.new_token(Role.DEVICE), device_id_of(STRANGER.public)
    with raises(Unauthenticated, f"enroll: got device id {DEVICE_ID!r}, expected {stranger_id}, of its own key"):
        registry.check_enrollment(enrollment_with(token, STRANGER), CALL, sign(CALL, STRANGER))
    assert store.num_devices == 0


def test_a_key_that_the_caller_does_not_hold_is_not_enrolled(registry: Registry, store: SqliteDevices) -> None:
    token = registry.new_token(Role.DEVICE)
    with raises(Unauthenticated, f"call: the signature on {METHOD} is not by device {DEVICE_ID}"):
        registry.check_enrollment(enrollment_with(token), CALL, sign(CALL, STRANGER))
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
        replace(CALL, time_us=NOW_US + 1),
        replace(CALL, body_sha256="cd"),
        replace(CALL, device_id="other"),
    ],
    ids=["method", "time", "body", "device"],
)
def test_a_signature_is_valid_for_its_call_only(registry: Registry, call: DeviceCall) -> None:
    with raises(Unauthenticated, f"call: the signature on {call.method} is not by device {DEVICE_ID}"):
        registry.authenticate(DEVICE, call, sign(CALL))


@pytest.mark.parametrize("early_s", [-MAX_LATE_S - 1.0, MAX_EARLY_S + 1.0])
def test_a_clock_that_is_off_is_refused_though_well_signed(store: SqliteDevices, early_s: float) -> None:
    uptime_s = [0.0]
    registry = registry_at(store, uptime_s)
    # Long after the start, because another rule refuses calls that were signed before it.
    uptime_s[0] += 1000.0
    now_us = registry.now_us
    call = replace(CALL, time_us=now_us + int(early_s * MICROSECONDS))
    text = f"call: got a time {early_s:.1f} s from this clock, expected -300 to 2; set the clock of the device"
    with raises(Untimely, text):
        registry.authenticate(DEVICE, call, sign(call))
    for within_s in (-300, 2):
        call = replace(CALL, time_us=now_us + within_s * MICROSECONDS)
        registry.authenticate(DEVICE, call, sign(call))


def test_a_signed_call_is_served_once(registry: Registry) -> None:
    registry.authenticate(DEVICE, CALL, sign(CALL))
    with pytest.raises(Untimely, match=f"call: device {DEVICE_ID} used this time before"):
        registry.authenticate(DEVICE, CALL, sign(CALL))
    later_call = replace(CALL, time_us=NOW_US + 1)
    registry.authenticate(DEVICE, later_call, sign(later_call))


def test_a_restart_refuses_calls_that_were_signed_before_it(store: SqliteDevices) -> None:
    registry_at(store, [0.0]).authenticate(DEVICE, CALL, sign(CALL))
    new_registry = Registry(store, lambda: float(NOW_S), lambda: 0.0)
    with pytest.raises(Untimely, match="FN-0674"):
        new_registry.authenticate(DEVICE, CALL, sign(CALL))


def test_a_forged_call_uses_no_time(registry: Registry) -> None:
    with pytest.raises(Unauthenticated):
        registry.authenticate(DEVICE, CALL, sign(CALL, STRANGER))
    registry.authenticate(DEVICE, CALL, sign(CALL))


def test_a_wall_clock_that_is_set_back_locks_no_device_out(store: SqliteDevices) -> None:
    wall_s, uptime_s = [float(NOW_S)], [0.0]
    registry = Registry(store, lambda: wall_s[0], lambda: uptime_s[0])
    for _ in range(3):
        uptime_s[0] += 1.0
        wall_s[0] -= 3600.0
        call = replace(CALL, time_us=registry.now_us)
        registry.authenticate(DEVICE, call, sign(call))


def test_operators_have_tokens_of_their_own(registry: Registry) -> None:
    registry.bearer(registry.new_token(Role.OPERATOR))
    for token, code in (("", "FN-0670"), ("guess", "FN-0670"), (registry.new_token(Role.DEVICE), "FN-1493")):
        with pytest.raises(Unauthenticated) as excinfo:
            registry.bearer(token)
        assert excinfo.value.code == code


def test_the_principal_of_an_operator_names_its_token_and_does_not_reveal_it(registry: Registry) -> None:
    first, second = registry.new_token(Role.OPERATOR), registry.new_token(Role.OPERATOR)
    principal, left_s = registry.bearer(first)
    assert (principal, left_s) == (registry.bearer(first)[0], math.inf)
    assert principal != registry.bearer(second)[0]
    assert principal.kind is PrincipalKind.OPERATOR
    assert principal.id == "operator"
    assert registry.bearer(second)[0].id == f"operator-{token_sha256(second)[:12]}"


def test_no_refusal_names_the_failed_check() -> None:
    assert public(Unauthenticated("call: the device's clock is 900 s off"))[0] == "not authenticated"


def test_tokens_differ_and_only_their_digest_is_stored(
    tmp_path: Path, registry: Registry, store: SqliteDevices
) -> None:
    tokens = {registry.new_token(Role.DEVICE) for _ in range(10)}
    assert len(tokens) == 10
    assert all(len(token) >= 32 and store.find_token(token_sha256(token)) for token in tokens)
    data = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert not [token for token in tokens if token.encode() in data]
