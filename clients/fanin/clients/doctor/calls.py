"""The checks by calls to the coordinator: the clock, the protocol, the token, the device. None changes anything.

A token is checked without using it up. The call is an enrollment with a time of 1970. The coordinator checks in this
order: the token, the protocol, the time. So it refuses the call in any case, and by the error of the first check that
fails. The error about the time has the coordinator's time. The same call with a device's key checks the device.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Final

from fanin.clients.doctor.checks import CheckResult, fail, failed, ok, skip, warn, within
from fanin.clients.operator import Operator
from fanin.clients.transport import FLEET, CallOptions, ClockOff, Connection
from fanin.edge.bundles.keys import CALL_CONTEXT, SigningKey
from fanin.edge.tensors import sha256_hex
from fanin.protos import calls
from fanin.protos import messages as m
from fanin.protos.errors import Conflict, FaninError, NotFound, Unauthenticated
from fanin.protos.release import __version__
from fanin.protos.wire import to_proto
from fanin.v1 import fleet_pb2 as pb

CALL_S: Final = 4.0
EARLIEST_US: Final = 1
"""The time of a call that no coordinator serves."""
NO_ASSIGNMENT: Final = "doctor"
"""The id of an Assignment that does not exist."""


def call_findings(connection: Connection, token: str, key: SigningKey | None) -> list[CheckResult]:
    """Return the findings of calls to a coordinator that can be reached.

    Args:
        connection: The connection.
        token: An enrollment token or an operator's token; "" for none.
        key: The key of a device; None for none.
    """
    findings: list[CheckResult] = []
    offset_s: float | None = None
    protocol = skip("protocol", "needs --token-file with an enrollment token")
    if token:
        offset_s, protocol, finding = _token(connection, token)
        findings.append(finding)
    else:
        findings.append(skip("token", "no --token-file and no $FANIN_DEVICE_TOKEN"))
    if key is not None:
        device_offset_s, finding = _device(connection, key)
        offset_s = device_offset_s if offset_s is None else offset_s
        findings.append(finding)
    return [_clock(offset_s), protocol, *findings]


def _token(connection: Connection, token: str) -> tuple[float | None, CheckResult, CheckResult]:
    """Return the offset of the clock, and the findings about the protocol and the token."""
    key = SigningKey.generate()
    body = to_proto(m.Enrollment(protocol=m.PROTOCOL, token=token, public_key=key.public), pb.EnrollRequest)
    unknown = skip("protocol", "the token was refused first")
    call = partial(_untimely_call, connection, key, "Enroll", body.SerializeToString(), pb.EnrollReply.FromString)
    try:
        offset_s = call()
    except Unauthenticated as exc:
        return None, unknown, _operator_token(connection, token, exc)
    except Conflict as exc:
        return None, failed("protocol", exc), ok("token", "the coordinator accepts this enrollment token")
    except FaninError as exc:
        return None, unknown, failed("token", exc)
    text = f"the coordinator speaks protocol {m.PROTOCOL} of this release ({__version__})"
    accepted = ok("token", "the coordinator accepts this enrollment token; the check has not used it up")
    return offset_s, ok("protocol", text), accepted


def _operator_token(connection: Connection, token: str, refused: Unauthenticated) -> CheckResult:
    """Return the finding about a token that is not for enrollments: it may be an operator's."""
    try:
        is_accepted = within(lambda: Operator(connection, token).runs() is not None, late=False)
    except FaninError:
        is_accepted = False
    if not is_accepted:
        return failed("token", refused)
    return ok("token", "the coordinator accepts it as an operator's token; a device needs an enrollment token")


def _device(connection: Connection, key: SigningKey) -> tuple[float | None, CheckResult]:
    """Return the offset of the clock, and the finding about a device's key."""
    body = to_proto(m.Report(assignment_id=NO_ASSIGNMENT), pb.ReportRequest).SerializeToString()
    device = calls.device_id_of(key.public)
    known = ok("device", f"the coordinator knows this device ({device})")
    try:
        offset_s = _untimely_call(connection, key, "Report", body, pb.ReportReply.FromString)
    except Unauthenticated:
        text = f"the coordinator does not know this device ({device}): it has not enrolled there yet"
        return None, warn("device", text, "start fanin join; if --state was made for another coordinator, give another")
    except FaninError as exc:
        return None, failed("device", exc)
    try:
        # With the right time: a ban, if there is one, is checked after the signature.
        options = _signed(key, "Report", body, int((time.time() + offset_s) * calls.MICROSECONDS))
        connection.unary(f"{FLEET}Report", body, pb.ReportReply.FromString, options)
    except NotFound:
        return offset_s, known
    except ClockOff:
        return offset_s, warn("device", "the network is too slow to check the device", "try again")
    except FaninError as exc:
        return offset_s, failed("device", exc)
    return offset_s, known


def _untimely_call(
    connection: Connection,
    key: SigningKey,
    method: str,
    body: bytes,
    parse: Callable[[bytes], pb.EnrollReply | pb.ReportReply],
) -> float:
    """Make a call that the coordinator must refuse for its time. Return how far this clock is behind, in seconds."""
    try:
        connection.unary(f"{FLEET}{method}", body, parse, _signed(key, method, body, EARLIEST_US))
    except ClockOff as exc:
        return exc.offset_s
    raise Conflict(
        f"{connection.address}: served a call of the year 1970; compare the releases of fanin on both machines",
        code="FN-0817",
    )


def _signed(key: SigningKey, method: str, body: bytes, time_us: int) -> CallOptions:
    device_id = calls.device_id_of(key.public)
    call = calls.DeviceCall(
        method=f"{FLEET}{method}", device_id=device_id, time_us=time_us, body_sha256=sha256_hex(body)
    )
    metadata = (
        (calls.DEVICE, device_id),
        (calls.TIME, str(time_us)),
        (calls.SIGNATURE, key.sign(CALL_CONTEXT, call.signed_bytes())),
    )
    credential = (
        "an enrollment token that was made there (--token-file)" if method == "Enroll" else "a device of its own"
    )
    return CallOptions(metadata=metadata, timeout_s=CALL_S, credential=credential)


def _clock(offset_s: float | None) -> CheckResult:
    if offset_s is None:
        return skip("clock", "the coordinator tells its time only to a caller with a token or a device's key")
    text = f"this clock is {abs(offset_s):.1f} s {'behind' if offset_s > 0 else 'ahead of'} the coordinator's"
    if abs(offset_s) <= calls.MAX_EARLY_S:
        return ok("clock", text)
    fix = "timedatectl set-ntp true"
    if abs(offset_s) <= calls.MAX_LATE_S:
        return warn("clock", f"{text}; devices correct it by themselves", fix)
    return fail("clock", f"{text}; certificates that begin or end in between are refused", fix)
