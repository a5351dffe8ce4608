"""Signed calls of a device: the metadata keys and the signed bytes. ``fleet.proto`` specifies the rules.

The signature covers method, body and time. A coordinator serves each time of a device once, so a signature is valid for
one call.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from fanin.protos.errors import InvalidInput, Unauthenticated
from fanin.protos.names import check_name

DEVICE: Final = "fanin-device"
TIME: Final = "fanin-time"
SIGNATURE: Final = "fanin-signature-bin"
AUTHORIZATION: Final = "authorization"
BEARER: Final = "Bearer "
SERVER_TIME: Final = "fanin-server-time"
ERROR: Final = "fanin-error"
CODE: Final = "fanin-code"
TRACEPARENT: Final = "traceparent"
"""The context of a trace (W3C Trace Context). Both sides may leave it out."""
_ALONE: Final = frozenset({DEVICE, TIME, SIGNATURE, AUTHORIZATION, TRACEPARENT})
MAX_LATE_S: Final = 300.0
"""Oldest time that is served. A device's clock may be minutes slow, and its call may wait for the network."""
MAX_EARLY_S: Final = 2.0
"""Furthest time ahead that is served. A restarted coordinator rejects times before its start; it cannot detect a replay
of a call whose time was ahead, so this number is small."""
MICROSECONDS: Final = 1_000_000
PROBE_US: Final = 1
"""The time of a call that no coordinator serves: ``fanin doctor`` asks by it which check fails."""
PROBE: Final = "FN-1496"
"""The code of the answer to such a call that passes all other checks."""
MAX_TIME_CHARS: Final = 17
"""Microseconds until the year 5138."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCall:
    """The signed part of a call. ``time_us`` is microseconds since the Unix epoch; ``body_sha256`` is hexadecimal."""

    method: str
    device_id: str
    time_us: int
    body_sha256: str

    def signed_bytes(self) -> bytes:
        """Return the signed bytes: one field per line."""
        return "\n".join((self.method, self.device_id, str(self.time_us), self.body_sha256)).encode()


def device_id_of(public_key: str) -> str:
    """Return the id of a device: the first 32 hexadecimal characters of its key's SHA-256.

    So a key has the same id at every coordinator and after every enrollment.
    """
    device_id = hashlib.sha256(bytes.fromhex(public_key)).hexdigest()[:32]
    check_name("device", device_id)
    return device_id


def metadata_of(pairs: Iterable[tuple[str, str | bytes]]) -> Mapping[str, str | bytes]:
    """Return the metadata of a call by their keys.

    Two credentials could be two callers: a proxy in front of the coordinator might check one, and we the other.

    Raises:
        InvalidInput: The call has one of our keys twice.
    """
    metadata: dict[str, str | bytes] = {}
    for key, value in pairs:
        if key in metadata and key in _ALONE:
            raise InvalidInput(f"call: got the metadata key {key} twice, expected it once", code="FN-1506")
        metadata[key] = value
    return metadata


def signed_call(method: str, metadata: Mapping[str, str | bytes], body: bytes) -> tuple[DeviceCall, bytes]:
    """Return what the metadata of a call claim to have signed, and the signature, which is not checked.

    Raises:
        Unauthenticated: A key is missing or has no valid value.
    """
    signature = metadata.get(SIGNATURE, b"")
    time_us = text(metadata.get(TIME))
    is_time = time_us.isascii() and time_us.isdecimal() and len(time_us) <= MAX_TIME_CHARS
    if not is_time or not isinstance(signature, bytes):
        raise Unauthenticated(f"call: {method} carries no valid {TIME} and {SIGNATURE}", code="FN-0672")
    call = DeviceCall(
        method=method,
        device_id=text(metadata.get(DEVICE)),
        time_us=int(time_us),
        body_sha256=hashlib.sha256(body).hexdigest(),
    )
    return call, signature


def text(value: str | bytes | None) -> str:
    """Return a value of the metadata if it is a text, else ""."""
    return value if isinstance(value, str) else ""
