"""The Plan: how a Run proceeds, as a frozen value. ``fanin.clients.planfile`` reads it from TOML.

The constructor validates a Plan, and above all proves that the integer sum of a Round cannot overflow. The values of an
Update have ``bits`` bits including the sign. A device may encode them up to W bits coarser, and the coordinator
multiplies each by a weight. The sum stays below 2^62 in magnitude, within int64 with one bit to spare, if

    (bits - 1) + W + ceil(log2(max total weight)) <= 62,
    max total weight = buffer * max_examples * 256

where 256 is the weight of one example of a fresh Update. Staleness can only lower the weight.
"""

from dataclasses import dataclass
from typing import Final

from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.protos.messages import MAX_EPOCHS, CodecSpec, Training
from fanin.protos.names import check_name

CODEC_BITS: Final = {"fixed32": 32, "int8": 8}
"""Codecs that a Plan may name, with the bits of one value including its sign."""
DEFAULT_MAX_SHIFTS: Final = {"fixed32": 0, "int8": 12}
"""Default of W by codec. With 12, an ``int8`` update uses all bits of a block if its largest value is between 1/32 and
127 times the block's reach (``fanin.edge.codecs.grid``). The headroom still admits a million full Updates."""
WEIGHT_UNIT: Final = 256
"""The integer weight of one example in a fresh Update."""
HEADROOM_BITS: Final = 62
MAX_COHORT: Final = 1_000_000
MIN_RATE: Final = 2.0**-126
MAX_RATE: Final = 2.0**127
"""Range of a learning rate. The graphs compute in float32, in which others are 0 or infinite."""
MAX_STALENESS: Final = 1000
"""A staler Update would count for less than 1/30, and the coordinator would have to remember that many Rounds."""
MAX_TIMES: Final = (1 << 32) - 1
"""Most Rounds of a Run, and most examples of one Update: the largest uint32, which the wire uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CohortPlan:
    """Size and deadlines of a Round.

    Attributes:
        concurrency: Devices that work at the same time.
        buffer: Updates that close the Round at once. Equal to ``concurrency``: FedAvg.
        quorum: Updates that suffice after ``min_report_s``. With fewer at the deadline the Round fails and is repeated.
        deadline_s: Seconds until the deadline, counted from the Assignment that completes a quorum of devices.
        min_report_s: Seconds from the same Assignment until the quorum suffices. By default only at the deadline.
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
    """How the Updates of a Round become a Version.

    Attributes:
        max_examples: Cap on the weight of one Update, in examples.
        outer_learning_rate: Factor of the aggregate in the outer step.
        max_staleness: Most Versions by which the base of an Update may be behind the Round's. Stale Updates have less
            weight (``fanin.server.aggregation.weights``). With 0, Updates beyond the buffer are discarded; with more,
            they count in a later Round, as in FedBuff.
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
    """When a Run finishes or pauses.

    Attributes:
        max_rounds: The Run finishes after this many Rounds.
        patience: It finishes after this many Rounds in which the validation loss did not fall; 0 for never.
        min_delta: Smallest decrease of the validation loss that counts, in nats.
        max_int8_drop: It pauses when int8 costs more than this on the devices' validation data: points of accuracy, or
            percent of a regression model's squared error. 0.0 for never.
    """

    max_rounds: int = 100
    patience: int = 0
    min_delta: float = 0.0
    max_int8_drop: float = 0.0

    def __post_init__(self) -> None:
        counts_fit = 1 <= self.max_rounds <= MAX_TIMES and 0 <= self.patience <= MAX_TIMES
        if not counts_fit or not 0 <= self.min_delta < float("inf"):
            raise InvalidPlan(
                f"plan: got max_rounds {self.max_rounds}, patience {self.patience}, min_delta {self.min_delta}, "
                f"expected max_rounds of at least 1, the others of at least 0, and counts of at most {MAX_TIMES}"
            )
        if not 0 <= self.max_int8_drop <= 100:
            raise InvalidPlan(
                f"plan: got max_int8_drop {self.max_int8_drop}, expected 0.0 (never pause) to 100: points of "
                "accuracy, or percent of a regression model's squared error"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A complete Plan."""

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
        if not 1 <= self.training.epochs <= MAX_EPOCHS or not MIN_RATE <= self.training.learning_rate <= MAX_RATE:
            raise InvalidPlan(
                f"plan: got epochs {self.training.epochs}, learning_rate {self.training.learning_rate}, "
                f"expected 1 to {MAX_EPOCHS} epochs and a learning rate from 1.2e-38 to 1.7e38 (float32)"
            )
        if not 0 <= self.training.proximal_weight <= MAX_RATE:
            raise InvalidPlan(
                f"plan: got proximal_weight {self.training.proximal_weight}, expected 0.0 (none) to 1.7e38 (float32)"
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
        """Largest sum of the weights of one Round."""
        return self.cohort.buffer * self.aggregation.max_examples * WEIGHT_UNIT
