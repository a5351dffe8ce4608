"""Samples of privacy noise against exact probabilities, samples of OpenDP and scipy's Poisson variables.

All seeds are fixed, and so are the samples of OpenDP (``golden/make_opendp.py``).
"""

import json
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from house.tree import ROOT
from scipy import stats

from fanin.edge.noise.distributions import DiscreteGaussian, DiscreteLaplace, Distribution, Skellam, draw, reach
from fanin.edge.tensors import Float64s, Int64s

SEED = b"privacy noise".ljust(32, b"\0")
OPENDP = json.loads((ROOT / "tests" / "golden" / "opendp.json").read_text())
LEAST_PROBABILITY = 1e-4
"""Below this probability, a fixed seed draws a sample like ours by chance."""


def probabilities(distribution: Distribution, values: Int64s) -> Float64s:
    """Return exact probabilities up to the rounding of float64, from the formulas of the papers."""
    match distribution:
        case DiscreteGaussian(parameter):
            weights = np.exp(-(values.astype(np.float64) ** 2) / (2 * float(parameter)))
        case DiscreteLaplace(scale):
            weights = np.exp(-np.abs(values) / float(scale))
        case Skellam(variance):
            return np.asarray(stats.skellam.pmf(values, float(variance) / 2, float(variance) / 2))
    return np.asarray(weights / weights.sum())


def bins(distribution: Distribution, deviation: float) -> tuple[Int64s, Float64s]:
    """Return the last values of at most 100 bins of about equal probability, and the probabilities."""
    reach = math.ceil(12 * deviation) + 10
    values = np.arange(-reach, reach + 1)
    shares = probabilities(distribution, values)
    cumulative = np.cumsum(shares)
    cuts = np.unique(np.searchsorted(cumulative, np.linspace(0, 1, 101)[1:-1]))
    starts = np.concatenate([[0], cuts + 1])
    return values[cuts], np.add.reduceat(shares, starts)


def counts(samples: Int64s, last_values: Int64s) -> npt.NDArray[np.intp]:
    """Return the number of samples in each bin."""
    return np.bincount(np.searchsorted(last_values, samples), minlength=len(last_values) + 1)


CASES: list[tuple[Distribution, float]] = [
    (DiscreteGaussian(Fraction(1, 4)), 0.5),
    (DiscreteGaussian(Fraction(1)), 1.0),
    (DiscreteGaussian(Fraction(10**6, 3)), 577.4),
    (DiscreteGaussian(Fraction(3 * 10**8)), 17_320.0),
    (DiscreteLaplace(Fraction(1, 2)), 1.0),
    (DiscreteLaplace(Fraction(10_000)), 14_142.0),
    (Skellam(Fraction(1)), 1.0),
    (Skellam(Fraction(40_000)), 200.0),
]


@pytest.mark.parametrize(("distribution", "deviation"), CASES, ids=lambda case: getattr(case, "name", ""))
def test_samples_fit_the_exact_probabilities(distribution: Distribution, deviation: float) -> None:
    num_samples = 1_000_000
    last_values, shares = bins(distribution, deviation)
    observed = counts(draw(SEED, distribution, 0, num_samples), last_values)
    assert stats.chisquare(observed, shares * num_samples).pvalue > LEAST_PROBABILITY


@pytest.mark.nightly
@pytest.mark.parametrize(("distribution", "deviation"), CASES, ids=lambda case: getattr(case, "name", ""))
def test_many_samples_fit_the_exact_probabilities(distribution: Distribution, deviation: float) -> None:
    num_samples = 100_000_000
    last_values, shares = bins(distribution, deviation)
    step = 1 << 22
    observed = sum(
        counts(draw(SEED, distribution, start, min(step, num_samples - start)), last_values)
        for start in range(0, num_samples, step)
    )
    assert stats.chisquare(observed, shares * num_samples).pvalue > LEAST_PROBABILITY


def test_a_sample_with_slightly_less_noise_does_not_fit() -> None:
    """See the test fail: a variance that is 2 % too small is detected."""
    last_values, shares = bins(DiscreteGaussian(Fraction(10**6)), 1000.0)
    observed = counts(draw(SEED, DiscreteGaussian(Fraction(980_000)), 0, 1_000_000), last_values)
    assert stats.chisquare(observed, shares * 1_000_000).pvalue < 1e-6


@pytest.mark.nightly
def test_tails_are_there() -> None:
    """A sampler with 32 bits of uniform numbers has no value beyond 6.2 standard deviations."""
    samples = draw(SEED, DiscreteGaussian(Fraction(10**8)), 0, 20_000_000)
    beyond = int((np.abs(samples) > 50_000).sum())
    assert stats.poisson(20_000_000 * 2 * stats.norm.sf(5)).interval(1 - 1e-4)[0] <= beyond
    assert beyond <= stats.poisson(20_000_000 * 2 * stats.norm.sf(5)).interval(1 - 1e-4)[1]


