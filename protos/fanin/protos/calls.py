"""How a device signs its calls: the metadata and the signed bytes. ``fleet.proto`` states the rule.

Method, body and time are under the signature. A coordinator serves each time of a device once, so a signature is
good for one call.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

from fanin.protos.names import check_name

DEVICE: Final = "fanin-device"
TIME: Final = "fanin-time"
SIGNATURE: Final = "fanin-signature-bin"
AUTHORIZATION: Final = "authorization"
BEARER: Final = "Bearer "
SERVER_TIME: Final = "fanin-server-time"
ERROR: Final = "fanin-error"
MAX_LATE_S: Final = 300.0
"""A device's clock may be minutes slow, and its call may wait for the network."""
MAX_EARLY_S: Final = 2.0
"""Few seconds: a coordinator that restarts refuses calls that were signed before, and these are the ones it misses."""
MICROSECONDS: Final = 1_000_000
MAX_TIME_CHARS: Final = 17
"""Microseconds until the year 5138."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a device signs. ``time_us`` is microseconds since the Unix epoch; ``body_sha256`` is hexadecimal."""

    method: str
    device_id: str
    time_us: int
    body_sha256: str

    def signed_bytes(self) -> bytes:
        """The bytes under the signature, each part on its own line."""
        return "\n".join((self.method, self.device_id, str(self.time_us), self.body_sha256)).encode()


def device_id_of(public_key: str) -> str:
    """A device's id: the first 32 hexadecimal characters of its key's SHA-256, so the same key is the same
    device whenever and wherever it enrolls."""
    device_id = hashlib.sha256(bytes.fromhex(public_key)).hexdigest()[:32]
    check_name("device", device_id)
    return device_id
