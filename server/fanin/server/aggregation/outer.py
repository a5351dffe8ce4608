"""Outer optimizers: how the aggregate of a Round changes the global parameters.

An optimizer may have state, such as a momentum: tensors of the shape of the parameters. The state belongs to a Version.
It is stored with the Version, restored by a rollback, and initialized again after a Version from outside. A Plan names
its optimizer in ``aggregation.outer_optimizer``. An installed distribution adds optimizers by the entry point group
``fanin.outer_optimizers``.

An optimizer works elementwise, in float64, with + - * / and square roots only. IEEE 754 rounds each of these operations
once. So the results of all machines are bit-identical, for slices of any length. The caller rounds parameters and state
to float32.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Final, Protocol, runtime_checkable

import numpy as np

from fanin.edge.codecs.pipeline import form_of
from fanin.edge.tensors import Float64s
from fanin.protos.plans import Plan
from fanin.protos.plans.keys import Key
from fanin.protos.plans.named import blamed, check_names, wrong_object
from fanin.protos.plans.schedule import outer_factor_in
from fanin.server.aggregation.methods.feddyn import feddyn_of

GROUP: Final = "fanin.outer_optimizers"
"""The entry point group of optimizers in other distributions. An entry is a function of the Plan and of options."""
State = Mapping[str, Float64s]
"""Slices of the state's tensors, by name."""


@runtime_checkable
class OuterOptimizer(Protocol):
    """The step from the parameters of a Version to those of the next one.

    All arrays are slices of the same values: float64, of shape (num_values_of_slice,).
    """

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the state's tensors, none for an optimizer without state."""
        ...

    def begin(self, parameters: Float64s) -> State:
        """Return the state before the first step."""
        ...

    def step(self, state: State, parameters: Float64s, aggregate: Float64s, number: int) -> tuple[State, Float64s]:
        """Return the next state and the next parameters.

        Args:
            state: The state after the step before.
            parameters: The parameters.
            aggregate: What the rule made of the Updates: parameters after training minus those before.
            number: The number of this step since ``begin``, from 1. Failed Rounds do not count. It continues where the
                state does: after a rollback it follows the number of the restored Version, and after a Version from
                outside it is 1.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStep:
    """The outer step of one Round, of which every slice is the same.

    Attributes:
        optimizer: The outer optimizer.
        number: The number of the step since ``OuterOptimizer.begin``, from 1.
        factor: The factor of the step by the Plan's schedule.
    """

    optimizer: OuterOptimizer
    number: int
    factor: float = 1.0

    @classmethod
    def of(cls, plan: Plan, optimizer: OuterOptimizer, round_number: int, num_steps: int) -> "RoundStep":
        """Return the step of a Round, before which the optimizer has taken ``num_steps``."""
        return cls(optimizer=optimizer, number=num_steps + 1, factor=outer_factor_in(plan.schedule, round_number))

    def apply(self, state: State, parameters: Float64s, aggregate: Float64s) -> tuple[State, Float64s]:
        """Return the next state and the next parameters: x + factor (step(x) - x). An empty state begins a new one."""
        before = state or self.optimizer.begin(parameters)
        after, moved = self.optimizer.step(before, parameters, aggregate, self.number)
        # A result of another form is refused where it is rounded.
        if self.factor == 1.0 or form_of(moved) != form_of(parameters):
            return after, moved
        return after, parameters + self.factor * (moved - parameters)


class FedAvg:
    """The parameters plus the aggregate, times a learning rate.

    Reference:
        McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data,
        arXiv 1602.05629, algorithm 1. Reddi et al. 2021, Adaptive Federated Optimization, arXiv 2003.00295,
        algorithm 1 with SGD.
    """

    def __init__(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``OuterOptimizer.tensors``."""
        return ()

    def begin(self, parameters: Float64s) -> State:
        """See ``OuterOptimizer.begin``."""
        return {}

    def step(self, state: State, parameters: Float64s, aggregate: Float64s, number: int) -> tuple[State, Float64s]:
        """See ``OuterOptimizer.step``."""
        return state, parameters + self._learning_rate * aggregate