@pytest.mark.parametrize(("distribution", "deviation"), CASES, ids=lambda case: getattr(case, "name", ""))
@pytest.mark.parametrize("bits", [4, 20, 40])
def test_values_beyond_the_reach_are_as_rare_as_it_says(
    distribution: Distribution, deviation: float, bits: int
) -> None:
    limit = reach(distribution, bits)
    values = np.arange(-math.ceil(60 * deviation) - 100, math.ceil(60 * deviation) + 101)
    exact = probabilities(distribution, values)[np.abs(values) > limit].sum()
    assert exact <= 2.0**-bits
    # And it is not a multiple of what is needed, but for a few steps of narrow distributions.
    assert deviation < 10 or probabilities(distribution, values)[np.abs(values) > limit / 2].sum() > 2.0**-bits


def test_neighbouring_values_are_independent() -> None:
    samples = draw(SEED, DiscreteGaussian(Fraction(10**10)), 0, 1_000_000)
    for lag in (1, 2, 3, 32_768):
        correlation = np.corrcoef(samples[:-lag], samples[lag:])[0, 1]
        assert abs(correlation) < 5 / math.sqrt(len(samples) - lag)


@pytest.mark.parametrize("row", OPENDP, ids=lambda row: f"{row['kind']} {row['scale']}")
def test_opendp_draws_from_the_same_distributions(row: Mapping[str, Any]) -> None:
    theirs = np.array(row["counts"])
    assert (
        chance_of_one_distribution(bins_of(samples_like(row, Fraction(row["scale"])), row), theirs) > LEAST_PROBABILITY
    )
    # See it fail: OpenDP's samples differ from those of a scale that is 5 % larger.
    assert chance_of_one_distribution(bins_of(samples_like(row, Fraction(row["scale"] * 1.05)), row), theirs) < 1e-9


def samples_like(row: Mapping[str, Any], scale: Fraction) -> Int64s:
    """Return samples of the distribution of a row, with another scale."""
    distribution = DiscreteGaussian(scale**2) if row["kind"] == "gaussian" else DiscreteLaplace(scale)
    return draw(SEED, distribution, 0, 1_000_000)


def bins_of(samples: Int64s, row: Mapping[str, Any]) -> npt.NDArray[np.intp]:
    """Return the number of samples in each bin of a row. The outer bins have the values beyond them."""
    last = len(row["counts"]) - 1
    return np.bincount(np.clip(samples // row["width"] - row["first"], 0, last), minlength=last + 1)


def chance_of_one_distribution(ours: npt.NDArray[np.intp], theirs: npt.NDArray[np.intp]) -> float:
    """Return the p-value of both histograms having one distribution. Bins with few samples are not counted."""
    table = np.array([ours, theirs])[:, theirs >= 20]
    return float(stats.chi2_contingency(table).pvalue)


@pytest.mark.parametrize("variance", [2, 5_000, 1 << 28])
def test_skellam_has_the_moments_of_two_poisson_variables(variance: int) -> None:
    num_samples = 400_000
    rng = np.random.default_rng(5)
    poisson = stats.poisson(variance / 2)
    reference = poisson.rvs(num_samples, random_state=rng) - poisson.rvs(num_samples, random_state=rng)
    samples = draw(SEED, Skellam(Fraction(variance)), 0, num_samples)
    deviation = math.sqrt(variance)
    for power, spread in ((1, 1.0), (2, 2.0 + 1 / variance), (3, 15.0 + 30 / variance), (4, 96.0 + 200 / variance)):
        difference = np.mean((samples / deviation) ** power) - np.mean((reference / deviation) ** power)
        assert abs(difference) < 5 * math.sqrt(2 * spread / num_samples)
    exact = np.array([0, variance, 0, 3 * variance**2 + variance]) / deviation ** np.arange(1, 5)
    measured = np.array([np.mean((samples / deviation) ** power) for power in range(1, 5)])
    assert np.allclose(measured, exact, atol=5 * math.sqrt((96 + 200 / variance) / num_samples))


def test_the_sum_of_shares_has_the_variance_of_all() -> None:
    shares = [draw(bytes([number]) * 32, Skellam(Fraction(100, 8)), 0, 200_000) for number in range(8)]
    last_values, probabilities_of_bins = bins(Skellam(Fraction(100)), 10.0)
    observed = counts(np.sum(shares, axis=0), last_values)
    assert stats.chisquare(observed, probabilities_of_bins * 200_000).pvalue > LEAST_PROBABILITY
