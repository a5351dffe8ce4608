"""Accounting against dp-accounting called directly, published numbers, and exact divergences of the discrete
mechanisms."""

import math
import sys
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from scipy import special

from fanin.edge.noise.loss import (
    Loss,
    loss_of_discrete_gaussian,
    loss_of_gaussian_shares,
    loss_of_skellam,
    total,
)
from fanin.edge.tensors import Float64s
from fanin.protos.errors import InvalidInput, RuntimeMissing
from fanin.server.privacy.accounting import LEAST_EPSILON, RDP_ORDERS, delta, epsilon
from fanin.server.privacy.releases import GaussianRelease, NoisedSum, PlainRelease, Release, SampledRelease

GRID = ((1000, 0.01, 0.76, 1e-6), (100, 0.1, 0.5, 1e-8), (1000, 0.001, 0.8, 1e-8), (50, 0.2, 3.0, 1 / 48_000))
"""(steps, sampling rate, noise multiplier, delta), after the tests of pfl-research and a report to Opacus."""


def sampled(noise_multiplier: float, sampling_rate: float) -> SampledRelease:
    """Return a release of one noised sum on a grid of 1,000 steps a clip norm."""
    noised = NoisedSum(squared_sensitivity=10**6, parameter=Fraction(noise_multiplier) ** 2 * 10**6)
    return SampledRelease(sums=(noised,), sampling_rate=sampling_rate)


def event(noise_multiplier: float, sampling_rate: float) -> dp_accounting.DpEvent:
    """Return the event of a Gaussian of real numbers."""
    return dp_accounting.PoissonSampledDpEvent(sampling_rate, dp_accounting.GaussianDpEvent(noise_multiplier))


@pytest.mark.parametrize(
    ("steps", "rate", "multiplier", "target"),
    [*(pytest.param(*row, marks=pytest.mark.nightly) for row in GRID[:-1]), GRID[-1]],
)
def test_equal_to_dp_accounting_called_directly(steps: int, rate: float, multiplier: float, target: float) -> None:
    by_pld = pld.PLDAccountant().compose(event(multiplier, rate), steps)
    real = [(GaussianRelease(noise_multiplier=multiplier, sampling_rate=rate), steps)]
    assert by_pld.get_epsilon(target) <= epsilon(real, target) <= by_pld.get_epsilon(target) * (1 + 1e-8)
    assert by_pld.get_delta(1.0) <= delta(real, 1.0) <= by_pld.get_delta(1.0) * (1 + 1e-8)
    by_rdp = rdp.RdpAccountant(orders=RDP_ORDERS).compose(event(multiplier, rate), steps)
    discrete = [(sampled(multiplier, rate), steps)]
    assert by_rdp.get_epsilon(target) <= epsilon(discrete, target) <= by_rdp.get_epsilon(target) * (1 + 1e-8)
    assert by_rdp.get_delta(1.0) <= delta(discrete, 1.0) <= by_rdp.get_delta(1.0) * (1 + 1e-8)
    # RDP is the weaker bound.
    assert by_pld.get_epsilon(target) < by_rdp.get_epsilon(target) < 3 * by_pld.get_epsilon(target)


def test_the_published_delta_of_the_fourier_accountant() -> None:
    """The README of DPBayes/PLD-Accountant: sigma 4, q 0.01, 10,000 compositions, epsilon 1, add or remove."""
    exact = 4.243484012034273e-06
    assert exact <= delta([(GaussianRelease(noise_multiplier=4, sampling_rate=0.01), 10_000)], 1.0) <= exact * 1.003
    assert delta([(sampled(4, 0.01), 10_000)], 1.0) >= exact


def test_the_published_epsilons_of_opacus() -> None:
    """pytorch/opacus#643: sigma 3, q 0.2, 50 steps, delta 1/48000: 2.16 by RDP, 1.83 by the optimistic GDP."""
    assert epsilon([(sampled(3, 0.2), 50)], 1 / 48_000) == pytest.approx(2.16, abs=0.02)
    assert epsilon([(GaussianRelease(noise_multiplier=3, sampling_rate=0.2), 50)], 1 / 48_000) > 1.83


def test_the_published_delta_of_the_analytic_gaussian() -> None:
    """The tests of pfl-research: epsilon 2.25 and delta 4.0834087e-4 need a noise multiplier of sqrt(2)."""
    # Twice the multiplier in four releases is the same.
    for multiplier, count in ((math.sqrt(2), 1), (2 * math.sqrt(2), 4)):
        measured = delta([(GaussianRelease(noise_multiplier=multiplier), count)], 2.25)
        assert measured == pytest.approx(4.0834087e-4, rel=1e-3)
    assert delta([(PlainRelease(loss=loss_of_discrete_gaussian(1, Fraction(2))), 1)], 2.25) > 4.0834087e-4


