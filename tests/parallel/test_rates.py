"""The learning rate of each step is a function of its number, the batch and the rule."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.datacenter.config.rates import RateSettings
from fanin.datacenter.training.rates import Noise, rates_of


@pytest.mark.parametrize(
    ("scale", "peak", "warm_steps"),
    [("none", 0.1, 8), ("linear", 0.4, 2), ("sqrt", 0.2, 2), ("legw", 0.2, 8), ("adascale", 0.1, 8)],
)
def test_a_batch_of_four_times_the_size(scale: str, peak: float, warm_steps: int) -> None:
    base = 0 if scale == "none" else 8
    rates = rates_of(RateSettings(scale=scale, base_batch=base, warm_up=8), 0.1, 32, 100)
    assert rates.peak == pytest.approx(peak)
    assert rates.warm_steps == warm_steps


def test_the_rate_rises_and_falls() -> None:
    rates = rates_of(RateSettings(warm_up=4, decay="cosine", floor=0.1), 1.0, 8, 25)
    assert [rates.at(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates.at(14) == pytest.approx(0.55)
    assert rates.at(24) == pytest.approx(0.1)
    assert rates.at(99) == pytest.approx(0.1), "past its end it stays"


@given(warm_up=st.integers(0, 9), floor=st.floats(0.0, 1.0), num_steps=st.integers(1, 99))
def test_the_rate_stays_in_its_bounds_and_never_rises_again(warm_up: int, floor: float, num_steps: int) -> None:
    rates = rates_of(RateSettings(warm_up=warm_up, decay="cosine", floor=floor), 2.0, 8, num_steps)
    values = [rates.at(step) for step in range(num_steps)]
    assert all(0.0 <= rate <= 2.0 for rate in values)
    rest = values[rates.warm_steps :]
    assert all(second <= first for first, second in pairwise(rest))
    assert all(rate >= 2.0 * floor - 1e-12 for rate in rest)


def squared_norms(gradients: np.ndarray) -> tuple[float, float]:
    """Return (mean of the squared norms, squared norm of the mean) of the parts' gradients (parts, values)."""
    return float(np.square(gradients).sum(axis=1).mean()), float(np.square(gradients.mean(axis=0)).sum())


@pytest.mark.parametrize("num_parts", [2, 8])
def test_equal_parts_have_gain_one_and_opposite_parts_the_full_gain(num_parts: int) -> None:
    equal_parts, opposite_parts = (
        np.ones((num_parts, 3)),
        np.concatenate([np.ones((num_parts // 2, 3)), -np.ones((num_parts // 2, 3))]),
    )
    assert Noise().gain(num_parts) == 1.0
    assert Noise().updated(*squared_norms(equal_parts), num_parts).gain(num_parts) == 1.0
    assert Noise().updated(*squared_norms(opposite_parts), num_parts).gain(num_parts) == num_parts
    assert Noise().updated(*squared_norms(0.0 * equal_parts), num_parts).gain(num_parts) == 1.0, (
        "nothing is left to learn"
    )


@given(noise=st.floats(0.1, 10.0), num_parts=st.sampled_from([2, 4, 16]), seed=st.integers(0, 9))
def test_the_gain_of_known_noise_matches_the_formula(noise: float, num_parts: int, seed: int) -> None:
    rng, estimate, size = np.random.default_rng(seed), Noise(), 200
    for _ in range(40):
        gradients = 1.0 + noise * rng.normal(size=(num_parts, size))
        estimate = estimate.updated(*squared_norms(gradients), num_parts)
    variance, signal = noise**2 * size, 1.0 * size
    assert estimate.gain(num_parts) == pytest.approx((variance + signal) / (variance / num_parts + signal), rel=0.05)
    assert 1.0 <= estimate.gain(num_parts) <= num_parts


def test_a_mean_over_steps_recovers_a_signal_below_the_noise() -> None:
    # In the end 50 steps count. The mean over many such jobs removes chance.
    rng, num_parts, size, estimates = np.random.default_rng(0), 16, 10, []
    for _ in range(100):
        estimate = Noise()
        for _ in range(60):
            estimate = estimate.updated(*squared_norms(0.1 + rng.normal(size=(num_parts, size))), num_parts)
        estimates.append(estimate)
    assert np.mean([each.variance for each in estimates]) == pytest.approx(size, rel=0.01)
    assert np.mean([each.signal for each in estimates]) == pytest.approx(0.01 * size, rel=0.1)
    assert all(1.0 <= each.gain(num_parts) <= num_parts for each in estimates)


def test_means_are_those_of_all_steps_and_then_of_the_last() -> None:
    estimate, variances = Noise(), [1.0, 3.0, 5.0]
    for variance in variances:
        # The mean is 0, so there is no signal.
        estimate = estimate.updated(variance / 2, 0.0, 2)
    assert estimate.variance == pytest.approx(np.mean(variances))
    for _ in range(2000):
        estimate = estimate.updated(7.0 / 2, 0.0, 2)
    # A window of 1000 parts is 500 steps of two. The weight of earlier values is at most e**-4.
    assert 7.0 - 4.0 * np.exp(-3) < estimate.variance < 7.0
    assert Noise(variance=1.0, count=9).updated(3.0, 0.0, 2000).variance == 3.0 * 2000 / 1999, "one step has so many"