class Nesterov:
    """Nesterov's momentum over aggregates, as the outer optimizer of DiLoCo.

    Reference:
        Sutskever et al. 2013, On the importance of initialization and momentum in deep learning, equations 3 and 4, in
        the form of ``torch.optim.SGD(nesterov=True)``. Douillard et al. 2023, DiLoCo, arXiv 2311.08105, algorithm 1.
    """

    def __init__(self, learning_rate: float, momentum: float) -> None:
        self._learning_rate = learning_rate
        self._momentum = momentum

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``OuterOptimizer.tensors``."""
        return ("momentum",)

    def begin(self, parameters: Float64s) -> State:
        """See ``OuterOptimizer.begin``."""
        return {"momentum": parameters * 0.0}

    def step(self, state: State, parameters: Float64s, aggregate: Float64s, number: int) -> tuple[State, Float64s]:
        """See ``OuterOptimizer.step``."""
        momentum = self._momentum * state["momentum"] + aggregate
        return {"momentum": momentum}, parameters + self._learning_rate * (aggregate + self._momentum * momentum)


class FedAvgM:
    """A heavy-ball momentum over aggregates.

    Reference:
        Hsu, Qi, Brown 2019, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
        Classification, arXiv 1909.06335, section 4.3, in the form of ``torch.optim.SGD(momentum=...)``.
    """

    def __init__(self, learning_rate: float, momentum: float) -> None:
        self._learning_rate = learning_rate
        self._momentum = momentum

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``OuterOptimizer.tensors``."""
        return ("momentum",)

    def begin(self, parameters: Float64s) -> State:
        """See ``OuterOptimizer.begin``."""
        return {"momentum": parameters * 0.0}

    def step(self, state: State, parameters: Float64s, aggregate: Float64s, number: int) -> tuple[State, Float64s]:
        """See ``OuterOptimizer.step``."""
        momentum = self._momentum * state["momentum"] + aggregate
        return {"momentum": momentum}, parameters + self._learning_rate * momentum


SecondMoment = Callable[[Float64s, Float64s, float], Float64s]
"""Returns v of a step from v of the step before, the square of the aggregate, and beta2."""


class Adaptive:
    """A step along the mean of aggregates, divided by the root of their squares: FedAdagrad, FedAdam and FedYogi.

    As in the paper, the mean and the squares have no bias correction, and v begins at tau squared, its smallest value
    there.

    Reference:
        Reddi et al. 2021, Adaptive Federated Optimization, arXiv 2003.00295, algorithm 2.
    """

    def __init__(self, second: SecondMoment, learning_rate: float, beta1: float, beta2: float, tau: float) -> None:
        self._second = second
        self._learning_rate = learning_rate
        self._beta1 = beta1
        self._beta2 = beta2
        self._tau = tau

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``OuterOptimizer.tensors``."""
        return ("mean", "squares")

    def begin(self, parameters: Float64s) -> State:
        """See ``OuterOptimizer.begin``."""
        return {"mean": parameters * 0.0, "squares": parameters * 0.0 + self._tau * self._tau}

    def step(self, state: State, parameters: Float64s, aggregate: Float64s, number: int) -> tuple[State, Float64s]:
        """See ``OuterOptimizer.step``."""
        mean = self._beta1 * state["mean"] + (1.0 - self._beta1) * aggregate
        squares = self._second(state["squares"], aggregate * aggregate, self._beta2)
        after = parameters + self._learning_rate * mean / (np.sqrt(squares) + self._tau)
        return {"mean": mean, "squares": squares}, after


def adagrad(before: Float64s, square: Float64s, _beta2: float) -> Float64s:
    """Return v of FedAdagrad: the sum of the squares."""
    return before + square


def adam(before: Float64s, square: Float64s, beta2: float) -> Float64s:
    """Return v of FedAdam: the exponential mean of the squares."""
    return beta2 * before + (1.0 - beta2) * square


def yogi(before: Float64s, square: Float64s, beta2: float) -> Float64s:
    """Return v of FedYogi: v moves towards the square by a share of the square, so it falls slowly."""
    return before - (1.0 - beta2) * square * np.sign(before - square)


class NextParameters:
    """The outer step after a Flower strategy: its aggregate already is the next parameters. See OuterOptimizer."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``OuterOptimizer.tensors``. The strategy itself has the state."""
        return ()

    def begin(self, parameters: Float64s) -> State:
        """See ``OuterOptimizer.begin``."""
        return {}

    def step(self, state: State, parameters: Float64s, aggregate: Float64s, number: int) -> tuple[State, Float64s]:
        """See ``OuterOptimizer.step``."""
        return state, aggregate


