"""Laws of privacy noise: integer bounds enclose, any slice is a slice of the whole, undecided words are decided
exactly."""

from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fanin.edge.noise.bounds import exp_minus
from fanin.edge.noise.distributions import BLOCK_VALUES, DiscreteGaussian, DiscreteLaplace, Distribution, Skellam, draw
from fanin.edge.noise.inversion import Inversion
from fanin.edge.noise.loss import ORDERS, Loss, loss_of_discrete_gaussian, loss_of_gaussian_shares, loss_of_skellam
from fanin.edge.noise.poisson import poisson_window
from fanin.edge.noise.streams import BlockStream, MoreBits, key_of
from fanin.edge.noise.strips import MARGIN, Energy, StripSampler

SEED = bytes(range(32))
DISTRIBUTIONS: tuple[Distribution, ...] = (
    DiscreteGaussian(Fraction(7, 3)),
    DiscreteGaussian(Fraction(10**9, 7)),
    DiscreteLaplace(Fraction(400)),
    Skellam(Fraction(50)),
)
positives = st.fractions(min_value=Fraction(1, 1000), max_value=10**6, max_denominator=1000)


@given(st.fractions(min_value=0, max_value=200), st.integers(min_value=1, max_value=300))
def test_integer_bounds_enclose_the_exponential(exponent: Fraction, bits: int) -> None:
    low, high = exp_minus(exponent.numerator, exponent.denominator, bits)
    with localcontext() as context:
        context.prec = 200
        exact = (-Decimal(exponent.numerator) / exponent.denominator).exp() * 2**bits
        assert low <= exact + Decimal(10) ** -90
        assert exact - Decimal(10) ** -90 <= high
    assert 0 <= high - low <= 2


@settings(max_examples=30)
@given(st.sampled_from(DISTRIBUTIONS), st.integers(0, 3 * BLOCK_VALUES), st.integers(0, 2 * BLOCK_VALUES))
def test_a_slice_of_noise_needs_no_other_values(distribution: Distribution, start: int, count: int) -> None:
    whole = draw(SEED, distribution, 0, 5 * BLOCK_VALUES)
    assert np.array_equal(draw(SEED, distribution, start, count), whole[start : start + count])


def test_seeds_blocks_and_distributions_have_other_noise() -> None:
    gaussian = DiscreteGaussian(Fraction(10**12))
    draws = [
        draw(SEED, gaussian, 0, 1000),
        draw(SEED, gaussian, BLOCK_VALUES, 1000),
        draw(SEED, DiscreteGaussian(Fraction(10**12 + 1)), 0, 1000),
        draw(bytes(32), gaussian, 0, 1000),
        # The seeds of a peer's masks were folded to 32 bits: these two have the same XOR of their words.
        draw(SEED[4:8] + SEED[:4] + SEED[8:], gaussian, 0, 1000),
    ]
    for index, one in enumerate(draws):
        for other in draws[:index]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.2


@pytest.mark.parametrize("seed", [b"", bytes(31), bytes(33)])
def test_a_seed_of_another_length_is_refused(seed: bytes) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        draw(seed, DISTRIBUTIONS[0], 0, 1)


@pytest.mark.parametrize("parameter", [Fraction(0), Fraction(-1), Fraction(1 << 61), Fraction(1, 3**90)])
def test_a_parameter_out_of_range_is_refused(parameter: Fraction) -> None:
    with pytest.raises(ValueError, match="expected"):
        DiscreteGaussian(parameter)
    with pytest.raises(ValueError, match="expected a Fraction"):
        Skellam(1.5)  # type: ignore[arg-type]


def inversion() -> Inversion:
    """Return a table of a Poisson distribution."""
    return Inversion(lambda bits: poisson_window(Fraction(9, 2), bits))


@given(st.integers(min_value=0, max_value=20))
def test_a_word_on_a_threshold_is_decided_by_the_bits_that_follow(k: int) -> None:
    table = inversion()
    with localcontext() as context:
        context.prec = 120
        mean, term = Decimal("4.5"), (-Decimal("4.5")).exp()
        cumulative = Decimal(0)
        for each in range(k + 1):
            cumulative += term
            term = term * mean / (each + 1)
        bits = int(cumulative * 2**192)
    word, rest = bits >> 128, bits & ((1 << 128) - 1)
    for offset, outcome in ((-1, k), (1, k + 1)):
        # The whole way, through the table of 64 bits: the word is undecided there.
        more = following(rest + offset * 2**20)
        outcomes = table.outcomes(np.array([word], dtype=np.uint64), dict.fromkeys([0], more).__getitem__)
        assert outcomes.tolist() == [outcome]


def following(bits: int) -> MoreBits:
    """Return the 128 bits that follow a word, and zeros behind them."""
    return lambda num_words: bits >> (64 * (2 - num_words)) if num_words <= 2 else bits << (64 * (num_words - 2))


def test_the_largest_word_is_decided_by_the_bits_that_follow() -> None:
    table = inversion()
    last = np.array([2**64 - 1], dtype=np.uint64)
    small = int(table.outcomes(last, lambda index: lambda num_words: 0)[0])
    large = int(table.outcomes(last, lambda index: lambda num_words: (1 << 64 * num_words) - 1 - (num_words > 1))[0])
    assert 25 < small <= large < 200


@settings(max_examples=12, deadline=None)
@given(st.integers(min_value=32, max_value=10**6), st.booleans(), st.data())
def test_the_fixed_point_value_is_off_by_less_than_its_margin(scale: int, is_square: bool, data: st.DataObject) -> None:
    unit = Fraction(1, 2 * scale**2) if is_square else Fraction(1, scale)
    sampler = StripSampler(Energy(unit=unit, square=int(is_square), linear=int(not is_square), scale=scale))
    strips = data.draw(st.lists(st.integers(0, sampler._num_strips - 1), min_size=1, max_size=20))
    places = [data.draw(st.integers(0, sampler.width - 1)) for _ in strips]
    values = sampler._fixed_acceptances(np.array(strips, dtype=np.int64), np.array(places, dtype=np.int64))
    for strip, place, value in zip(strips, places, values.tolist(), strict=True):
        low, high = sampler._acceptance(strip, place, 32)
        assert low - MARGIN < value < high + MARGIN


def test_the_words_of_a_candidate_are_the_same_in_any_batches() -> None:
    key = key_of(SEED, "x")
    whole = BlockStream(key, 3).next_words(100)
    stream = BlockStream(key, 3)
    parts = np.concatenate([stream.next_words(7), stream.next_words(93)])
    assert np.array_equal(whole, parts)


@given(positives, positives)
def test_losses_add_up_and_epsilon_grows(first: Fraction, second: Fraction) -> None:
    one, other = Loss(rho=first / 10**6), Loss(rho=second / 10**6, xi=second / 10**7)
    assert one + other == other + one
    assert one + one == one * 2
    assert (one + other).epsilon(1e-6) >= max(one.epsilon(1e-6), other.epsilon(1e-6)) > 0
    assert Loss().epsilon(1e-6) == 0
    assert list(ORDERS) == sorted(set(ORDERS))


@given(st.integers(1, 10**6), positives)
def test_no_noise_of_devices_is_cheaper_than_a_discrete_gaussian(squared: int, variance: Fraction) -> None:
    gaussian = loss_of_discrete_gaussian(squared, variance)
    for loss in (
        loss_of_skellam(squared, squared, variance),
        loss_of_gaussian_shares(squared, variance / 10, 10, 1000),
    ):
        assert loss.rho >= gaussian.rho
