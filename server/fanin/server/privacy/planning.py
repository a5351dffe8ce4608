"""The plan of a privacy budget: the noise that each mechanism needs, and epsilon over the Rounds.

A *noise multiplier* is the standard deviation of all noise in a sum, divided by the L2 sensitivity. Mechanisms with
the same noise multiplier add the same noise to a model, so the multipliers of a plan can be compared.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from types import MappingProxyType
from typing import Final, Literal

from fanin.edge.noise.distributions import MAX_SKELLAM_VARIANCE, MAX_VARIANCE
from fanin.edge.noise.loss import loss_of_gaussian_shares, loss_of_skellam
from fanin.protos.errors import InvalidInput
from fanin.server.privacy.accounting import epsilon
from fanin.server.privacy.calibration import LEAST_NOISE_MULTIPLIER, MAX_NOISE_MULTIPLIER, least_noise_multiplier
from fanin.server.privacy.releases import GaussianRelease, NoisedSum, PlainRelease, Release, SampledRelease

Sampling = Literal["coins", "none"]
MAX_EPSILON: Final = 100
"""A larger one promises nothing."""
ROUNDS_PER_DECADE: Final = (1, 2, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyBudget:
    """What a Run may spend, and on how many Rounds of which devices.

    Attributes:
        epsilon: Above 0; None if the noise is given.
        noise_multiplier: The noise of the Run, whose epsilon is in question; None to find the noise for ``epsilon``.
        delta: Above 0, and at most 1 / population.
        num_rounds: Rounds of the Run.
        cohort: Devices of a Round; with coins, their expected number.
        population: Devices of the frozen roster.
        sampling: ``coins``: each device takes part by an independent coin. ``none``: no amplification is claimed.
        norm_bound: L2 norm of a clipped Update, in steps of the grid.
        num_values: Trained parameters.
        survivors: The least number of devices whose noise is in a sum, for mechanisms with noise on devices.
    """

    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float
    num_rounds: int
    cohort: int
    population: int
    sampling: Sampling = "none"
    norm_bound: int = 4096
    num_values: int = 1_000_000
    survivors: int = 0

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            received = (
                "neither epsilon nor noise multiplier" if self.epsilon is None else "epsilon and noise multiplier"
            )
            raise InvalidInput(
                f"privacy budget: got {received}, expected one: epsilon to find noise, or noise to find epsilon",
                code="FN-1651",
            )
        if self.epsilon is not None and not 0 < self.epsilon <= MAX_EPSILON:
            raise InvalidInput(
                f"epsilon: got {self.epsilon:g}, expected a number above 0 and at most {MAX_EPSILON}", code="FN-1651"
            )
        least, most = LEAST_NOISE_MULTIPLIER, MAX_NOISE_MULTIPLIER
        if self.noise_multiplier is not None and not least <= self.noise_multiplier <= most:
            raise InvalidInput(
                f"noise multiplier: got {self.noise_multiplier:g}, expected a number from {least} to {most:,}",
                code="FN-1651",
            )
        if not 1 <= self.cohort <= self.population:
            raise InvalidInput(
                f"cohort: got {self.cohort:,} devices of a population of {self.population:,}, expected from 1 to the "
                "population; name a smaller cohort",
                code="FN-1655",
            )
        if not 0 < self.delta < 1 or self.delta > 1 / self.population:
            raise InvalidInput(
                f"delta: got {self.delta:g}, expected a number above 0 and at most 1 / population = "
                f"{1 / self.population:g}; a larger one allows a mechanism that publishes the data of a device",
                code="FN-1650",
            )
        if self.num_rounds < 1 or self.norm_bound < 1 or self.num_values < 1:
            raise InvalidInput(
                f"privacy budget: got {self.num_rounds} Rounds, a norm bound of {self.norm_bound} and "
                f"{self.num_values} values, expected at least 1 of each",
                code="FN-1655",
            )
        if not 0 <= self.survivors <= self.cohort:
            raise InvalidInput(
                f"survivors: got {self.survivors:,} of a cohort of {self.cohort:,}, expected at most the cohort",
                code="FN-1655",
            )

    @property
    def sampling_rate(self) -> float:
        """Probability that a device takes part in a Round, as the accounting claims it."""
        return self.cohort / self.population if self.sampling == "coins" else 1.0

    @property
    def noise_devices(self) -> int:
        """Devices whose noise counts: the least number of survivors, by default the cohort."""
        return self.survivors or self.cohort


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyMechanism:
    """A way to add noise.

    Attributes:
        summary: Noun phrase for tables.
        is_sampled: Whether coins amplify it.
        max_sigma: Largest standard deviation that its sampler draws, in steps of the grid.
        release: The release of one Round, for a noise multiplier.
    """

    summary: str
    is_sampled: bool
    max_sigma: float
    release: Callable[[PrivacyBudget, float], Release]


def _central(budget: PrivacyBudget, noise_multiplier: float) -> Release:
    squared = budget.norm_bound**2
    noised = NoisedSum(squared_sensitivity=squared, parameter=Fraction(noise_multiplier) ** 2 * squared)
    if budget.sampling_rate < 1:
        return SampledRelease(sums=(noised,), sampling_rate=budget.sampling_rate)
    return PlainRelease(loss=noised.loss)


def _skellam(budget: PrivacyBudget, noise_multiplier: float) -> Release:
    squared = budget.norm_bound**2
    # The L1 norm of a vector is at most sqrt(values) times its L2 norm.
    l1 = min(squared, math.isqrt(budget.num_values * squared) + 1)
    return PlainRelease(loss=loss_of_skellam(squared, l1, Fraction(noise_multiplier) ** 2 * squared))


def _gaussian_shares(budget: PrivacyBudget, noise_multiplier: float) -> Release:
    squared = budget.norm_bound**2
    share = Fraction(noise_multiplier) ** 2 * squared / budget.noise_devices
    return PlainRelease(loss=loss_of_gaussian_shares(squared, share, budget.noise_devices, budget.num_values))


def _real(budget: PrivacyBudget, noise_multiplier: float) -> Release:
    return GaussianRelease(noise_multiplier=noise_multiplier, sampling_rate=budget.sampling_rate)


MECHANISMS: Final[Mapping[str, PrivacyMechanism]] = MappingProxyType(
    {
        "central": PrivacyMechanism(
            summary="discrete Gaussian of the coordinator",
            is_sampled=True,
            max_sigma=math.sqrt(MAX_VARIANCE),
            release=_central,
        ),
        "skellam": PrivacyMechanism(
            summary="Skellam noise on devices, under masks",
            is_sampled=False,
            max_sigma=math.sqrt(MAX_SKELLAM_VARIANCE),
            release=_skellam,
        ),
        "gaussian-shares": PrivacyMechanism(
            summary="discrete Gaussians on devices, under masks",
            is_sampled=False,
            max_sigma=math.sqrt(MAX_VARIANCE),
            release=_gaussian_shares,
        ),
        "real-gaussian": PrivacyMechanism(
            summary="Gaussian of real numbers by PLD, to compare with; no Run uses it",
            is_sampled=True,
            max_sigma=math.inf,
            release=_real,
        ),
    }
)
"""The mechanisms by name."""
RELEASED: Final = ("central", "skellam", "gaussian-shares")
"""Those that a Run can use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MechanismPlan:
    """What a mechanism needs for a budget.

    Attributes:
        mechanism: Its name.
        noise_multiplier: That of the budget, else the least one, a multiple of 1/1000.
        sigma: Standard deviation of the noise that the coordinator, or each device, draws, in steps of the grid.
        can_draw: Whether the sampler reaches ``sigma``. If not, a coarser grid or more survivors help.
        mean_noise: Standard deviation of the noise in each value of the mean, in units of the clip norm.
        epsilons: (Rounds, epsilon) after 1, 2, 5, 10, ... Rounds, and after all.
    """

    mechanism: str
    noise_multiplier: float
    sigma: float
    can_draw: bool
    mean_noise: float
    epsilons: tuple[tuple[int, float], ...]


