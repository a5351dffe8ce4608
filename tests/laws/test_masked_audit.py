"""An audit of noise on devices: worst-case canaries through shares of noise, masks and the unmasked sum.

One of six devices helps the coordinator and adds no noise, so the sum has the noise of the least honest survivors. The
seeds are fixed, and no command reaches them. The confidence of each bound is 1 - 1e-6.
"""

import hashlib
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import pytest
from support.audit import audit
from support.masked import attempt_of, terms_of

from fanin.commands.bench.harness.masked import PlainUpdate
from fanin.edge.noise.shares import MECHANISMS, NoiseShare
from fanin.edge.rings import RingVector
from fanin.edge.tensors import Int64s
from fanin.server.privacy.accounting import epsilon
from fanin.server.privacy.releases import PlainRelease

SENSITIVITY: Final = 1000
DELTA: Final = 1e-5
NUM_DEVICES: Final = 6
NUM_CANARIES: Final = 2_000_000


def share_of(mechanism: str, noise_multiplier: float) -> NoiseShare:
    """Return the noise of a device for five honest ones. Each value is a canary of its own."""
    return NoiseShare(
        mechanism=mechanism,
        noise_multiplier=noise_multiplier,
        squared_sensitivity=SENSITIVITY**2,
        num_values=1,
        num_honest=NUM_DEVICES - 1,
    )


def released(share: NoiseShare, sums: Int64s) -> Int64s:
    """Return what the coordinator unmasks, if the device 1 sends all canaries and the device 0 adds no noise."""
    ring = share.ring(NUM_DEVICES, SENSITIVITY)
    terms = replace(terms_of(NUM_DEVICES), layout=RingVector(ring=ring, num_values=sums.size, num_tail=1))

    def update(index: int) -> PlainUpdate:
        values = sums if index == 1 else np.zeros_like(sums)
        seed = hashlib.sha256(f"canary {index}".encode()).digest()
        pieces = (values,) if index == 0 else tuple(share.noised(values, seed))
        return PlainUpdate(pieces=pieces, weight=1, tail=(1,))

    attempt = attempt_of(terms, NUM_DEVICES)
    attempt.advertise()
    attempt.share()
    attempt.mask(update)
    attempt.unmask()
    return ring.signed(attempt.total)


@pytest.mark.nightly
@pytest.mark.parametrize("mechanism", sorted(MECHANISMS))
def test_an_audit_of_the_masked_sum_is_below_the_claim_and_detects_half_the_noise(mechanism: str) -> None:
    claimed = epsilon([(PlainRelease(loss=share_of(mechanism, 1.0).loss), 1)], DELTA)
    whole = audit(partial(released, share_of(mechanism, 1.0)), SENSITIVITY, NUM_CANARIES, DELTA)
    half = audit(partial(released, share_of(mechanism, 0.5)), SENSITIVITY, NUM_CANARIES, DELTA)
    print(f"{mechanism}: claimed {claimed:.3f}, audited {whole:.3f}, with half the noise {half:.3f}")
    assert 2.0 < whole <= claimed < half