def test_an_epsilon_is_never_zero_by_rounding() -> None:
    """tensorflow/privacy#166: sigma 1, q 105/1e5, one step, delta 1e-3 gave 0 for an order of 1 + 1e-8."""
    exact = pld.PLDAccountant().compose(event(1.0, 105 / 1e5), 1).get_epsilon(1e-3)
    for release in (sampled(1.0, 105 / 1e5), GaussianRelease(noise_multiplier=1.0, sampling_rate=105 / 1e5)):
        assert epsilon([(release, 1)], 1e-3) >= max(exact, LEAST_EPSILON) > 0
    tiny = PlainRelease(loss=loss_of_discrete_gaussian(1, Fraction(10**18)))
    assert epsilon([(tiny, 1)], 0.5) >= LEAST_EPSILON


def log_gaussian(values: Float64s, parameter: float) -> Float64s:
    """Return the log probabilities of a discrete Gaussian."""
    logs = -(values**2) / (2 * parameter)
    return np.asarray(logs - special.logsumexp(logs))


def divergence(order: float, first: Float64s, second: Float64s) -> float:
    """Return the Renyi divergence of two distributions of log probabilities."""
    return float(special.logsumexp(order * first - (order - 1) * second) / (order - 1))


def hockey_stick(first: Float64s, second: Float64s, level: float) -> float:
    """Return the delta of an epsilon."""
    return float(np.sum(np.maximum(np.exp(first) - math.exp(level) * np.exp(second), 0)))


@pytest.mark.parametrize("parameter", [0.3, 1.0, 30.0])
@pytest.mark.parametrize("rate", [0.01, 0.3])
@pytest.mark.parametrize("vector", [(1,), (3,), (1, 1), (2, -1)])
def test_sampled_discrete_gaussians_lose_what_gaussians_of_real_numbers_lose(
    parameter: float, rate: float, vector: tuple[int, ...]
) -> None:
    """The claim of the docs: integer orders, both directions, and vectors."""
    axis = np.arange(-700.0, 701.0) if len(vector) == 1 else np.arange(-70.0, 71.0)
    if len(vector) > 1 and parameter > 1:
        axis = np.arange(-200.0, 201.0)
    base, moved = np.zeros(()), np.zeros(())
    for shift in vector:
        base = np.add.outer(base, log_gaussian(axis, parameter))
        moved = np.add.outer(moved, log_gaussian(axis - shift, parameter))
    mixed = np.logaddexp(math.log1p(-rate) + base, math.log(rate) + moved)
    norm = math.hypot(*vector)
    for order in (2, 3, 5, 8):
        bound = rdp.RdpAccountant(orders=[order]).compose(event(math.sqrt(parameter) / norm, rate)).rdp[0]
        forward, backward = divergence(order, mixed, base), divergence(order, base, mixed)
        assert backward <= bound * (1 + 1e-9)
        assert forward == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize(("parameter", "shift"), [(1.0, 1), (9.0, 2), (400.0, 10)])
@pytest.mark.parametrize("rate", [0.05, 1.0])
def test_delta_is_above_the_exact_one(parameter: float, shift: int, rate: float) -> None:
    values = np.arange(-1500.0, 1501.0)
    base, moved = log_gaussian(values, parameter), log_gaussian(values - shift, parameter)
    noised = NoisedSum(squared_sensitivity=shift**2, parameter=Fraction(parameter))
    release: Release = PlainRelease(loss=noised.loss)
    if rate < 1:
        release = SampledRelease(sums=(noised,), sampling_rate=rate)
        moved = np.logaddexp(math.log1p(-rate) + base, math.log(rate) + moved)
    for level in (0.1, 0.5, 1.0, 2.0):
        exact = max(hockey_stick(base, moved, level), hockey_stick(moved, base, level))
        assert delta([(release, 1)], level) >= exact
        if exact > 1e-12:
            assert epsilon([(release, 1)], exact) >= level


@pytest.mark.parametrize("variance", [2.0, 10.0, 100.0, 5000.0])
@pytest.mark.parametrize("shift", [1, 2, 5])
def test_the_loss_of_skellam_is_above_the_exact_one(variance: float, shift: int) -> None:
    values = np.arange(-1200.0, 1201.0)
    with np.errstate(divide="ignore"):
        base = np.log(special.ive(np.abs(values), variance))
        moved = np.log(special.ive(np.abs(values - shift), variance))
    is_known = np.isfinite(base) & np.isfinite(moved)
    loss = loss_of_skellam(shift**2, shift, Fraction(variance))
    for order in (2, 3, 8, 16):
        exact = divergence(order, base[is_known], moved[is_known])
        assert exact <= order * float(loss.rho) + float(loss.xi)


