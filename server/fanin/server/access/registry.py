"""Authentication: devices by their signatures, people and enrollments by their tokens.

A refused caller receives ``Unauthenticated``. What is wrong with a token is told to the holder of its secret, and a
removed device is told that it was removed. Of other checks the public text does not name the failed one, and the log
does. A call with a wrong time receives ``Untimely``, and an honest device signs it again. No check needs the database:
any peer can make a call, and the database has one lane.
"""

import hashlib
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from fanin.edge.bundles.keys import CALL_CONTEXT, is_signed
from fanin.edge.scopes import LogScope, note_scope
from fanin.protos.calls import MAX_EARLY_S, MAX_LATE_S, MICROSECONDS, PROBE, PROBE_US, DeviceCall
from fanin.protos.errors import Conflict, Unauthenticated, Untimely
from fanin.protos.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    TOKEN_ID_CHARS,
    Enrollment,
    NewToken,
    Principal,
    PrincipalKind,
    Role,
)
from fanin.protos.release import __version__
from fanin.server.access.open_calls import OpenCalls
from fanin.server.access.replays import CallTimes
from fanin.server.storage.access import banned, check_use, checked_token, removed
from fanin.server.storage.protocols.devices import DeviceDirectory
from fanin.server.storage.records import EnrolledDevice

TOKEN_BYTES: Final = 24


class Registry:
    """The checks of enrollments and of calls.

    Attributes:
        calls: The calls that passed these checks and are under way.
    """

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
        self.calls = OpenCalls()

    @property
    def now_us(self) -> int:
        """The time with which the times of calls are compared, in microseconds since the Unix epoch."""
        return int((self._epoch_s + self._steady()) * MICROSECONDS)

    def check_enrollment(self, enrollment: Enrollment, call: DeviceCall, signature: bytes) -> EnrolledDevice:
        """Return the device that enrolls, without the database. The caller records it (``Stores.enroll``).

        The order of the checks is that of ``fanin doctor``: the token, the protocol, the key, the time, the signature.
        A device that is enrolled may repeat the call at each start, and needs no valid token: its key identifies it.

        Raises:
            Unauthenticated: The token is wrong, or the caller does not hold the key.
            PermissionDenied: The key is banned.
            Conflict: The coordinator does not support the device's protocol.
        """
        device = EnrolledDevice(public_key=enrollment.public_key)
        if self._store.find(device.device_id) is None:
            self._check_token(enrollment.token, device.device_id)
        if problem := protocol_problem(enrollment.protocol):
            raise Conflict(problem, code="FN-0675")
        if call.device_id != device.device_id:
            raise Unauthenticated(
                f"enroll: got device id {call.device_id!r}, expected {device.device_id}, of its own key", code="FN-0672"
            )
        self._check(device, call, signature)
        self.check_ban(device)
        return device

    def _check_token(self, secret: str, device_id: str) -> None:
        """Raise Unauthenticated unless a token may enroll a new device."""
        try:
            if not secret:
                raise Unauthenticated(
                    "enroll: got no token, and this device is not enrolled here; pass an enrollment token "
                    "(--token-file, or $FANIN_DEVICE_TOKEN)",
                    code="FN-0670",
                )
            check_use(self._store.find_token(token_sha256(secret)), self._wall())
        except Unauthenticated as exc:
            # The token that it has enrolled with is often used up. That is not why it needs another one.
            if self._store.is_removed(device_id):
                raise removed(device_id) from exc
            raise

    def device(self, device_id: str) -> EnrolledDevice:
        """Return the device of an id, from memory. Raises Unauthenticated if it never enrolled."""
        device = self._store.find(device_id)
        if device is None:
            if self._store.is_removed(device_id):
                raise removed(device_id)
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
        # Each call is served by a task of its own.
        note_scope(LogScope(device=device.device_id))

    def use_time(self, device: EnrolledDevice, call: DeviceCall) -> None:
        """Use the time of a call whose signature was checked. Raises Untimely if it was used before."""
        self._times.use(device.device_id, call.time_us)

    def check_ban(self, device: EnrolledDevice) -> None:
        """Raise PermissionDenied for a device that is banned. Its signature was checked: the answer is for it alone."""
        if (since := self._store.banned_at(device.device_id)) is not None:
            raise banned(device.device_id, since)

    def bearer(self, secret: str) -> tuple[Principal, float]:
        """Return the principal of a person's token, and the seconds for which it is valid.

        Raises:
            Unauthenticated: The token was not created here, is revoked or expired, or enrolls devices.
        """
        return self.bearer_of(token_sha256(secret))

    def bearer_of(self, sha256: str) -> tuple[Principal, float]:
        """Return the same for the digest of a secret, which a session of the page has."""
        now_s = self._wall()
        token = checked_token("control", self._store.find_token(sha256), now_s)
        if token.role is Role.DEVICE:
            raise Unauthenticated(
                f"control: the token {token.name} enrolls devices, expected one of a person; pass that of an operator "
                "with --token-file, such as tokens/operator.token of the coordinator's folder",
                code="FN-1493",
            )
        left_s = math.inf if token.expires_at is None else token.expires_at - now_s
        return Principal(kind=PrincipalKind(token.role.value), id=token.name), left_s

    def has_token(self, secret: str, role: Role) -> bool:
        """Return whether a token was issued here for a role, also if it is revoked or expired."""
        token = self._store.find_token(token_sha256(secret))
        return token is not None and token.role is role

    def new_token(self, role: Role) -> str:
        """Issue a token of the coordinator itself, and return its secret. Only its digest is stored.

        Its name is that of the role. If that is taken, the beginning of the digest makes another of it.
        """
        secret = secrets.token_urlsafe(TOKEN_BYTES)
        sha256 = token_sha256(secret)
        new = NewToken(name=role.value, role=role, sha256=sha256)
        try:
            self._store.add_token(new, self._wall())
        except Conflict:
            self._store.add_token(replace(new, name=f"{role.value}-{sha256[:TOKEN_ID_CHARS]}"), self._wall())
        return secret

    def _check(self, device: EnrolledDevice, call: DeviceCall, signature: bytes) -> None:
        if call.time_us == PROBE_US and is_signed(device.public_key, signature, CALL_CONTEXT, call.signed_bytes()):
            self.check_ban(device)
            raise Untimely("call: a check of fanin doctor, which is never served", code=PROBE)
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


def protocol_problem(protocol: int) -> str:
    """Return what is wrong with the protocol of a device; "" if the coordinator speaks it."""
    if OLDEST_PROTOCOL <= protocol <= PROTOCOL:
        return ""
    known = str(PROTOCOL) if OLDEST_PROTOCOL == PROTOCOL else f"{OLDEST_PROTOCOL} to {PROTOCOL}"
    release = "an older" if protocol < OLDEST_PROTOCOL else "a newer"
    return (
        f"protocol: got {protocol}, of {release} release on the device, expected {known}; install the coordinator's "
        f"release of fanin there: pip install 'fanin=={__version__}'"
    )


def token_sha256(token: str) -> str:
    """Return the digest of a token, which the store keeps. 192 random bits cannot be guessed from a plain digest."""
    return hashlib.sha256(token.encode()).hexdigest()
