"""An audit of the noise: its lower bound of epsilon is never above the claim, and noise halved on purpose is detected.

The seeds are fixed, so the results are. The confidence of each bound is 1 - 1e-6.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from support.audit import audit, lower_bound
from support.folds import fresh
from support.virtual import plan

from fanin.edge.noise.distributions import DiscreteGaussian, DiscreteLaplace, Distribution, Skellam, draw
from fanin.edge.noise.loss import (
    Loss,
    loss_of_discrete_gaussian,
    loss_of_gaussian_shares,
    loss_of_skellam,
)
from fanin.edge.tensors import Int64s, TensorTable
from fanin.protos.plans import AggregationPlan, Plan, PrivacyPlan
from fanin.server.aggregation.checked import rule_of
from fanin.server.aggregation.sets import SetFold
from fanin.server.privacy.accounting import epsilon
from fanin.server.privacy.noising import CentralNoise, noise_of
from fanin.server.privacy.releases import NoisedSum, PlainRelease, SampledRelease

SENSITIVITY = 1000
DELTA = 1e-5
NUM_DEVICES = 5
NUM_CANARIES = 4_000_000
VARIANCE = Fraction(SENSITIVITY**2)
"""Noise multiplier 1."""


def noise(name: str, distribution: Distribution, count: int) -> Int64s:
    """Return the noise of one vector, of a seed of its own."""
    return draw(hashlib.sha256(name.encode()).digest(), distribution, 0, count)


def central(share: Fraction) -> Callable[[Int64s], Int64s]:
    """Return the mechanism of a coordinator with a share of the variance."""
    return lambda sums: sums + noise("central", DiscreteGaussian(VARIANCE * share), len(sums))


def skellam(share: Fraction) -> Callable[[Int64s], Int64s]:
    """Return the mechanism of five devices that each add a share of Skellam noise."""
    one = Skellam(VARIANCE * share / NUM_DEVICES)
    return lambda sums: sums + sum(noise(f"skellam {device}", one, len(sums)) for device in range(NUM_DEVICES))


def shares(share: Fraction) -> Callable[[Int64s], Int64s]:
    """Return the mechanism of five devices that each add a share of discrete Gaussian noise."""
    one = DiscreteGaussian(VARIANCE * share / NUM_DEVICES)
    return lambda sums: sums + sum(noise(f"share {device}", one, len(sums)) for device in range(NUM_DEVICES))


def laplace(share: Fraction) -> Callable[[Int64s], Int64s]:
    """Return a mechanism of discrete Laplace noise; the share is that of the squared scale."""
    scale = Fraction(SENSITIVITY) if share == 1 else Fraction(SENSITIVITY) / 2
    return lambda sums: sums + noise("laplace", DiscreteLaplace(scale), len(sums))


SQUARED = SENSITIVITY**2
MECHANISMS = {
    "central": (central, loss_of_discrete_gaussian(SQUARED, VARIANCE)),
    "skellam": (skellam, loss_of_skellam(SQUARED, SENSITIVITY, VARIANCE)),
    "shares": (shares, loss_of_gaussian_shares(SQUARED, VARIANCE / NUM_DEVICES, NUM_DEVICES, 1)),
}
HALF_THE_NOISE = Fraction(1, 4)
"""Half of the standard deviation."""


def claim(loss: Loss) -> float:
    """Return the epsilon that the ledger shows."""
    return epsilon([(PlainRelease(loss=loss), 1)], DELTA)


def test_an_audit_of_central_noise_is_below_the_claim_and_detects_half_the_noise() -> None:
    mechanism, loss = MECHANISMS["central"]
    num_canaries = 2_000_000
    assert 2.0 < audit(mechanism(Fraction(1)), SENSITIVITY, num_canaries, DELTA) <= claim(loss)
    assert audit(mechanism(HALF_THE_NOISE), SENSITIVITY, num_canaries, DELTA) > claim(loss)


def folded(plan: Plan, sums: Int64s) -> Int64s:
    """Return the sum that the fold of a Round publishes for Updates with these values together."""
    noise = noise_of(plan, 1)
    assert isinstance(noise, CentralNoise)
    table = TensorTable.of({"canaries": (sums.size,)})
    halves = {"a": sums // 2, "b": sums - sums // 2}
    updates = {device: fresh(1, (0,), plan.codec, [values.astype(np.int32)]) for device, values in halves.items()}
    set_fold = SetFold(rule_of(plan), table, noise.grid_of(1), lambda device, _scale: updates[device])
    aggregate = set_fold.complete(sorted(updates), noise.adjustment(hashlib.sha256(b"fold").digest()))
    assert aggregate.sums is not None
    # The mean has the sums themselves, divided by the fixed denominator.
    assert aggregate.part(7, 8) == np.ldexp(aggregate.sums(7, 8).astype(np.float64), noise.grid.exponent) / 4
    return aggregate.sums(0, sums.size)


def private_plan(noise_multiplier: float) -> Plan:
    base = plan(max_rounds=1)
    privacy = PrivacyPlan(
        mechanism="central",
        clip_norm=1.0,
        noise_multiplier=noise_multiplier,
        epsilon=10.0,
        delta=DELTA,
        population="canaries",
        population_size=1000,
    )
    return replace(base, aggregation=AggregationPlan(max_examples=1), privacy=privacy)


def test_an_audit_of_the_fold_of_a_round_is_below_the_claim_and_detects_half_the_noise() -> None:
    """The canaries go through the fold of the coordinator, with the noise of its seed."""
    noise = noise_of(private_plan(1.0), 1)
    assert isinstance(noise, CentralNoise)
    sensitivity = math.isqrt(noise.grid.squared_sensitivity)
    claimed = epsilon([(noise.release, 1)], DELTA)
    assert 2.0 < audit(partial(folded, private_plan(1.0)), sensitivity, 2_000_000, DELTA) <= claimed
    assert audit(partial(folded, private_plan(0.5)), sensitivity, 2_000_000, DELTA) > claimed


@pytest.mark.nightly
@pytest.mark.parametrize("name", MECHANISMS)
def test_an_audit_is_below_the_claim_and_detects_half_the_noise(name: str) -> None:
    mechanism, loss = MECHANISMS[name]
    assert 0.5 * claim(loss) < audit(mechanism(Fraction(1)), SENSITIVITY, 4 * NUM_CANARIES, DELTA) <= claim(loss)
    assert audit(mechanism(HALF_THE_NOISE), SENSITIVITY, 4 * NUM_CANARIES, DELTA) > claim(loss)


def test_an_audit_of_discrete_laplace_is_below_its_pure_epsilon() -> None:
    """Its epsilon is sensitivity / scale, for each delta."""
    assert 0.9 < audit(laplace(Fraction(1)), SENSITIVITY, NUM_CANARIES // 4, DELTA) <= 1.0
    assert audit(laplace(HALF_THE_NOISE), SENSITIVITY, NUM_CANARIES // 4, DELTA) > 1.0


@pytest.mark.nightly
def test_an_audit_of_sampled_rounds_is_below_the_claim_and_detects_half_the_noise() -> None:
    rate, num_rounds = 0.25, 4
    released = {share: np.zeros(NUM_CANARIES, dtype=np.int64) for share in (Fraction(1), HALF_THE_NOISE)}
    rng = np.random.default_rng(7)  # the coins of the canaries
    for round_number in range(num_rounds):
        sums = np.zeros(NUM_CANARIES, dtype=np.int64)
        sums[::2] = SENSITIVITY * (rng.random(NUM_CANARIES // 2) < rate)
        for share, values in released.items():
            values += sums + noise(f"round {round_number}", DiscreteGaussian(VARIANCE * share), NUM_CANARIES)
    noised = NoisedSum(squared_sensitivity=SQUARED, parameter=VARIANCE)
    claimed = epsilon([(SampledRelease(sums=(noised,), sampling_rate=rate), num_rounds)], DELTA)
    bounds = {share: lower_bound(values[::2], values[1::2], DELTA) for share, values in released.items()}
    assert 0 < bounds[Fraction(1)] <= claimed < bounds[HALF_THE_NOISE]


def test_a_bound_of_no_difference_is_zero() -> None:
    values = noise("none", DiscreteGaussian(VARIANCE), 200_000)
    assert lower_bound(values[::2], values[1::2], DELTA) == 0


def test_a_reused_seed_is_detected() -> None:
    """The noise of two vectors cancels in their difference, so the auditor gets the values without noise."""
    sums = np.zeros(200_000, dtype=np.int64)
    sums[::2] = SENSITIVITY
    mechanism = central(Fraction(1))
    difference = mechanism(sums) - mechanism(np.zeros_like(sums))
    assert lower_bound(difference[::2], difference[1::2], DELTA) > claim(MECHANISMS["central"][1])
