"""The coins of a Run with sampling: which devices of its frozen roster take part in a Round.

Each coin is a pseudo-random function of (key of the Run, Round, device): independent coins to everybody who does not
have the key. The key exists before the first Round, so all coins are fixed before any device's availability is seen. A
restarted coordinator throws the same ones, and a Round is never drawn twice.

    coin   HMAC-SHA256(key, "ROUND.DEVICE"), the first 16 bytes as a number c; the device takes part if
           c < floor(rate * 2^128)

So the probability is at most the rate that the accounting claims, and less by 2^-128 at most.

Reference:
    docs/explanation/differential-privacy.md, sampling of devices.
"""

import hashlib
import hmac
from collections.abc import Container
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

COIN_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Coins:
    """The coins of a Run.

    Attributes:
        key: Their key, which only the coordinator has.
        rate: Probability that a device takes part in a Round.
        roster: The devices that were there when the Run started. No other device takes part.
    """

    key: bytes = field(repr=False)
    rate: float
    roster: Container[str]

    def draws(self, round_number: int, device: str) -> bool:
        """Return whether a device takes part in a Round."""
        if device not in self.roster:
            return False
        digest = hmac.new(self.key, f"{round_number}.{device}".encode(), hashlib.sha256).digest()
        return int.from_bytes(digest[:COIN_BYTES]) < int(Fraction(self.rate) * (1 << 8 * COIN_BYTES))
