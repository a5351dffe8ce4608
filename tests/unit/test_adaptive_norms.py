"""The step of an adaptive clip norm, its cost, and the keys of a Plan for it."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping, FedAvg
from flwr.supercore.differential_privacy import compute_adaptive_noise_params
from hypothesis import given
from hypothesis import strategies as st
from support.staleness import TABLE

from fanin.clients.planfile import parse_plan
from fanin.edge.noise.adaptive import bits_parameter, next_norm, squared_multiplier
from fanin.edge.noise.distributions import DiscreteGaussian
from fanin.protos import messages as m
from fanin.protos.errors import InvalidPlan
from fanin.server.privacy.noising import CentralNoise, noise_of
from fanin.server.privacy.releases import PlainRelease, SampledRelease

NUM_VALUES = TABLE.num_values
TEXT = """
app = "digits"
[cohort]
concurrency = 100
[training]
learning_rate = 0.1
[aggregation]
max_examples = 1
[privacy]
mechanism = "central"
clip_norm = 0.5
noise_multiplier = 1.1
epsilon = 2.0
delta = 1e-6
population = "phones"
population_size = 100_000
target_quantile = 0.5
"""


@given(
    norm=st.floats(1e-20, 1e20),
    bits=st.integers(-(10**6), 10**6),
    num_devices=st.integers(1, 10**6),
    quantile=st.floats(0.01, 0.99),
    rate=st.floats(0.01, 1.0),
)
def test_a_step_is_the_formula(norm: float, bits: int, num_devices: int, quantile: float, rate: float) -> None:
    exponent = -rate * (0.5 + bits / (2 * num_devices) - quantile)
    if abs(exponent) > 500:
        # The norm leaves the range of float32.
        assert 2.0**-126 <= next_norm(norm, bits, num_devices, quantile, rate) <= 2.0**127
        return
    expected = min(max(norm * math.exp(exponent), 2.0**-126), 2.0**127)
    assert math.isclose(next_norm(norm, bits, num_devices, quantile, rate), expected, rel_tol=1e-9)


@given(multiplier=st.floats(0.1, 50.0), factor=st.floats(0.6, 100.0), norm=st.floats(0.01, 10.0))
def test_update_and_noise_are_those_of_flower(multiplier: float, factor: float, norm: float) -> None:
    """Flower's estimate is not centred, its noise is of floating point, and it divides by the replies, not by n."""
    bits_noise = multiplier * factor
    theirs = compute_adaptive_noise_params(multiplier, 100, bits_noise)
    ours = math.sqrt(squared_multiplier(multiplier, bits_noise))
    assert math.isclose(ours, theirs[1] if theirs[0] == bits_noise else theirs[0], rel_tol=1e-6)
    strategy = DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), multiplier, 100, norm, 0.4, 0.3, bits_noise)
    strategy._geometric_update(37 / 100)
    # 37 of 100 devices are within the norm: 37 - 63.
    assert math.isclose(strategy.clipping_norm, next_norm(norm, -26, 100, 0.4, 0.3), rel_tol=1e-12)


def test_the_norm_finds_the_quantile() -> None:
    rng, plan = np.random.default_rng(5), parse_plan(TEXT, "plan.toml", ("privacy.target_quantile=0.7",)).plan
    noise = noise_of(plan, NUM_VALUES)
    assert isinstance(noise, CentralNoise)
    norms = []
    for number in range(300):
        lengths = rng.lognormal(2.0, 0.5, 100)
        within = int(np.count_nonzero(lengths <= noise.grid.clip_norm))
        # Seeds of a test: each Round has its own.
        tail = noise.adjustment(number.to_bytes(32, "big")).correction
        assert tail is not None
        zero, bit = tail(NUM_VALUES, NUM_VALUES + 2).tolist()
        assert zero == 0
        noise = noise.at(noise.next_norm({m.CLIP_BITS: 2 * within - 100 + bit}))
        norms.append(noise.grid.clip_norm)
    quantile = math.exp(2.0 + 0.5 * 0.5244)
    assert math.isclose(np.mean(norms[100:]), quantile, rel_tol=0.05)


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_bits_and_parameters_cost_what_a_fixed_norm_costs(rate: float) -> None:
    plan = parse_plan(TEXT, "plan.toml").plan
    if rate:
        coins = replace(plan.privacy, sampling="coins", sampling_rate=rate, population_size=400)
        cohort = replace(plan.cohort, quorum=0, concurrency=400, buffer=400, min_report_s=math.inf)
        plan = replace(plan, privacy=coins, cohort=cohort)
    fixed = replace(plan, privacy=replace(plan.privacy, target_quantile=0.0))
    ours, theirs = noise_of(plan, NUM_VALUES), noise_of(fixed, NUM_VALUES)
    assert isinstance(ours, CentralNoise)
    assert isinstance(theirs, CentralNoise)
    # A twentieth of the cohort.
    assert ours.bits_noise == 5.0
    assert ours.noised_sum.parameter > theirs.noised_sum.parameter
    for norm in (0.5, 0.7, 3e-5):
        release, expected = ours.at(norm).release, theirs.release
        if isinstance(release, SampledRelease) and isinstance(expected, SampledRelease):
            assert len(release.sums) == 2
            assert math.isclose(release.noise_multiplier, plan.privacy.noise_multiplier, rel_tol=1e-9)
            assert release.noise_multiplier >= expected.noise_multiplier
            continue
        assert isinstance(release, PlainRelease)
        assert isinstance(expected, PlainRelease)
        # One text for all Rounds, so that the ledger composes them as a count.
        assert release == ours.release
        assert expected.loss.rho * (1 - Fraction(1, 10**8)) < release.loss.rho <= expected.loss.rho


@pytest.mark.parametrize(
    ("sets", "code"),
    [
        (["privacy.target_quantile=0", "privacy.bits_noise=3"], "FN-1710"),
        (["privacy.target_quantile=-0.1"], "FN-0285"),
        (["privacy.target_quantile=1"], "FN-0285"),
        (["privacy.clip_learning_rate=2"], "FN-0285"),
        (["privacy.bits_noise=0.5"], "FN-1711"),
        (["privacy.bits_noise=0.55"], "FN-1711"),
        (["privacy.noise_multiplier=10"], "FN-1711"),
        (["privacy.noise_multiplier=900", "privacy.bits_noise=500"], "FN-1711"),
        (["codec.name=int4", "codec.max_shift=0"], "FN-1710"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(sets: list[str], code: str) -> None:
    assert parse_plan(TEXT, "plan.toml").plan.privacy.target_quantile == 0.5
    with pytest.raises(InvalidPlan) as excinfo:
        parse_plan(TEXT, "plan.toml", sets)
    assert excinfo.value.code == code


@pytest.mark.parametrize("key", ["bits_noise = 3.0", "clip_learning_rate = 0.1"])
def test_a_rate_or_noise_of_bits_without_a_quantile_is_refused(key: str) -> None:
    with pytest.raises(InvalidPlan) as excinfo:
        parse_plan(TEXT.replace("target_quantile = 0.5", key), "plan.toml")
    assert excinfo.value.code == "FN-1710"


def test_the_largest_noise_of_a_plan_can_be_drawn() -> None:
    sets = ("privacy.noise_multiplier=140", "privacy.bits_noise=70.75", "privacy.epsilon=90")
    noise = noise_of(parse_plan(TEXT, "plan.toml", sets).plan, 10**9)
    assert isinstance(noise, CentralNoise)
    assert noise.noised_bits.parameter == bits_parameter(70.75)
    assert DiscreteGaussian(noise.noised_sum.parameter).parameter > 140**2
