"""The work of a device in a Round: all of its steps, or a limit of its own.

A device that trains for fewer steps sends the change after them, so it is partial work and no failure. It reports the
counts ``steps``, ``planned_steps`` and ``partial_work``, which a Plan may declare as statistics. The Plan says how much
is least (``training.min_work``); a device that can do less gives up the Assignment.

Reference:
    Li et al. 2020, Federated Optimization in Heterogeneous Networks (FedProx), arXiv 1812.06127, section 3.2: partial
    work is aggregated, and stragglers are not dropped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fanin.protos.errors import InvalidInput
from fanin.protos.messages import Assignment
from fanin.protos.numbers import is_number
from fanin.protos.plans import Training

STEPS: Final = "steps"
PLANNED_STEPS: Final = "planned_steps"
PARTIAL: Final = "partial_work"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWork:
    """The complete work of a device in a Round.

    Attributes:
        num_steps: Steps of all epochs.
        num_epochs: Epochs.
    """

    num_steps: int
    num_epochs: int

    def steps_of(self, epochs: float) -> int:
        """Return the steps of some epochs: the nearest whole number, halves up."""
        return math.floor(self.num_steps * epochs / self.num_epochs + 0.5)


WorkPolicy = Callable[[Assignment, PlannedWork], int]
"""Returns the steps that a device does for an Assignment. Less than 1 is 1, and more than planned is all. A training
may be repeated after a crash, so the result depends on the arguments alone."""


def all_steps(_assignment: Assignment, planned: PlannedWork) -> int:
    """A WorkPolicy: all steps."""
    return planned.num_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLimit:
    """A WorkPolicy: a device does at most so much in a Round.

    Attributes:
        steps: Most steps; None for no limit.
        epochs: Most epochs; None for no limit.

    Raises:
        InvalidInput: A limit is out of its range.
    """

    steps: int | None = None
    epochs: float | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max-steps", self.steps, "a whole number of at least 1"),
            ("max-epochs", self.epochs, "a number above 0"),
        ):
            is_whole = name == "max-epochs" or isinstance(value, int)
            if value is not None and not (is_number(value) and is_whole and value > 0):
                raise InvalidInput(f"--{name}: got {value!r}, expected {least}", code="FN-1811")

    def __call__(self, assignment: Assignment, planned: PlannedWork) -> int:
        """See WorkPolicy."""
        steps = planned.num_steps if self.steps is None else self.steps
        return steps if self.epochs is None else min(steps, planned.steps_of(self.epochs))


class TooLittleWork(InvalidInput):
    """The device can do less for an Assignment than the Plan demands of an Update."""


def least_steps(training: Training, planned: PlannedWork) -> int:
    """Return the fewest steps of an Update."""
    return max(math.ceil(training.min_work * planned.num_steps), 1)


def steps_to_do(policy: WorkPolicy, assignment: Assignment, planned: PlannedWork) -> int:
    """Return the steps that a device does for an Assignment.

    Raises:
        TooLittleWork: They are fewer than the Plan demands.
    """
    steps = max(min(policy(assignment, planned), planned.num_steps), 1)
    least = least_steps(assignment.training, planned)
    if steps < least:
        raise TooLittleWork(
            f"training: got a limit of {steps} of {planned.num_steps} steps, expected at least {least} "
            f"(training.min_work {assignment.training.min_work:g}); raise the limit of this device, or lower min_work",
            code="FN-1810",
        )
    return steps


def work_counts(steps: int, planned: PlannedWork) -> dict[str, int]:
    """Return the counts of the work of one device."""
    return {STEPS: steps, PLANNED_STEPS: planned.num_steps, PARTIAL: int(steps < planned.num_steps)}
