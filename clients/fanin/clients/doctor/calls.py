"""The checks by calls to the coordinator: the clock, the protocol, the token, the device. None changes anything.

A call with the time ``PROBE_US`` is never served. The coordinator checks in this order: of an enrollment the token and
the protocol, then the signature, the ban, the time. So it refuses the call by the error of the first check that fails.
The error about the time has the coordinator's time, and says that all other checks have passed. A device that is
enrolled needs no token, so nothing is wrong with it if its token is not valid any more.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from fanin.clients.doctor.checks import CheckResult, Level, failed, ok, skip, warn
from fanin.clients.transport import FLEET, CallOptions, ClockOff, Connection
from fanin.edge.bundles.keys import CALL_CONTEXT, SigningKey
from fanin.edge.tensors import sha256_hex
from fanin.protos import calls
from fanin.protos import messages as m
from fanin.protos.errors import Conflict, FaninError, Unauthenticated
from fanin.protos.release import __version__
from fanin.protos.wire import to_proto
from fanin.v1 import fleet_pb2 as pb

CALL_S: Final = 4.0
OTHER_KIND: Final = "FN-1493"
"""The code of a valid token of a person, which enrolls no device."""
NO_ASSIGNMENT: Final = "doctor"
"""The id of an Assignment that does not exist."""


def call_findings(connection: Connection, token: str, key: SigningKey | None) -> list[CheckResult]:
    """Return the findings of calls to a coordinator that can be reached.

    Args:
        connection: The connection.
        token: An enrollment token or an operator's token; "" for none.
        key: The key of a device; None for none.
    """
    offset_s: float | None = None
    device, is_enrolled = list[CheckResult](), False
    if key is not None:
        offset_s, finding = _device(connection, key)
        is_enrolled = offset_s is not None
        device.append(finding)
    protocol = skip("protocol", "needs --token-file with an enrollment token")
    finding = skip("token", "no --token-file and no $FANIN_DEVICE_TOKEN")
    if token:
        token_offset_s, protocol, finding = _token(connection, token, is_of_device=key is not None)
        offset_s = token_offset_s if offset_s is None else offset_s
    if key is not None and is_enrolled:
        protocol = _protocol(connection, key)
        finding = _needless(finding)
    return [_clock(offset_s), protocol, finding, *device]


def _token(connection: Connection, token: str, *, is_of_device: bool) -> tuple[float | None, CheckResult, CheckResult]:
    """Return the offset of the clock, and the findings about the protocol and the token."""
    unknown = skip("protocol", "the token was refused first")
    try:
        offset_s = _enrollment(connection, token, SigningKey.generate())
    except Conflict as exc:
        return None, failed("protocol", exc), ok("token", "the coordinator accepts this enrollment token")
    except FaninError as exc:
        if exc.code == OTHER_KIND and not is_of_device:
            text = "the coordinator accepts it as the token of a person; a device needs an enrollment token"
            return None, unknown, ok("token", text)
        return None, unknown, failed("token", exc)
    accepted = ok("token", "the coordinator accepts this enrollment token; the check has not used it up")
    return offset_s, _same_protocol(), accepted


def _needless(finding: CheckResult) -> CheckResult:
    """Return the finding about the token of a device that is enrolled, and needs none."""
    if finding.code == OTHER_KIND:
        fix = "delete its file on this machine, and replace its secret: fanin token rotate"
        text = "the token is of a person, and this device needs none: who reads it can command the coordinator"
        return replace(warn("token", text, fix), code=OTHER_KIND)
    if finding.level is not Level.FAIL:
        return ok("token", "this device is enrolled, and needs none")
    return ok("token", f"this device is enrolled, and needs none; that of --token-file is not valid ({finding.code})")


def _protocol(connection: Connection, key: SigningKey) -> CheckResult:
    """Return the finding about the protocol of a device that is enrolled."""
    try:
        _enrollment(connection, "", key)
    except FaninError as exc:
        return failed("protocol", exc)
    return _same_protocol()


def _same_protocol() -> CheckResult:
    return ok("protocol", f"the coordinator speaks protocol {m.PROTOCOL} of this release ({__version__})")


def _device(connection: Connection, key: SigningKey) -> tuple[float | None, CheckResult]:
    """Return the offset of the clock if the device is enrolled and not banned, and the finding about its key."""
    body = to_proto(m.Report(assignment_id=NO_ASSIGNMENT), pb.ReportRequest).SerializeToString()
    device = calls.device_id_of(key.public)
    try:
        offset_s = _probe(connection, key, "Report", body, pb.ReportReply.FromString)
    except Unauthenticated as exc:
        if exc.code != Unauthenticated.class_code:
            return None, failed("device", exc)
        text = f"the coordinator does not know this device ({device}): it has not enrolled there yet"
        return None, warn("device", text, "start fanin join; if --state was made for another coordinator, give another")
    except FaninError as exc:
        return None, failed("device", exc)
    return offset_s, ok("device", f"the coordinator knows this device ({device})")


def _enrollment(connection: Connection, token: str, key: SigningKey) -> float:
    body = to_proto(m.Enrollment(protocol=m.PROTOCOL, token=token, public_key=key.public), pb.EnrollRequest)
    return _probe(connection, key, "Enroll", body.SerializeToString(), pb.EnrollReply.FromString)


def _probe(
    connection: Connection,
    key: SigningKey,
    method: str,
    body: bytes,
    parse: Callable[[bytes], pb.EnrollReply | pb.ReportReply],
) -> float:
    """Make a call that the coordinator must refuse for its time. Return how far this clock is behind, in seconds."""
    device_id = calls.device_id_of(key.public)
    call = calls.DeviceCall(
        method=f"{FLEET}{method}", device_id=device_id, time_us=calls.PROBE_US, body_sha256=sha256_hex(body)
    )
    metadata = (
        (calls.DEVICE, device_id),
        (calls.TIME, str(calls.PROBE_US)),
        (calls.SIGNATURE, key.sign(CALL_CONTEXT, call.signed_bytes())),
    )
    try:
        connection.unary(call.method, body, parse, CallOptions(metadata=metadata, timeout_s=CALL_S))
    except ClockOff as exc:
        return exc.offset_s
    raise Conflict(
        f"{connection.address}: served a call of the year 1970; compare the releases of fanin on both machines",
        code="FN-0817",
    )


def _clock(offset_s: float | None) -> CheckResult:
    if offset_s is None:
        return skip("clock", "the coordinator tells its time only to a caller with a token or a device's key")
    text = f"this clock is {abs(offset_s):.1f} s {'behind' if offset_s > 0 else 'ahead of'} the coordinator's"
    if -calls.MAX_LATE_S <= -offset_s <= calls.MAX_EARLY_S:
        return ok("clock", text)
    effect = (
        "a device corrects the times of its calls by it, and takes part. The dates of certificates are compared with "
        "this clock: see tls; and the times in logs and in fanin status are wrong"
    )
    return warn("clock", f"{text}; {effect}", "timedatectl set-ntp true")
