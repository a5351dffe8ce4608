"""The Assignment: the work of one device in one Round."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Final

from fanin.protos.errors import InvalidInput
from fanin.protos.fields import Mark
from fanin.protos.messages.reports import MAX_COUNTS, RANGE_EXAMPLES
from fanin.protos.messages.versions import BundleRef, Publication, Version
from fanin.protos.names import MAX_NUMBER, check_name
from fanin.protos.plans import (
    MAX_CODEC_SHIFT,
    MAX_STAGES,
    CodecSpec,
    FlowerPlan,
    RoundPlan,
    StageSpec,
    Statistic,
    Training,
)
from fanin.protos.plans.keys import range_problem

MIN_GRID_EXPONENT: Final = -1000
MAX_GRID_EXPONENT: Final = 1000
"""Between these limits a step of 2^exponent is a normal float64 number. A Round's own grid stays far inside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """Names the state with which the stages of a device begin, or the code of a Bundle without graphs.

    Attributes:
        lineage: Number of the Version that no Round published and from which all later ones were computed.
        round: The last Round of this lineage whose Version contains an Update of the device; 0 for none.
    """

    lineage: int = 0
    round: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyTerms:
    """The differential privacy of a Round. The device clips its change, and sends nothing else about its data.

    Attributes:
        mechanism: Who adds the noise. ``central``: the coordinator; ``skellam``, ``gaussian-shares``: the devices.
        clip_norm: Largest L2 norm of the change before it is rounded to the grid.
        noise_multiplier: Least standard deviation of the noise in the sum of a Round, divided by the sensitivity.
        squared_sensitivity: Largest sum of the squares of the encoded values.
        epsilon: The budget of the population.
        delta: Its delta.
        population: Name of the ledger that the Round is charged to.
        population_size: Devices that the budget covers, at least.
        sampling_rate: Probability with which the coordinator draws a device for a Round, by an independent coin; 0:
            there are no coins.
        bits_noise: Standard deviation of the noise in the number of devices whose change is within the clip norm; 0:
            the Round has no clip bits.
    """

    mechanism: str
    clip_norm: float
    noise_multiplier: float
    squared_sensitivity: int
    epsilon: float
    delta: float
    population: str
    population_size: int
    sampling_rate: float = 0.0
    bits_noise: float = 0.0

    def __post_init__(self) -> None:
        check_name("assignment: privacy: mechanism", self.mechanism)
        check_name("assignment: privacy: population", self.population)
        numbers = (self.clip_norm, self.noise_multiplier, self.epsilon, self.delta)
        is_finite = all(0 < each < math.inf for each in numbers) and 0 <= self.sampling_rate < 1
        is_finite = is_finite and 0 <= self.bits_noise < math.inf
        if not is_finite or not 0 < self.squared_sensitivity <= MAX_NUMBER or not self.population_size > 0:
            raise InvalidInput(
                f"assignment: privacy: got {self}, expected finite numbers above 0, a sampling rate from 0 to 1, and "
                "bits_noise of at least 0",
                code="FN-0135",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The work of one device in one Round.

    Attributes:
        assignment_id: Names the Assignment in downloads, uploads and reports.
        run_id: The Run.
        round: The Round's number.
        bundle: The graphs to run.
        version: The parameters to start from.
        grid: One exponent per block of each group, with blocks in name order; the step of a block is 2^exponent.
        codec: How to encode the Update.
        training: How to train.
        deadline_s: Seconds that are left in the Round; 0 for no deadline.
        relay: Reserved for relays; empty.
        stages: The stages of the update pipeline, in their order.
        state: The state with which the device begins.
        statistics: The statistics that the Update may have, with their bounds.
        flower: What Flower apps read.
        progress_s: Seconds between two reports of progress; 0 for none.
        range_examples: Examples on which the device measures the ranges of activations, at most; 0 for none.
        round_protocol: The protocol of the Round.
        privacy: The differential privacy of the Round; None: the device does not clip.
        max_devices: The most devices of a Round with messages; 0 without messages.
    """

    assignment_id: str
    run_id: str
    round: int
    bundle: BundleRef
    version: Version
    grid: tuple[int, ...]
    codec: CodecSpec
    training: Training
    deadline_s: float = 0.0
    relay: str = ""
    stages: tuple[StageSpec, ...] = ()
    state: Annotated[StageState, Mark.SPARSE] = StageState()
    statistics: tuple[Statistic, ...] = ()
    flower: Annotated[FlowerPlan, Mark.SPARSE] = field(default_factory=FlowerPlan)
    progress_s: float = 0.0
    range_examples: int = 0
    round_protocol: Annotated[RoundPlan, Mark.SPARSE] = field(default_factory=RoundPlan)
    privacy: PrivacyTerms | None = None
    max_devices: int = 0

    @property
    def publication(self) -> Publication:
        """The Version and the Bundle to download for this Assignment."""
        return Publication(download_id=self.assignment_id, run_id=self.run_id, bundle=self.bundle, version=self.version)

    def __post_init__(self) -> None:
        check_name("assignment", self.assignment_id)
        check_name("assignment: run", self.run_id)
        for exponent in self.grid:
            if not MIN_GRID_EXPONENT <= exponent <= MAX_GRID_EXPONENT:
                raise InvalidInput(
                    f"assignment: got grid exponent {exponent}, expected {MIN_GRID_EXPONENT} to {MAX_GRID_EXPONENT}",
                    code="FN-0135",
                )
        if self.range_examples > RANGE_EXAMPLES:
            raise InvalidInput(
                f"assignment: got range_examples {self.range_examples}, expected at most {RANGE_EXAMPLES}",
                code="FN-0135",
            )
        if not 0 <= self.codec.max_shift <= MAX_CODEC_SHIFT:
            raise InvalidInput(
                f"assignment: got max_shift {self.codec.max_shift}, expected 0 to {MAX_CODEC_SHIFT}", code="FN-0135"
            )
        problem = range_problem(self.training, "training") or range_problem(self.flower, "flower")
        if problem := problem or range_problem(self.round_protocol, "round_protocol"):
            raise InvalidInput(f"assignment: {problem}", code="FN-0135")
        if len(self.stages) > MAX_STAGES:
            raise InvalidInput(
                f"assignment: got {len(self.stages)} stages, expected at most {MAX_STAGES}", code="FN-0135"
            )
        if len(self.statistics) > MAX_COUNTS:
            raise InvalidInput(
                f"assignment: got {len(self.statistics)} statistics, expected at most {MAX_COUNTS}", code="FN-0135"
            )
        for part in (*self.stages, *self.statistics):
            if problem := range_problem(part, "assignment"):
                raise InvalidInput(problem, code="FN-0135")
