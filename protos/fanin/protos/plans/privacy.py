"""The section ``privacy`` of a Plan: the mechanism of differential privacy, its noise, and the budget of a population.

All that devices send in a Run with a mechanism is either part of the noised sum or is not sent at all. So the section
excludes the keys that would make a device send more, or that would give its Update another weight.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Final

from fanin.protos.errors import InvalidPlan
from fanin.protos.names import NAME_FORM, is_name
from fanin.protos.plans.cohort import CohortPlan
from fanin.protos.plans.keys import Key, keys_of, range_problem, shown
from fanin.protos.plans.participants import ParticipantsPlan
from fanin.protos.plans.sections import MAX_COUNT, MAX_TIMES

PAGE: Final = "../howto/differential-privacy.md"
CENTRAL: Final = "central"
SKELLAM: Final = "skellam"
GAUSSIAN_SHARES: Final = "gaussian-shares"
MECHANISMS: Final = ("", CENTRAL, SKELLAM, GAUSSIAN_SHARES)
NO_SAMPLING: Final = "none"
COINS: Final = "coins"
MIN_NOISE_MULTIPLIER: Final = 0.1
"""Less noise hides nothing: the epsilon of one release is above 90."""
MAX_NOISE_MULTIPLIER: Final = 1000.0
"""The sampler draws it on each grid of a clip norm (``fanin.edge.noise``)."""
MAX_EPSILON: Final = 100.0
"""A larger one promises nothing."""
MIN_CLIP_NORM: Final = 2.0**-126
MAX_CLIP_NORM: Final = 2.0**127
"""Range of a clip norm: that of float32, in which devices compute their changes."""
BITS_SHARE: Final = 20
"""The default noise of the clip bits is the number of devices divided by this (Andrew et al. 2021, section 3.1)."""
MAX_BITS_NOISE: Final = 1e6
"""The sampler draws it."""
DEFAULT_CLIP_RATE: Final = 0.2
LEAST_SHARE: Final = 0.02
"""Least share of a budget that is left for the parameters beside the clip bits: their noise is then at most 7.1 times
that of a clip norm that stays."""
REQUIRED: Final = ("clip_norm", "noise_multiplier", "epsilon", "delta", "population", "population_size")
"""The keys that a mechanism needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyPlan:
    """Differential privacy of the devices of a Run, against readers of its Versions."""

    mechanism: Annotated[
        str,
        Key(
            text="`central`: devices clip their changes, and the coordinator adds discrete Gaussian noise to their "
            "sum. `skellam`, `gaussian-shares`: each device adds a share of the noise under the masks of `secagg`. "
            "Empty: none.",
            choices=MECHANISMS,
            see=PAGE,
        ),
    ] = ""
    clip_norm: Annotated[
        float,
        Key(
            text="Largest L2 norm of a device's change of the trained parameters. A device scales a larger change "
            "down. With `target_quantile`, that of the first Round.",
            at_least=MIN_CLIP_NORM,
            at_most=MAX_CLIP_NORM,
            see=f"{PAGE}#the-clip-norm",
        ),
    ] = 0.0
    noise_multiplier: Annotated[
        float,
        Key(
            text="Standard deviation of the noise in the sum of a Round, divided by the sensitivity. `fanin privacy "
            "plan` computes it.",
            at_least=MIN_NOISE_MULTIPLIER,
            at_most=MAX_NOISE_MULTIPLIER,
            see=PAGE,
        ),
    ] = 0.0
    epsilon: Annotated[
        float,
        Key(
            text="The budget of the population. The Run stops before it is exceeded.",
            above=0,
            at_most=MAX_EPSILON,
            see=f"{PAGE}#read-epsilon",
        ),
    ] = 0.0
    delta: Annotated[
        float,
        Key(
            text="The delta of the budget, at most 1 / `population_size`.", above=0, below=1, see=f"{PAGE}#read-epsilon"
        ),
    ] = 0.0
    population: Annotated[
        str,
        Key(
            text="Name of the ledger. All Runs with this name share its budget, so it names the people or devices, "
            "not the Run.",
            form=NAME_FORM,
            is_valid=is_name,
            see=PAGE,
        ),
    ] = ""
    population_size: Annotated[
        int,
        Key(
            text="Number of devices that the ledger covers, at least.",
            unit="devices",
            at_least=1,
            at_most=MAX_COUNT,
            see=PAGE,
        ),
    ] = 0
    sampling: Annotated[
        str,
        Key(
            text="`none`: no amplification is claimed. `coins`: each device that is enrolled when the Run starts takes "
            "part in a Round by an independent coin.",
            choices=(NO_SAMPLING, COINS),
            see=f"{PAGE}#sampling",
        ),
    ] = NO_SAMPLING
    sampling_rate: Annotated[
        float,
        Key(text="Probability with which a coin of `coins` draws a device.", above=0, below=1, see=f"{PAGE}#sampling"),
    ] = 0.0
    keep_seed_rounds: Annotated[
        int,
        Key(
            text="The seed of the noise and the Updates of so many newest Rounds with a Version are kept, so that "
            "`fanin verify` recomputes these Versions. 0: both are erased after the publication.",
            unit="Rounds",
            at_least=0,
            at_most=MAX_TIMES,
            see=f"{PAGE}#verify",
        ),
    ] = 0

    target_quantile: Annotated[
        float,
        Key(
            text="The clip norm moves from Round to Round towards this quantile of the norms of the devices' changes; "
            "0.5 is their median. 0: it stays.",
            at_least=0,
            below=1,
            see=f"{PAGE}#an-adaptive-clip-norm",
        ),
    ] = 0.0
    clip_learning_rate: Annotated[
        float,
        Key(
            text="With `target_quantile`: a clip norm that is above all changes falls by a factor of exp(this x "
            "(1 - `target_quantile`)) a Round.",
            above=0,
            at_most=1,
            see=f"{PAGE}#an-adaptive-clip-norm",
        ),
    ] = DEFAULT_CLIP_RATE
    bits_noise: Annotated[
        float,
        Key(
            text="With `target_quantile`: standard deviation of the noise in the number of devices whose change is "
            "within the clip norm. Above half of `noise_multiplier`. 0: a twentieth of the devices by which the mean "
            "divides.",
            unit="devices",
            at_least=0,
            at_most=MAX_BITS_NOISE,
            see=f"{PAGE}#an-adaptive-clip-norm",
        ),
    ] = 0.0

    @property
    def is_shared(self) -> bool:
        """Whether devices add the noise, under masks: no seed and no sum without noise is at the coordinator."""
        return self.mechanism in (SKELLAM, GAUSSIAN_SHARES)

    def __post_init__(self) -> None:
        if problem := range_problem(self, "privacy"):
            raise InvalidPlan(f"plan: {problem}", code="FN-0201")
        changed = [key.name for key in keys_of(PrivacyPlan) if getattr(self, key.name) != key.default]
        if changed and not self.mechanism:
            raise InvalidPlan(
                f"plan: privacy: got {changed[0]} without mechanism, expected both; add mechanism, or remove the "
                "section",
                code="FN-1680",
            )
        if missing := [name for name in REQUIRED if self.mechanism and name not in changed]:
            raise InvalidPlan(
                f"plan: privacy: got mechanism {shown(self.mechanism)} without {', '.join(missing)}, expected all of "
                f"{', '.join(REQUIRED)}; add them, docs/howto/differential-privacy.md describes how to choose them",
                code="FN-1680",
            )
        if self.population_size and self.delta > 1 / self.population_size:
            raise InvalidPlan(
                f"plan: privacy.delta: got {self.delta:g} for a population of {self.population_size}, expected at most "
                f"1 / population_size = {1 / self.population_size:g}; a larger one allows a mechanism that publishes "
                "the data of a device",
                code="FN-1650",
            )
        if (self.sampling == COINS) != bool(self.sampling_rate):
            raise InvalidPlan(
                f"plan: privacy.sampling: got {shown(self.sampling)} with sampling_rate {self.sampling_rate:g}, "
                f"expected {shown(COINS)} with a rate, or {shown(NO_SAMPLING)} without; correct one of them",
                code="FN-1681",
            )
        if not self.target_quantile and (self.bits_noise or self.clip_learning_rate != DEFAULT_CLIP_RATE):
            key = "bits_noise" if self.bits_noise else "clip_learning_rate"
            raise InvalidPlan(
                f"plan: privacy.{key}: got {getattr(self, key):g} without target_quantile, expected both: the clip "
                "norm stays without it; add target_quantile = 0.5, or remove the key",
                code="FN-1710",
            )
        if self.is_shared and (self.sampling == COINS or self.keep_seed_rounds):
            key = "sampling" if self.sampling == COINS else "keep_seed_rounds"
            reason = "no amplification is known for it" if self.sampling == COINS else "seeds never leave the devices"
            raise InvalidPlan(
                f"plan: privacy.{key}: got {shown(getattr(self, key))} with mechanism {shown(self.mechanism)}, "
                f"expected none: {reason}; remove {key}, or use the mechanism {shown(CENTRAL)}",
                code="FN-1682",
            )

    def __bool__(self) -> bool:
        """Whether the Run has a mechanism."""
        return bool(self.mechanism)

    def denominator(self, cohort: CohortPlan) -> int:
        """Return the number by which the mean of a Round divides, whoever took part: with coins the expected cohort."""
        return math.ceil(self.sampling_rate * self.population_size) or cohort.buffer

    def noise_of_bits(self, cohort: CohortPlan) -> float:
        """Return the noise of the clip bits, in devices; 0 with a clip norm that stays."""
        return (self.bits_noise or self.denominator(cohort) / BITS_SHARE) if self.target_quantile else 0.0


