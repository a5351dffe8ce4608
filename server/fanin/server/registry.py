"""Who may speak: devices by their signatures, operators and enrollments by their tokens.

What is refused is always ``Unauthenticated``, whose public text does not say which check failed; the log does.
"""

import hashlib
import secrets
from collections.abc import Callable
from typing import Final

from fanin.edge.keys import CALL_CONTEXT, is_signed
from fanin.protos.calls import MAX_CLOCK_SKEW_S, Call, device_id_of
from fanin.protos.errors import Conflict, Unauthenticated
from fanin.protos.messages import OLDEST_PROTOCOL, PROTOCOL, Enrollment
from fanin.server.store.devices import Device, DeviceStore, Role

MAX_KNOWN: Final = 100_000
"""Devices whose keys are kept in memory, about 20 MB."""
TOKEN_BYTES: Final = 24


class Registry:
    """Enrollment, and the check of every call."""

    def __init__(self, store: DeviceStore, wall: Callable[[], float]) -> None:
        self._store = store
        self._wall = wall
        self._known: dict[str, Device] = {}

    def enroll(self, enrollment: Enrollment, call: Call, signature: bytes) -> Device:
        """Make a device known.

        Raises Unauthenticated for a wrong token or a key that its caller does not hold, Conflict for a protocol
        that is not spoken here.
        """
        if not self.has_token(enrollment.token, Role.DEVICE):
            raise Unauthenticated("enroll: got a token that was not made here, expected an enrollment token")
        device_id = device_id_of(enrollment.public_key)
        if call.device_id != device_id:
            raise Unauthenticated(f"enroll: got device id {call.device_id!r}, expected {device_id}, of its own key")
        device = Device(device_id=device_id, public_key=enrollment.public_key)
        self._check(device, call, signature)
        if not OLDEST_PROTOCOL <= enrollment.protocol <= PROTOCOL:
            known = f"{OLDEST_PROTOCOL} to {PROTOCOL}"
            raise Conflict(f"protocol: got {enrollment.protocol}, expected {known}; install another fanin")
        self._store.enroll(device, self._wall())
        return device

    def known(self, device_id: str) -> Device | None:
        """A device from memory, without asking the store."""
        return self._known.get(device_id)

    def look_up(self, device_id: str) -> Device:
        """A device from the store, remembered. Raises Unauthenticated for one that never enrolled."""
        device = self._store.find(device_id)
        if device is None:
            raise Unauthenticated(f"call: got device {device_id[:64]!r}, which is not enrolled here")
        if len(self._known) >= MAX_KNOWN:
            # Oldest first: dicts keep insertion order.
            del self._known[next(iter(self._known))]
        self._known[device_id] = device
        return device

    def authenticate(self, device: Device, call: Call, signature: bytes) -> None:
        """Raise Unauthenticated unless this device signed this call, about now."""
        self._check(device, call, signature)

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
