"""Authentication: devices by their signatures, operators and enrollments by their tokens.

A refused caller receives ``Unauthenticated``, whose public text does not name the failed check. The log does. A call
with a wrong time receives ``Untimely``, and an honest device signs it again. No check needs the database: any peer can
make a call, and the database has one lane.
"""

import hashlib
import secrets
import time
from collections.abc import Callable
from typing import Final

from fanin.edge.bundles.keys import CALL_CONTEXT, is_signed
from fanin.protos.calls import MAX_EARLY_S, MAX_LATE_S, MICROSECONDS, DeviceCall
from fanin.protos.errors import Conflict, Unauthenticated, Untimely
from fanin.protos.messages import OLDEST_PROTOCOL, PROTOCOL, Enrollment, Principal, PrincipalKind
from fanin.server.access.replays import CallTimes
from fanin.server.storage.protocols.devices import DeviceDirectory
from fanin.server.storage.records import EnrolledDevice, Role

TOKEN_BYTES: Final = 24
OPERATOR_ID_CHARS: Final = 12
"""Characters of a token's digest in the id of its operator. 48 bits distinguish the tokens of a coordinator."""


class Registry:
    """The checks of enrollments and of calls."""

    def __init__(
        self, store: DeviceDirectory, wall: Callable[[], float], steady: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a registry.

        Args:
            store: Devices and tokens.
            wall: Wall time in seconds. For the times of calls it is read once. If the clock were set back between two
                readings, devices would repeat used times.
            steady: Monotonic time in seconds, which continues from there.
        """
        self._store = store
        self._wall = wall
        self._steady = steady
        self._epoch_s = wall() - steady()
        self._times = CallTimes(self.now_us)

    @property
    def now_us(self) -> int:
        """The time with which the times of calls are compared, in microseconds since the Unix epoch."""
        return int((self._epoch_s + self._steady()) * MICROSECONDS)

    def check_enrollment(self, enrollment: Enrollment, call: DeviceCall, signature: bytes) -> EnrolledDevice:
        """Return the device that enrolls, without the database. The caller records it (``Stores.enroll``).

        Raises:
            Unauthenticated: The token is wrong, or the caller does not hold the key.
            Conflict: The coordinator does not support the device's protocol.
        """
        if not self.has_token(enrollment.token, Role.DEVICE):
            raise Unauthenticated(
                "enroll: got a token that this coordinator did not create, expected an enrollment token", code="FN-0670"
            )
        device = EnrolledDevice(public_key=enrollment.public_key)
        if call.device_id != device.device_id:
            raise Unauthenticated(
                f"enroll: got device id {call.device_id!r}, expected {device.device_id}, of its own key", code="FN-0672"
            )
        self._check(device, call, signature)
        if not OLDEST_PROTOCOL <= enrollment.protocol <= PROTOCOL:
            known = f"{OLDEST_PROTOCOL} to {PROTOCOL}"
            raise Conflict(
                f"protocol: got {enrollment.protocol}, expected {known}; install the coordinator's release of fanin",
                code="FN-0675",
            )
        return device

    def device(self, device_id: str) -> EnrolledDevice:
        """Return the device of an id, from memory. Raises Unauthenticated if it never enrolled."""
        device = self._store.find(device_id)
        if device is None:
            raise Unauthenticated(f"call: got device {device_id[:64]!r}, which is not enrolled here", code="FN-0671")
        return device

    def authenticate(self, device: EnrolledDevice, call: DeviceCall, signature: bytes) -> None:
        """Check a call of a device, and use its time.

        Raises:
            Unauthenticated: The signature is not by this device.
            Untimely: The time is too far from now, or was used before.
        """
        self._check(device, call, signature)
        self.use_time(device, call)

    def use_time(self, device: EnrolledDevice, call: DeviceCall) -> None:
        """Use the time of a call whose signature was checked. Raises Untimely if it was used before."""
        self._times.use(device.device_id, call.time_us)

    def operator(self, token: str) -> Principal:
        """Return the principal of an operator's token. Raises Unauthenticated if the token was not issued here.

        Its id is the beginning of the token's digest. It names the token in the record and does not reveal it.
        """
        if not self.has_token(token, Role.OPERATOR):
            raise Unauthenticated(
                "control: got a token that this coordinator did not create, expected an operator token", code="FN-0670"
            )
        return Principal(kind=PrincipalKind.OPERATOR, id=token_sha256(token)[:OPERATOR_ID_CHARS])

    def bearer(self, sha256: str) -> Principal:
        """Return the principal of the token with a digest. Raises Unauthenticated if it was not issued here."""
        if not self._store.has_token(sha256, Role.OPERATOR):
            raise Unauthenticated(
                "page: got a token that this coordinator did not create, expected an operator token", code="FN-0670"
            )
        return Principal(kind=PrincipalKind.OPERATOR, id=sha256[:OPERATOR_ID_CHARS])

    def has_token(self, token: str, role: Role) -> bool:
        """Return whether a token was issued here for a role."""
        return self._store.has_token(token_sha256(token), role)

    def new_token(self, role: Role) -> str:
        """Issue a token for a role. Only its digest is stored."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._store.add_token(token_sha256(token), role, self._wall())
        return token

    def _check(self, device: EnrolledDevice, call: DeviceCall, signature: bytes) -> None:
        early_s = (call.time_us - self.now_us) / MICROSECONDS
        if not -MAX_LATE_S <= early_s <= MAX_EARLY_S:
            raise Untimely(
                f"call: got a time {early_s:.1f} s from this clock, expected {-MAX_LATE_S:g} to {MAX_EARLY_S:g}; "
                "set the clock of the device",
                code="FN-0673",
            )
        if not is_signed(device.public_key, signature, CALL_CONTEXT, call.signed_bytes()):
            raise Unauthenticated(
                f"call: the signature on {call.method} is not by device {device.device_id}", code="FN-0672"
            )


def token_sha256(token: str) -> str:
    """Return the digest of a token, which the store keeps. 192 random bits cannot be guessed from a plain digest."""
    return hashlib.sha256(token.encode()).hexdigest()
