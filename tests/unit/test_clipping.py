"""The integer norm of clipped changes: exact, and within the bound for every change."""

from fractions import Fraction

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.edge.clipped import slack_notes
from fanin.edge.noise.clipping import ClipGrid, squared_norm
from fanin.protos.plans import CodecSpec, PrivacyPlan

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
CHANGES = arrays.arrays(np.float32, st.integers(1, 40), elements=FLOAT32)


class WorstRandom(np.random.Generator):
    """Rounds every value up: the worst draw for a vector of positive values."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))

    def random(self, size: int) -> object:  # type: ignore[override]
        return np.full(size, 1 - 2.0**-53)


@given(change=CHANGES, clip_norm=st.floats(1e-6, 1e6), bits=st.integers(2, 32), seed=st.integers(0, 9))
def test_the_integer_norm_is_within_the_bound(
    change: np.ndarray[tuple[int], np.dtype[np.float32]], clip_norm: float, bits: int, seed: int
) -> None:
    grid = ClipGrid(clip_norm, bits, change.size)
    for rng in (np.random.default_rng(seed), WorstRandom()):
        encoded = grid.clipped(change, rng)
        assert sum(value * value for value in encoded.tolist()) <= grid.squared_sensitivity
        assert int(np.max(np.abs(encoded))) < 1 << (bits - 1)


@given(clip_norm=st.floats(1e-30, 1e30), bits=st.integers(2, 32))
def test_the_step_is_the_finest_that_holds_the_clip_norm(clip_norm: float, bits: int) -> None:
    exponent = ClipGrid(clip_norm, bits, 1).exponent
    largest = (1 << (bits - 1)) - 1
    assert Fraction(clip_norm) <= largest * Fraction(2) ** exponent
    assert Fraction(clip_norm) > largest * Fraction(2) ** (exponent - 1)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50), st.integers(0, 50))
def test_the_squared_norm_is_exact(values: list[int], cut: int) -> None:
    encoded = np.array(values, np.int32)
    assert squared_norm((encoded[:cut], encoded[cut:])) == sum(value * value for value in values)


def test_the_squared_norm_of_many_extreme_values_does_not_overflow() -> None:
    assert squared_norm((np.full(200_000, -(2**31), np.int32),)) == 200_000 << 62


def test_the_rounding_slack_is_inside_the_bound() -> None:
    # Many values far below the step: rounding alone makes the norm, and it exceeds clip norm / step.
    grid = ClipGrid(1.0, 8, 100_000)
    change = np.full(100_000, 100_000**-0.5, np.float32)
    norm = squared_norm((grid.clipped(change, np.random.default_rng(1)),))
    assert norm > (1 / 2.0**grid.exponent) ** 2
    assert norm <= grid.squared_sensitivity


@given(clip_norm=st.floats(1e-6, 1e6), bits=st.sampled_from([8, 20]), num_values=st.integers(1, 10**9))
def test_rounding_costs_a_tenth_at_most_and_the_range_holds_usual_values(
    clip_norm: float, bits: int, num_values: int
) -> None:
    grid = ClipGrid(clip_norm, bits, num_values)
    assert 1 <= grid.slack < 1.11
    reach = grid.largest * 2.0**grid.exponent
    assert reach >= min(clip_norm, 25 * clip_norm / num_values**0.5)


def test_a_value_beyond_the_range_is_cut_and_stays_within_the_bound() -> None:
    grid = ClipGrid(1.0, 8, 1_000_000)
    change = np.zeros(1_000_000, np.float32)
    change[5] = 3.0
    encoded = grid.clipped(change, np.random.default_rng(1))
    assert encoded[5] == 127
    assert squared_norm((encoded,)) <= grid.squared_sensitivity


def test_the_cost_of_rounding_is_noted() -> None:
    privacy = PrivacyPlan(
        mechanism="central",
        clip_norm=0.5,
        noise_multiplier=1.0,
        epsilon=1.0,
        delta=1e-6,
        population="phones",
        population_size=9,
    )
    (note,) = slack_notes(privacy, CodecSpec(name="int8", max_shift=0), 10_000)
    assert "grows by a factor of 1.08" in note
    assert slack_notes(privacy, CodecSpec(name="fixed32", max_shift=0), 10_000) == ()
    assert slack_notes(PrivacyPlan(), CodecSpec(name="int8", max_shift=0), 10_000) == ()


def test_small_values_keep_their_mean() -> None:
    grid = ClipGrid(1.0, 8, 100_000)
    change = np.full(100_000, 100_000**-0.5, np.float32)
    mean = float(np.mean(grid.clipped(change, np.random.default_rng(1)))) * 2.0**grid.exponent
    assert mean == pytest.approx(100_000**-0.5, rel=0.05)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        ClipGrid(1.0, 8, 2).clipped(np.array([0, value], np.float32), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("clip_norm", "bits", "num_values"), [(0, 8, 1), (np.inf, 8, 1), (1, 1, 1), (1, 33, 1), (1, 8, 0)]
)
def test_a_grid_without_meaning_is_refused(clip_norm: float, bits: int, num_values: int) -> None:
    with pytest.raises(ValueError, match="clip grid"):
        ClipGrid(clip_norm, bits, num_values)
