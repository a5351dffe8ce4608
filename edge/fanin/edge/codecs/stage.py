"""The contract of stages: the steps of a device's update pipeline between the training and the codec.

    prepare -> training -> scaffold -> error_feedback -> .. -> codec

A Plan lists its stages in ``[[stages]]``. An installed distribution adds stages by the entry point group
``fanin.stages``. It must be installed at the coordinator and on the devices.

A stage may have state: float32 tensors, each with a value for each value of the parameters. The state is initially
zero. It is stored together with the Update (``fanin.clients.device.storage``). A device begins each Assignment with the
state after its last Update that a Version contains.

A stage that adds a group to the vector also has a tensor of the same name in each Version: its auxiliary tensor. The
coordinator computes it from the aggregate of the group, and devices download it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from fanin.edge.codecs.vector import Group, Vector, Weighting
from fanin.edge.tensors import Float32s, Float64s
from fanin.protos.plans import Training
from fanin.protos.plans.schedule import rate_of_step

State = Mapping[str, Float32s]
"""The tensors of one stage's state (num_values,), by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSteps:
    """The steps of a training, for stages that weigh them.

    Attributes:
        training: The settings of the Round.
        num_steps: Steps of the training.
        planned_steps: Steps of the complete work of the device.
        round: The Round.
        momentum: Momentum of the optimizer in the train graph.
    """

    training: Training
    num_steps: int
    planned_steps: int
    round: int
    momentum: float = 0.0

    def norm(self, *, nesterov: bool = False) -> float:
        """Return the sum of the magnitudes of the weights that the gradients have in the change, in learning rates.

        A step of SGD with momentum rho and proximal weight mu, from the distance y to the Version, is

            v <- rho v + g + mu y        y <- y - eta (g + mu y + rho v if Nesterov's, else v)

        The change is linear in the gradients. The weight of each is its derivative, computed from the last step to the
        first one. For plain SGD the sum is the number of steps.

        Args:
            nesterov: Whether the momentum has Nesterov's form.
        """
        rho, mu = self.momentum, self.training.proximal_weight
        by_distance, by_velocity, total = 1.0, 0.0, 0.0
        for step in reversed(range(self.num_steps)):
            rate = rate_of_step(self.training, step, self.planned_steps, self.round)
            # The derivative of the change by v after the step, and by the gradient with its proximal part.
            velocity = by_velocity - rate * by_distance * (rho if nesterov else 1.0)
            gradient = velocity - (rate * by_distance if nesterov else 0.0)
            total += abs(gradient)
            by_distance, by_velocity = by_distance + mu * gradient, rho * velocity
        return total / self.training.learning_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """The inputs of a stage.

    Attributes:
        send: Passes a vector to the next stage, and returns the coordinator's reading of the payload, in float64. Call
            it once.
        downlink: The auxiliary tensors of the Version (num_values,), by name.
        num_steps: Optimizer steps of the training.
        learning_rate: Learning rate of the training.
        rng: Random generator, identical for a repeated training. On a device it derives from the device's secret.
        steps: The steps of the training.
        counts: The counts of the trainer, by name.
        report: Sets a statistic that the stage declares (``CountingStage``).
    """

    send: Callable[[Vector], Mapping[str, Float64s]]
    downlink: Mapping[str, Float32s]
    num_steps: int
    learning_rate: float
    rng: np.random.Generator
    steps: LocalSteps
    counts: Mapping[str, int]
    report: Callable[[str, int], None]


@runtime_checkable
class Stage(Protocol):
    """One step of the update pipeline. ``fanin.edge.codecs.contract.check_stage`` checks an implementation."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the state's tensors, none for a stage without state."""
        ...

    def apply(self, vector: Vector, state: State, context: StageContext) -> State:
        """Change the vector, pass it on by ``context.send``, and return the next state.

        Args:
            vector: The groups of the Update so far. Do not change the arrays.
            state: The state before. Do not change the arrays.
            context: The way on, and facts about the training.
        """
        ...


@runtime_checkable
class CountingStage(Stage, Protocol):
    """A stage that adds statistics to the Update, for the rule of the Run. Their bound is the largest sum."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of the statistics. ``apply`` sets those that the trainer does not count."""
        ...


@runtime_checkable
class WeighingStage(Stage, Protocol):
    """A stage that decides the weight of an Update in the mean of the parameters, instead of its examples."""

    @property
    def weighting(self) -> Weighting:
        """The weighting of the parameters."""
        ...


@runtime_checkable
class GroupStage(Stage, Protocol):
    """A stage that adds a group to the vector. A Plan names stages of this kind before all other stages."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that ``apply`` adds."""
        ...

    def prepare(self, state: State, downlink: Mapping[str, Float32s]) -> Mapping[str, Float32s]:
        """Return inputs of the train graph (num_values,), by kind: ``control`` sets the inputs ``control.<p>``.

        Args:
            state: The state before the Round.
            downlink: The auxiliary tensors of the Version (num_values,), by name.
        """
        ...

    def advance(self, auxiliary: Float64s, aggregate: Float64s, num_updates: int) -> Float64s:
        """Return the next auxiliary tensor. It works elementwise, with + - * / only, on slices of any length.

        Args:
            auxiliary: The tensor of the Version (num_values_of_slice,).
            aggregate: What the rule made of the group (num_values_of_slice,).
            num_updates: Number of Updates in the Round.
        """
        ...
