"""How a device signs its calls: the metadata and the signed bytes; ``fleet.proto`` tells the rule.

Method and body are in the signature, so a signature is good for one call only; the time bounds how long it
could be replayed, and TLS keeps it from being seen at all.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

from fanin.protos.messages import check_name

DEVICE: Final = "fanin-device"
TIME: Final = "fanin-time"
NONCE: Final = "fanin-nonce"
SIGNATURE: Final = "fanin-signature-bin"
AUTHORIZATION: Final = "authorization"
BEARER: Final = "Bearer "
SERVER_TIME: Final = "fanin-server-time"
ERROR: Final = "fanin-error"
MAX_CLOCK_SKEW_S: Final = 300.0
"""Phones are seconds off, not minutes; a wider window would only help a replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a device signs. ``time_s`` is seconds since the Unix epoch; ``body_sha256`` is hexadecimal."""

    method: str
    device_id: str
    time_s: int
    nonce: str
    body_sha256: str

    def signed_bytes(self) -> bytes:
        """The bytes under the signature, each part on its own line."""
        parts = (self.method, self.device_id, str(self.time_s), self.nonce, self.body_sha256)
        return "\n".join(parts).encode()


def device_id_of(public_key: str) -> str:
    """A device's id: the first 32 hexadecimal characters of its key's SHA-256, so the same key is the same
    device whenever and wherever it enrolls."""
    device_id = hashlib.sha256(bytes.fromhex(public_key)).hexdigest()[:32]
    check_name("device", device_id)
    return device_id
