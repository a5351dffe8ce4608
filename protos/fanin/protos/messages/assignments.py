"""The Assignment: the work of one device in one Round."""

import math
from dataclasses import dataclass
from typing import Final

from fanin.protos.errors import InvalidInput
from fanin.protos.messages.versions import BundleRef, Publication, Version
from fanin.protos.names import check_name

MIN_GRID_EXPONENT: Final = -1000
MAX_GRID_EXPONENT: Final = 1000
"""Between these limits a step of 2^exponent is a normal float64 number. A Round's own grid stays far inside them."""
MAX_CODEC_SHIFT: Final = 62
"""A larger shift leaves no bits of an int64 sum for values."""
MAX_EPOCHS: Final = 10_000
"""With more epochs a device would train for weeks, so a larger number is a mistake or an attack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """Name and parameter of the codec that encodes a Round's Updates.

    ``max_shift`` is W: the number of bits by which a device may encode a block more coarsely than the grid.
    """

    name: str
    max_shift: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Hyperparameters of a device's training. Random seeds derive from (seed, partition, round).

    Attributes:
        epochs: Passes over the device's examples.
        learning_rate: Of the optimizer in the train graph.
        seed: Seed of the Run.
        proximal_weight: FedProx's mu. Above 0.0 it needs a Bundle whose train graph has that input.
        batch_size: The batch size for which the Plan was written. The Bundle must have the same; 0 accepts any.
    """

    epochs: int
    learning_rate: float
    seed: int
    proximal_weight: float = 0.0
    batch_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The work of one device in one Round.

    Attributes:
        assignment_id: Names the Assignment in downloads, uploads and reports.
        run_id: The Run.
        round: The Round's number.
        bundle: The graphs to run.
        version: The parameters to start from.
        grid: One exponent per block, with blocks in name order; the step of a block is 2^exponent.
        codec: How to encode the Update.
        training: How to train.
        deadline_s: Seconds that are left in the Round; 0 for no deadline.
        relay: Reserved for relays; empty.
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
                    f"assignment: got grid exponent {exponent}, expected {MIN_GRID_EXPONENT} to {MAX_GRID_EXPONENT}"
                )
        if not 0 <= self.codec.max_shift <= MAX_CODEC_SHIFT:
            raise InvalidInput(f"assignment: got max_shift {self.codec.max_shift}, expected 0 to {MAX_CODEC_SHIFT}")
        if not 1 <= self.training.epochs <= MAX_EPOCHS:
            raise InvalidInput(f"assignment: got epochs {self.training.epochs}, expected 1 to {MAX_EPOCHS}")
        if not 0 < self.training.learning_rate < math.inf:
            raise InvalidInput(
                f"assignment: got learning_rate {self.training.learning_rate}, expected a finite number above 0"
            )
        if not 0 <= self.training.proximal_weight < math.inf:
            raise InvalidInput(
                f"assignment: got proximal_weight {self.training.proximal_weight}, expected 0.0 or a positive number"
            )
