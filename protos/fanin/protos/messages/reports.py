"""A device's reports about its work: telemetry, statistics, and the request to give up an Assignment.

Telemetry describes the work (runtime, time, bytes) and travels in the clear. Statistics describe the data and are
integers, so that the coordinator can sum them like the tensors of an Update.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from fanin.protos.errors import InvalidInput
from fanin.protos.names import MAX_NAME_CHARS, check_name
from fanin.protos.plans import MAX_COUNT, MAX_SUM, MAX_TIMES

if TYPE_CHECKING:
    from fanin.v1 import fleet_pb2 as pb

MAX_COUNTS: Final = 64
MAX_FAILURE_CHARS: Final = 4096
"""Longest text of a failure. A device cuts a longer one."""

EXAMPLES: Final = "examples"
TRAINED: Final = "trained_examples"
"""Number of examples that a device trained on. ``EXAMPLES`` is less if the Plan caps it."""
TRAIN_LOSS: Final = "train_loss_q16"
ROUNDED: Final = "rounded"
SATURATED: Final = "saturated"
CLIP_BITS: Final = "clip_bits"
"""1 if the norm of a device's change was within the clip norm of the Round, -1 if the change was scaled down."""
MAX_SATURATED_SHARE: Final = 0.01
"""Share of an Update's values that may saturate before its device is reported: the mean of the Round misses more."""
EVAL_EXAMPLES: Final = "eval_examples"
EVAL_LOSS: Final = "eval_loss_q16"
EVAL_PREDICTIONS: Final = "eval_predictions"
"""Number of labels: one per example, or one per position of a sequence."""
EVAL_CORRECT_FLOAT: Final = "eval_correct_float"
EVAL_CORRECT_INT8: Final = "eval_correct_int8"
EVAL_AGREE: Final = "eval_agree"
MAX_LOSS: Final = 1 << 16
"""Largest mean loss of a classifier that is counted, in nats per example. A guess among 2^32 classes costs 22 nats. The
loss of a model of values has the scale of its data, squared, and is only limited by ``MAX_SUM``."""
LOSS_UNIT: Final = 1 << 16
"""Losses are counted in units of 2^-16 nats, so that their sum is an integer like every other statistic."""
RANGE_EXAMPLES: Final = 32
"""Examples on which a device measures the ranges of activations, at most."""
RANGE_WEIGHT: Final = 64
"""Sum of the counts of a device for one side of an activation: each device has the same weight."""
MAX_RANGE_CELLS: Final = 1 << 17
"""Cells of one Update. As varints they take at most 512 KiB, half of a header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Facts about the work, in the clear. The coordinator records and sums them, so they are bounded like counts.

    ``partition`` is the number of the device's part of all data; None if its operator gave it none.
    """

    runtime: str = ""
    train_s: float = 0.0
    num_steps: int = 0
    bytes_downloaded: int = 0
    bytes_resumed: int = 0
    fanin_version: str = ""
    partition: int | None = None

    def __post_init__(self) -> None:
        longest = max(len(self.runtime), len(self.fanin_version))
        if longest > MAX_NAME_CHARS:
            raise InvalidInput(
                f"telemetry: got a name of {longest} characters, expected at most {MAX_NAME_CHARS}", code="FN-0145"
            )
        for name in (self.runtime, self.fanin_version):
            if not name.isprintable():
                raise InvalidInput(f"telemetry: got the name {name!r}, expected printable characters", code="FN-0145")
        if not 0 <= self.train_s < float("inf"):
            raise InvalidInput(
                f"telemetry: got train_s {self.train_s}, expected a finite number of at least 0", code="FN-0145"
            )
        for name in ("bytes_downloaded", "bytes_resumed"):
            count = getattr(self, name)
            if not 0 <= count <= MAX_COUNT:
                raise InvalidInput(
                    f"telemetry: got {name} {count}, expected at least 0 and at most {MAX_COUNT}", code="FN-0145"
                )
        if self.partition is not None and not 0 <= self.partition <= MAX_COUNT:
            raise InvalidInput(f"telemetry: got partition {self.partition}, expected 0 to {MAX_COUNT}", code="FN-0145")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Facts about the data, by name: integers that are summed over devices. Losses are in units of 2^-16 nats."""

    counts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        check_num_counts(len(self.counts))
        for name, count in self.counts.items():
            check_name("statistics", name)
            if abs(count) > MAX_SUM:
                raise InvalidInput(
                    f"statistics: got {name} = {count}, expected at most {MAX_SUM} in magnitude", code="FN-0634"
                )


def check_num_counts(number: int) -> None:
    """Raise InvalidInput for too many statistics. Check it before a loop over all that a device has sent."""
    if number > MAX_COUNTS:
        raise InvalidInput(f"statistics: got {number} counts, expected at most {MAX_COUNTS}", code="FN-0634")


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeCounts:
    """The ranges of activations on a device's examples, as counts of examples (``fanin.edge.codecs.statistics``).

    Attributes:
        cells: The numbers of the cells with counts, in rising order. A cell is a bin of one side of an activation.
        counts: The count of each cell, at least 1.
    """

    cells: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_num_cells(len(self.cells), len(self.counts))
        if min(self.counts, default=1) < 1:
            raise InvalidInput(f"ranges: got the count {min(self.counts)}, expected at least 1", code="FN-0644")
        if any(cell >= after for cell, after in pairwise((-1, *self.cells))):
            raise InvalidInput("ranges: got cells out of order, expected rising numbers of at least 0", code="FN-0644")

    @staticmethod
    def check_message(message: "pb.RangeCounts") -> None:
        """Raise InvalidInput for too many cells, before a loop over all that a device has sent."""
        check_num_cells(len(message.cells), len(message.counts))


def check_num_cells(num_cells: int, num_counts: int) -> None:
    """Raise InvalidInput for more cells than a message may have, or for another number of counts."""
    if num_cells > MAX_RANGE_CELLS or num_cells != num_counts:
        raise InvalidInput(
            f"ranges: got {num_cells} cells and {num_counts} counts, expected as many of both, at most "
            f"{MAX_RANGE_CELLS}",
            code="FN-0644",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """How far the training of an Assignment is. It is telemetry, in the clear, so it has no loss.

    Attributes:
        step: Steps so far, at most ``num_steps`` if that is known.
        num_steps: Steps of the whole training; 0 if unknown.
        epoch: The epoch under way, from 1 on, at most ``num_epochs`` if that is known; 0 if unknown.
        num_epochs: Epochs of the whole training; 0 if unknown.
    """

    step: int = 0
    num_steps: int = 0
    epoch: int = 0
    num_epochs: int = 0

    def __post_init__(self) -> None:
        for name, number, total in (
            ("step", self.step, self.num_steps),
            ("epoch", self.epoch, self.num_epochs),
        ):
            if not 0 <= number <= MAX_TIMES or not 0 <= total <= MAX_TIMES:
                raise InvalidInput(
                    f"progress: got {name} {number} of {total}, expected numbers from 0 to {MAX_TIMES}", code="FN-0145"
                )
            if total and number > total:
                raise InvalidInput(
                    f"progress: got {name} {number} of {total}, expected at most the last {name}", code="FN-0145"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A message about an Assignment.

    With a ``failure`` the device gives the Assignment up. With ``progress`` it still works. With neither it asks for
    the state of its Update.
    """

    assignment_id: str
    failure: str = ""
    telemetry: Telemetry = field(default_factory=Telemetry)
    progress: TrainingProgress | None = None

    def __post_init__(self) -> None:
        if len(self.failure) > MAX_FAILURE_CHARS:
            raise InvalidInput(
                f"report: got a failure of {len(self.failure)} characters, expected at most {MAX_FAILURE_CHARS}",
                code="FN-0145",
            )
        if self.failure and self.progress is not None:
            raise InvalidInput("report: got progress and a failure, expected one of them", code="FN-0145")
