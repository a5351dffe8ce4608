"""Who may speak: devices by their signatures, operators and enrollments by their tokens.

A refused caller gets ``Unauthenticated``, whose public text does not say which check failed; the log does. A call
whose time does not fit gets ``Untimely``: an honest device signs it anew. No check asks the database: anybody can make
a call, and the database has one lane.
"""

import hashlib
import secrets
import time
from collections.abc import Callable
from typing import Final

from fanin.edge.bundles.keys import CALL_CONTEXT, is_signed
from fanin.protos.calls import MAX_EARLY_S, MAX_LATE_S, MICROSECONDS, DeviceCall
from fanin.protos.errors import Conflict, Unauthenticated, Untimely
from fanin.protos.messages import OLDEST_PROTOCOL, PROTOCOL, Enrollment
from fanin.server.access.replays import CallTimes
from fanin.server.storage.sqlite.devices import DeviceStore, Role
from fanin.server.storage.sqlite.population import Device

TOKEN_BYTES: Final = 24


class Registry:
    """Enrollment, and the check of every call."""

    def __init__(
        self, store: DeviceStore, wall: Callable[[], float], steady: Callable[[], float] = time.monotonic
    ) -> None:
        """``wall`` is read once for the times of calls, then ``steady`` goes on: a wall clock that is set back would
        make all devices use times that they have used before."""
        self._store = store
        self._wall = wall
        self._steady = steady
        self._epoch_s = wall() - steady()
        self._times = CallTimes(self.now_us)

    @property
    def now_us(self) -> int:
        """The time that calls are compared with, in microseconds since the Unix epoch."""
        return int((self._epoch_s + self._steady()) * MICROSECONDS)

    def check_enrollment(self, enrollment: Enrollment, call: DeviceCall, signature: bytes) -> Device:
        """The device that enrolls, which ``enroll`` is still to record. Asks no database.

        Raises Unauthenticated for a wrong token or a key that its caller does not hold, Conflict for a protocol
        that is not spoken here.
        """
        if not self.has_token(enrollment.token, Role.DEVICE):
            raise Unauthenticated("enroll: got a token that was not made here, expected an enrollment token")
        device = Device(public_key=enrollment.public_key)
        if call.device_id != device.device_id:
            raise Unauthenticated(
                f"enroll: got device id {call.device_id!r}, expected {device.device_id}, of its own key"
            )
        self._check(device, call, signature)
        if not OLDEST_PROTOCOL <= enrollment.protocol <= PROTOCOL:
            known = f"{OLDEST_PROTOCOL} to {PROTOCOL}"
            raise Conflict(f"protocol: got {enrollment.protocol}, expected {known}; install another fanin")
        return device

    def enroll(self, device: Device) -> None:
        """Record a device; harmless if it is known. On the store's lane."""
        self._store.enroll(device, self._wall())

    def device(self, device_id: str) -> Device:
        """A device by its id, from memory. Raises Unauthenticated for one that never enrolled."""
        device = self._store.find(device_id)
        if device is None:
            raise Unauthenticated(f"call: got device {device_id[:64]!r}, which is not enrolled here")
        return device

    def authenticate(self, device: Device, call: DeviceCall, signature: bytes) -> None:
        """Let this call be served, once.

        Raises Unauthenticated unless this device signed it, Untimely unless it did so about now and for the first time.
        """
        self._check(device, call, signature)
        self.use_time(device, call)

    def use_time(self, device: Device, call: DeviceCall) -> None:
        """Raise Untimely if the time of this call, whose signature was checked, was used before."""
        self._times.use(device.device_id, call.time_us)

    def check_operator(self, token: str) -> None:
        """Raise Unauthenticated unless this is an operator's token."""
        if not self.has_token(token, Role.OPERATOR):
            raise Unauthenticated("control: got a token that was not made here, expected an operator token")

    def has_token(self, token: str, role: Role) -> bool:
        """Whether a token was issued here for a role."""
        return self._store.has_token(token_sha256(token), role)

    def new_token(self, role: Role) -> str:
        """A fresh token for a role; only its digest is kept."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._store.add_token(token_sha256(token), role, self._wall())
        return token

    def _check(self, device: Device, call: DeviceCall, signature: bytes) -> None:
        early_s = (call.time_us - self.now_us) / MICROSECONDS
        if not -MAX_LATE_S <= early_s <= MAX_EARLY_S:
            raise Untimely(
                f"call: got a time {early_s:.1f} s from this clock, expected {-MAX_LATE_S:g} to {MAX_EARLY_S:g}; "
                "the device is to set its clock"
            )
        if not is_signed(device.public_key, signature, CALL_CONTEXT, call.signed_bytes()):
            raise Unauthenticated(f"call: the signature on {call.method} is not by device {device.device_id}")


def token_sha256(token: str) -> str:
    """What the store keeps of a token. Tokens have 192 random bits, so a plain digest cannot be guessed."""
    return hashlib.sha256(token.encode()).hexdigest()
