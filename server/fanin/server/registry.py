"""Who may speak: devices by their signatures, operators and enrollments by their tokens.

What is refused is always ``Unauthenticated``, whose public text does not say which check failed; the log does. No check
asks the database: anybody can make a call, and the database has one lane.
"""

import hashlib
import secrets
from collections.abc import Callable
from typing import Final

from fanin.edge.keys import CALL_CONTEXT, is_signed
from fanin.protos.calls import MAX_CLOCK_SKEW_S, Call
from fanin.protos.errors import Conflict, Unauthenticated
from fanin.protos.messages import OLDEST_PROTOCOL, PROTOCOL, Enrollment
from fanin.server.population import Device
from fanin.server.store.devices import DeviceStore, Role

TOKEN_BYTES: Final = 24


class Registry:
    """Enrollment, and the check of every call."""

    def __init__(self, store: DeviceStore, wall: Callable[[], float]) -> None:
        self._store = store
        self._wall = wall

    def check_enrollment(self, enrollment: Enrollment, call: Call, signature: bytes) -> Device:
        """The device that enrolls, which ``enroll`` is still to record. Asks no database.

        Raises Unauthenticated for a wrong token or a key that its caller does not hold, Conflict for a protocol
        that is not spoken here.
        """
        if not self._store.has_token(token_sha256(enrollment.token), Role.DEVICE):
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

    def authenticate(self, device: Device, call: Call, signature: bytes) -> None:
        """Raise Unauthenticated unless this device signed this call, about now."""
        self._check(device, call, signature)

    def check_operator(self, token: str) -> None:
        """Raise Unauthenticated unless this is an operator's token."""
        if not self._store.has_token(token_sha256(token), Role.OPERATOR):
            raise Unauthenticated("control: got a token that was not made here, expected an operator token")

    def new_token(self, role: Role) -> str:
        """A fresh token for a role; only its digest is kept."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._store.add_token(token_sha256(token), role, self._wall())
        return token

    def _check(self, device: Device, call: Call, signature: bytes) -> None:
        skew = call.time_s - self._wall()
        if abs(skew) > MAX_CLOCK_SKEW_S:
            raise Unauthenticated(
                f"call: the device's clock is {skew:.0f} s off, expected at most {MAX_CLOCK_SKEW_S:g}"
            )
        if not is_signed(device.public_key, signature, CALL_CONTEXT, call.signed_bytes()):
            raise Unauthenticated(f"call: the signature on {call.method} is not by device {device.device_id}")


def token_sha256(token: str) -> str:
    """What the store keeps of a token. Tokens have 192 random bits, so a plain digest cannot be guessed."""
    return hashlib.sha256(token.encode()).hexdigest()
