"""The Plan: how a Run is to go, as a frozen value and as the TOML that people write.

A Plan that exists can be carried out. Above all its integers cannot overflow: an Update's values have
``bits`` bits with sign, a device may make them up to W bits coarser, and each is multiplied by a weight, so
the sum of a Round stays below 2^62 in magnitude, within int64 with a bit to spare, if

    (bits - 1) + W + ceil(log2(max total weight)) <= 62,
    max total weight = buffer * max_examples * 256,

256 being the weight of one fresh example (staleness can only lower it).
"""

from dataclasses import dataclass
from typing import Final

from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.protos.messages import MAX_EPOCHS, CodecSpec, Training
from fanin.protos.names import check_name

CODEC_BITS: Final = {"fixed32": 32, "int8": 8}
"""The codecs that a Plan may name, and the bits of one value with its sign."""
DEFAULT_MAX_SHIFTS: Final = {"fixed32": 0, "int8": 12}
"""W where a Plan leaves it out. With 12, the updates of ``int8`` use all their bits in a block if their largest value
is from a 32nd of its reach (``edge.grid``) to 127 times it, and the headroom still admits a million full Updates."""
WEIGHT_UNIT: Final = 256
"""The integer weight of one example in a fresh Update."""
HEADROOM_BITS: Final = 62
MAX_COHORT: Final = 1_000_000
MAX_STALENESS: Final = 1000
"""Further back an Update counts for less than a 30th, and the coordinator would remember that many Rounds."""
MAX_TIMES: Final = (1 << 32) - 1
"""Most Rounds, and most examples that one Update weighs: what the wire's uint32 can say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CohortPlan:
    """Who takes part in a Round.

    ``concurrency`` devices work at the same time; ``buffer`` Updates close the Round; after ``min_report_s`` seconds
    ``quorum`` Updates suffice, by default after ``deadline_s``; with fewer then the Round fails and is run again.
    """

    concurrency: int
    buffer: int
    quorum: int
    deadline_s: float = 600.0
    min_report_s: float = float("inf")

    def __post_init__(self) -> None:
        if not 1 <= self.quorum <= self.buffer <= self.concurrency <= MAX_COHORT:
            raise InvalidPlan(
                f"plan: got quorum {self.quorum}, buffer {self.buffer}, concurrency {self.concurrency}, "
                f"expected 1 <= quorum <= buffer <= concurrency <= {MAX_COHORT}"
            )
        if not 0 < self.deadline_s < float("inf"):
            raise InvalidPlan(f"plan: got deadline_s {self.deadline_s}, expected a positive number of seconds")
        if not self.min_report_s > 0:
            raise InvalidPlan(f"plan: got min_report_s {self.min_report_s}, expected a positive number of seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationPlan:
    """How Updates become a Version. ``max_examples`` caps the weight of one Update.

    An Update that was trained from a Version up to ``max_staleness`` before the Round's counts with less weight
    (``server.validation.weight_of``). With 0, the rest of a Cohort that is larger than its buffer is spare; with more,
    its work is not lost, and the Run is FedBuff's.
    """

    max_examples: int = 4096
    outer_learning_rate: float = 1.0
    max_staleness: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.max_examples <= MAX_TIMES:
            raise InvalidPlan(f"plan: got max_examples {self.max_examples}, expected 1 to {MAX_TIMES}")
        if not 0 < self.outer_learning_rate < float("inf"):
            raise InvalidPlan(f"plan: got outer_learning_rate {self.outer_learning_rate}, expected a positive number")
        if not 0 <= self.max_staleness <= MAX_STALENESS:
            raise InvalidPlan(
                f"plan: got max_staleness {self.max_staleness}, expected 0 (none) to {MAX_STALENESS} versions"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPlan:
    """When a Run rests: after ``max_rounds``, or ``patience`` Rounds in which the validation loss did not fall
    by ``min_delta`` nats (patience 0: never). It pauses once int8 loses more than ``max_int8_drop`` points of accuracy
    on the devices' validation parts, or, in a model of values, adds more percent than that to the squared error (0.0:
    never)."""

    max_rounds: int = 100
    patience: int = 0
    min_delta: float = 0.0
    max_int8_drop: float = 0.0

    def __post_init__(self) -> None:
        counts_fit = 1 <= self.max_rounds <= MAX_TIMES and 0 <= self.patience <= MAX_TIMES
        if not counts_fit or not 0 <= self.min_delta < float("inf"):
            raise InvalidPlan(
                f"plan: got max_rounds {self.max_rounds}, patience {self.patience}, min_delta {self.min_delta}, "
                f"expected max_rounds from 1 and the others from 0 on, counts up to {MAX_TIMES}"
            )
        if not 0 <= self.max_int8_drop <= 100:
            raise InvalidPlan(
                f"plan: got max_int8_drop {self.max_int8_drop}, expected 0.0 (never pause) to 100: points of "
                "accuracy, or percent of a model of values' squared error"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One Plan, whole."""

    name: str
    cohort: CohortPlan
    training: Training
    codec: CodecSpec
    aggregation: AggregationPlan
    stop: StopPlan

    def __post_init__(self) -> None:
        try:
            check_name("plan: name", self.name)
        except InvalidInput as exc:
            raise InvalidPlan(str(exc)) from exc
        if not 1 <= self.training.epochs <= MAX_EPOCHS or not 0 < self.training.learning_rate < float("inf"):
            raise InvalidPlan(
                f"plan: got epochs {self.training.epochs}, learning_rate {self.training.learning_rate}, "
                f"expected 1 to {MAX_EPOCHS} epochs and a positive learning rate"
            )
        if not 0 <= self.training.proximal_weight < float("inf"):
            raise InvalidPlan(
                f"plan: got proximal_weight {self.training.proximal_weight}, expected 0.0 (none) or a positive number"
            )
        if not 0 <= self.training.batch_size <= MAX_TIMES:
            raise InvalidPlan(
                f"plan: got batch_size {self.training.batch_size}, expected 0 (the bundle's) to {MAX_TIMES}"
            )
        if not 0 <= self.training.seed < 1 << 64:
            raise InvalidPlan(f"plan: got seed {self.training.seed}, expected 0 <= seed < 2^64")
        self._check_headroom()

    def _check_headroom(self) -> None:
        bits = CODEC_BITS.get(self.codec.name)
        if bits is None:
            raise InvalidPlan(f"plan: got codec {self.codec.name!r}, expected one of {sorted(CODEC_BITS)}")
        if self.codec.max_shift < 0:
            raise InvalidPlan(f"plan: got max_shift {self.codec.max_shift}, expected at least 0")
        weight_bits = (self.max_total_weight - 1).bit_length()
        needed = bits - 1 + self.codec.max_shift + weight_bits
        if needed > HEADROOM_BITS:
            raise InvalidPlan(
                f"plan: the sum of a Round could overflow: ({bits} - 1) bits of {self.codec.name} + max_shift "
                f"{self.codec.max_shift} + {weight_bits} bits of weight (buffer {self.cohort.buffer} x max_examples "
                f"{self.aggregation.max_examples} x {WEIGHT_UNIT}) = {needed}, expected at most {HEADROOM_BITS}; "
                "lower max_examples, max_shift or buffer"
            )

    @property
    def max_total_weight(self) -> int:
        """The most that the weights of one Round can add up to."""
        return self.cohort.buffer * self.aggregation.max_examples * WEIGHT_UNIT