def mechanism_of(name: str) -> PrivacyMechanism:
    """Return a mechanism by name.

    Raises:
        InvalidInput: There is none; the message names the nearest one.
    """
    mechanism = MECHANISMS.get(name)
    if mechanism is None:
        near = get_close_matches(name, MECHANISMS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InvalidInput(f"mechanism: got {name!r}, expected one of {', '.join(MECHANISMS)}{hint}", code="FN-1654")
    return mechanism


def plan_mechanism(name: str, budget: PrivacyBudget) -> MechanismPlan:
    """Return the noise that a mechanism needs for a budget.

    Raises:
        InvalidInput: The mechanism is unknown, or no noise multiplier satisfies the budget.
        RuntimeMissing: The extra ``privacy`` is not installed.
    """
    mechanism = mechanism_of(name)

    def spent(noise_multiplier: float, num_rounds: int) -> float:
        return epsilon([(mechanism.release(budget, noise_multiplier), num_rounds)], budget.delta)

    multiplier = budget.noise_multiplier
    if multiplier is None:
        assert budget.epsilon is not None
        multiplier = least_noise_multiplier(lambda each: spent(each, budget.num_rounds), budget.epsilon)
    sigma = multiplier * budget.norm_bound
    if not mechanism.is_sampled:
        sigma /= math.sqrt(budget.noise_devices)
    return MechanismPlan(
        mechanism=name,
        noise_multiplier=multiplier,
        sigma=sigma,
        can_draw=sigma <= mechanism.max_sigma,
        mean_noise=multiplier / budget.cohort,
        epsilons=tuple((rounds, spent(multiplier, rounds)) for rounds in _shown_rounds(budget.num_rounds)),
    )


def _shown_rounds(num_rounds: int) -> Sequence[int]:
    """Return 1, 2, 5, 10, 20, 50, ... below a number of Rounds, and the number."""
    decades = range(len(str(num_rounds)))
    shown = [step * 10**decade for decade in decades for step in ROUNDS_PER_DECADE]
    return [*(rounds for rounds in shown if rounds < num_rounds), num_rounds]