@pytest.mark.parametrize("parameter", [0.2, 0.5, 2.0])
def test_the_loss_of_shares_is_above_the_exact_one(parameter: float) -> None:
    """Three devices add a discrete Gaussian each: the sum is none, as its divergence shows for a small parameter."""
    values = np.arange(-40.0, 41.0)
    one = np.exp(log_gaussian(values, parameter))
    sums = np.convolve(np.convolve(one, one), one)
    logs = np.log(sums[sums > 1e-280])
    loss = loss_of_gaussian_shares(1, Fraction(parameter), 3, 1)
    for order in (2, 3, 5):
        exact = divergence(order, logs[1:], logs[:-1])
        assert exact <= order * float(loss.rho) + float(loss.xi)
    assert loss.rho >= loss_of_discrete_gaussian(1, 3 * Fraction(parameter)).rho


def test_the_closed_form_of_devices_agrees_with_dp_accounting() -> None:
    losses = loss_of_discrete_gaussian(1, Fraction(16)), loss_of_skellam(100, 100, Fraction(3000))
    for loss in (*losses, losses[0] * 200 + losses[1]):
        ours, theirs = loss.epsilon(1e-6), epsilon([(PlainRelease(loss=loss), 1)], 1e-6)
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_divergence_that_rounds_to_zero_is_charged() -> None:
    """With a tiny rate and much noise, the library's divergences are lost in rounding: some are 0."""
    release = sampled(10_000.0, 1e-7)
    lost = rdp.RdpAccountant(orders=RDP_ORDERS).compose(event(10_000.0, 1e-7)).rdp
    assert lost.min() <= 0
    exact = [
        order * 1e-14 / 10_000.0**2 / 2 for order in RDP_ORDERS
    ]  # to first order: order (rate / multiplier)**2 / 2
    assert epsilon([(release, 10**9)], 1e-6) >= rdp.compute_epsilon(RDP_ORDERS, np.array(exact) * 10**9, 1e-6)[0]
    assert delta([(release, 10**9)], 0.0) > 0


def test_a_ledger_of_many_different_releases_is_fast() -> None:
    """Adaptive clipping has another sensitivity in each Round, and often the same noise multiplier."""
    many = [
        SampledRelease(
            sums=(NoisedSum(squared_sensitivity=1000 + number, parameter=Fraction(1000 + number) * 4),),
            sampling_rate=0.01,
        )
        for number in range(2000)
    ]
    assert epsilon([(each, 1) for each in many], 1e-6) == pytest.approx(epsilon([(sampled(2.0, 0.01), 2000)], 1e-6))
    losses = [loss_of_discrete_gaussian(1, Fraction(10**9 + number, 7 + number)) for number in range(2000)]
    whole = total(losses)
    assert whole.rho.denominator <= 1 << 256
    assert whole.rho == pytest.approx(sum(float(each.rho) for each in losses))


def test_epsilon_grows_with_each_release_and_does_not_depend_on_the_order() -> None:
    releases: list[Release] = [
        sampled(1.2, 0.01),
        PlainRelease(loss=loss_of_discrete_gaussian(1, Fraction(400))),
        GaussianRelease(noise_multiplier=30.0),
        sampled(1.2, 0.01),
    ]
    spent = 0.0
    for number in range(1, len(releases) + 1):
        now = epsilon([(each, 1) for each in releases[:number]], 1e-6)
        assert now > spent
        spent = now
    assert epsilon([(each, 1) for each in reversed(releases)], 1e-6) == pytest.approx(spent)
    assert epsilon([(releases[0], 2), *((each, 1) for each in releases[1:3])], 1e-6) == pytest.approx(spent)


def test_sums_of_one_draw_are_one_release() -> None:
    """Two sums of one sample lose more than two samples of one sum each: the amplification is claimed once."""
    noised = NoisedSum(squared_sensitivity=1, parameter=Fraction(1))
    joint = SampledRelease(sums=(noised, noised), sampling_rate=0.01)
    assert joint.noise_multiplier == pytest.approx(math.sqrt(0.5), rel=1e-15)
    single = SampledRelease(sums=(noised,), sampling_rate=0.01)
    assert epsilon([(joint, 100)], 1e-6) > epsilon([(single, 200)], 1e-6)


def test_nothing_released_costs_nothing() -> None:
    assert epsilon([], 1e-6) == delta([], 1.0) == 0
    assert epsilon([(sampled(1.0, 0.1), 0)], 1e-6) == 0
    silent = SampledRelease(sums=(NoisedSum(squared_sensitivity=0, parameter=Fraction(1)),), sampling_rate=0.5)
    assert epsilon([(silent, 5)], 1e-6) == LEAST_EPSILON


@pytest.mark.parametrize("wrong", [0.0, 1.0, -0.1, math.nan])
def test_a_wrong_delta_is_refused(wrong: float) -> None:
    with pytest.raises(InvalidInput) as failure:
        epsilon([], wrong)
    assert failure.value.code == "FN-1650"
    with pytest.raises(ValueError, match="between 0 and 1"):
        Loss(rho=Fraction(1)).epsilon(wrong)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(RuntimeMissing) as failure:
        epsilon([(sampled(1.0, 0.1), 1)], 1e-6)
    assert failure.value.code == "FN-1652"
