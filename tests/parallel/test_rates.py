"""The rate of each step: a function of its number, the batch and the rule."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.datacenter.rates import RateSettings, rates_of


@pytest.mark.parametrize(
    ("scale", "peak", "warm_steps"), [("none", 0.1, 8), ("linear", 0.4, 2), ("sqrt", 0.2, 2), ("legw", 0.2, 8)]
)
def test_a_batch_of_four_times_the_size(scale: str, peak: float, warm_steps: int) -> None:
    base = 0 if scale == "none" else 8
    rates = rates_of(RateSettings(scale=scale, base_batch=base, warm_up=8), 0.1, 32, 100)
    assert rates.peak == pytest.approx(peak)
    assert rates.warm_steps == warm_steps


def test_it_rises_and_falls() -> None:
    rates = rates_of(RateSettings(warm_up=4, decay="cosine", floor=0.1), 1.0, 8, 25)
    assert [rates.at(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates.at(14) == pytest.approx(0.55)
    assert rates.at(24) == pytest.approx(0.1)
    assert rates.at(99) == pytest.approx(0.1), "past its end it stays"


@given(warm_up=st.integers(0, 9), floor=st.floats(0.0, 1.0), num_steps=st.integers(1, 99))
def test_it_never_leaves_its_bounds_and_never_rises_again(warm_up: int, floor: float, num_steps: int) -> None:
    rates = rates_of(RateSettings(warm_up=warm_up, decay="cosine", floor=floor), 2.0, 8, num_steps)
    found = [rates.at(step) for step in range(num_steps)]
    assert all(0.0 <= rate <= 2.0 for rate in found)
    rest = found[rates.warm_steps :]
    assert all(later <= earlier for earlier, later in pairwise(rest))
    assert all(rate >= 2.0 * floor - 1e-12 for rate in rest)