def check_cohort(privacy: PrivacyPlan, cohort: CohortPlan, participants: ParticipantsPlan) -> None:
    """Raise InvalidPlan for a cohort with which the mechanism of a Plan has no claim."""
    if privacy.sampling == COINS:
        _check_coins(privacy, cohort, participants)
    elif cohort.buffer > privacy.population_size:
        raise InvalidPlan(
            f"plan: got cohort.buffer {cohort.buffer} with privacy.population_size {privacy.population_size}, expected "
            "at most the population; lower the buffer",
            code="FN-1655",
        )


def check_clipping(privacy: PrivacyPlan, cohort: CohortPlan, codec: str) -> None:
    """Raise InvalidPlan for keys with which a clip norm cannot adapt."""
    for key, value, is_right, expected in (
        ("privacy.mechanism", privacy.mechanism, privacy.mechanism == CENTRAL, shown(CENTRAL)),
        ("codec.name", codec, codec != "int4", "a codec whose values are whole bytes, before those of the clip bits"),
    ):
        if not is_right:
            raise InvalidPlan(
                f"plan: got {key} {shown(value)} with privacy.target_quantile {privacy.target_quantile:g}, expected "
                f"{expected}; change the key, or remove target_quantile",
                code="FN-1710",
            )
    bits, multiplier = privacy.noise_of_bits(cohort), privacy.noise_multiplier
    share = 1 - (multiplier / (2 * bits)) ** 2
    if share < LEAST_SHARE or multiplier / math.sqrt(share) > MAX_NOISE_MULTIPLIER:
        raise InvalidPlan(
            f"plan: privacy.bits_noise: got {bits:g} with noise_multiplier {multiplier:g}, expected well above "
            f"{multiplier / 2:g}: the clip bits would use the budget up, and the noise of the parameters would grow; "
            f"set bits_noise to {multiplier:g}, which costs the parameters 15 % more noise, or train with more devices "
            "a Round",
            code="FN-1711",
        )


def _check_coins(privacy: PrivacyPlan, cohort: CohortPlan, participants: ParticipantsPlan) -> None:
    """Raise InvalidPlan for a key that lets something else than coins decide which Updates count."""
    size = privacy.population_size
    for key, value, is_right, expected in (
        ("cohort.quorum", cohort.quorum, cohort.quorum == 0, "0"),
        ("cohort.min_report_s", cohort.min_report_s, cohort.min_report_s == math.inf, "inf"),
        ("cohort.max_extension_s", cohort.max_extension_s, cohort.max_extension_s == 0, "0"),
        ("cohort.buffer", cohort.buffer, cohort.concurrency == cohort.buffer >= size, f"concurrency, at least {size}"),
        ("cohort.selection", cohort.selection, cohort.selection == "uniform", "'uniform'"),
        ("participants", "required devices", participants == ParticipantsPlan(), "none"),
    ):
        if not is_right:
            raise InvalidPlan(
                f"plan: got {key} {shown(value)} with privacy.sampling {shown(COINS)}, expected {expected}: nothing "
                "but the coins decides which Updates count; change the key, or set privacy.sampling to 'none'",
                code="FN-1682",
            )