OptimizerFactory = Callable[..., OuterOptimizer]
"""Returns the optimizer for a Plan and options. Raises InvalidPlan if the optimizer cannot carry out the Plan."""
LearningRate = Annotated[float, Key(text="Factor of the aggregate in the outer step.", above=0, below=math.inf)]
Momentum = Annotated[float, Key(text="The part of the momentum that remains in the next step.", at_least=0, below=1)]
SquaresFactor = Annotated[
    float, Key(text="The part of the mean of squares that remains in the next step.", at_least=0, below=1)
]
Tau = Annotated[
    float,
    Key(
        text="Added to the root of the squares: with a larger one, the steps adapt less to each parameter.",
        at_least=2.0**-60,
        below=math.inf,
    ),
]


def _fedavg(_plan: Plan, *, learning_rate: LearningRate = 1.0) -> OuterOptimizer:
    return FedAvg(learning_rate)


def _nesterov(_plan: Plan, *, learning_rate: LearningRate = 1.0, momentum: Momentum = 0.9) -> OuterOptimizer:
    return Nesterov(learning_rate, momentum)


def _fedavgm(_plan: Plan, *, learning_rate: LearningRate = 1.0, momentum: Momentum = 0.9) -> OuterOptimizer:
    return FedAvgM(learning_rate, momentum)


def _fedadagrad(
    _plan: Plan, *, learning_rate: LearningRate = 0.1, beta1: Momentum = 0.0, tau: Tau = 1e-3
) -> OuterOptimizer:
    return Adaptive(adagrad, learning_rate, beta1, 0.0, tau)


def _fedadam(
    _plan: Plan,
    *,
    learning_rate: LearningRate = 0.1,
    beta1: Momentum = 0.9,
    beta2: SquaresFactor = 0.99,
    tau: Tau = 1e-3,
) -> OuterOptimizer:
    return Adaptive(adam, learning_rate, beta1, beta2, tau)


def _fedyogi(
    _plan: Plan,
    *,
    learning_rate: LearningRate = 0.1,
    beta1: Momentum = 0.9,
    beta2: SquaresFactor = 0.99,
    tau: Tau = 1e-3,
) -> OuterOptimizer:
    return Adaptive(yogi, learning_rate, beta1, beta2, tau)


OPTIMIZERS: Final[Mapping[str, OptimizerFactory]] = MappingProxyType(
    {
        "fedavg": _fedavg,
        "fedavgm": _fedavgm,
        "nesterov": _nesterov,
        "fedadagrad": _fedadagrad,
        "fedadam": _fedadam,
        "fedyogi": _fedyogi,
        "feddyn": feddyn_of,
    }
)
"""The outer optimizers of fanin, by name."""


def check_members(optimizer: object, where: str) -> None:
    """Check that an object is an outer optimizer.

    Args:
        optimizer: The object.
        where: Begins the error.

    Raises:
        InvalidPlan: This is no object with the members of an optimizer, or ``tensors`` is no tuple of different names.
    """
    with blamed(where, "correct it"):
        if isinstance(optimizer, type) or not isinstance(optimizer, OuterOptimizer):
            raise wrong_object(where, optimizer, "an object with the members of OuterOptimizer")
        check_names(f"{where}: tensors", optimizer.tensors)
