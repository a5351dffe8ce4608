"""Optimizers as pure functions: gradients, parameters and state in, the next parameters and state out.

Each is ``torch.optim``'s of the same name, operation for operation. So the exported step and eager torch differ only by
the order of additions. ``eager`` returns that torch optimizer. The learning rate and the number of the step are inputs
of the graph. All other settings are fixed at the export.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from fanin.protos.errors import UnsupportedModel

Tensors = dict[str, Tensor]
CLIP_EPSILON: Final = 1e-6
"""The constant that ``torch.nn.utils.clip_grad_norm_`` adds to a norm before it divides by it."""
MIN_EPSILON: Final = 1e-16
SCALE: Final = 2.0**30
"""Factor of both sides of a quotient with a tiny constant in its denominator. The ONNX optimizer replaces an added
constant of 1e-8 or less by 0, which gives 0 / 0 where a gradient was always zero. A power of two changes no digit."""


class Optimizer(Protocol):
    """The rule by which a gradient changes a parameter."""

    @property
    def states(self) -> Mapping[str, str]:
        """The states of each parameter, all zero at first, and torch's names for them."""
        ...

    @property
    def counts_steps(self) -> bool:
        """Whether the rule depends on the number of the step."""
        ...

    @property
    def divides(self) -> bool:
        """Whether a step divides by the gradient's size, so that its first step has the size of the learning rate."""
        ...

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], learning_rate: Tensor, step: Tensor | None
    ) -> tuple[Tensor, Tensors]:
        """Return the next value and the next states of one parameter.

        Args:
            value: The parameter.
            gradient: Its gradient, of the same shape.
            state: Its states by name, of the same shape.
            learning_rate: Scalar.
            step: Number of this step, from 1; None unless ``counts_steps``.
        """
        ...

    def eager(self, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        """Return torch's own optimizer with the same settings."""
        ...


def check_optimizer(optimizer: object) -> None:
    """Raise UnsupportedModel for an object that is not an ``Optimizer``, such as one of torch's."""
    methods = ("states", "counts_steps", "divides", "move", "eager")
    if not isinstance(optimizer, type) and all(hasattr(optimizer, name) for name in methods):
        return
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    form = "the class" if isinstance(optimizer, type) else "an object of"
    advice = f"write {kind.__name__}()" if all(hasattr(kind, name) for name in methods) else "write optimizer=Sgd()"
    if issubclass(kind, torch.optim.Optimizer):
        advice = (
            "write optimizer=Sgd(momentum=0.9), without parameters and learning rate: the rule becomes a part of the "
            "graph, and the Plan sets the learning rate"
        )
    raise UnsupportedModel(
        f"recipe: optimizer: got {form} {kind.__module__}.{kind.__name__}, expected an optimizer of fanin.edge.export; "
        f"{advice}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """Gradient descent with momentum: ``m = momentum * m + g``, ``p = p - learning_rate * m``.

    Args:
        momentum: Factor of the velocity, from 0.0 to below 1.0.
        nesterov: Whether the step goes along ``g + momentum * m``. Needs a momentum.
        weight_decay: Factor of the parameter that is added to its gradient.

    Reference:
        Sutskever et al. 2013, ICML, section 2 (Nesterov momentum).
    """

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_range("momentum", self.momentum, 1.0)
        _check_range("weight_decay", self.weight_decay, float("inf"))
        if self.nesterov and self.momentum == 0.0:
            raise UnsupportedModel("Sgd: got nesterov with momentum 0.0, expected a momentum above 0.0")

    @property
    def states(self) -> Mapping[str, str]:
        """The velocity, unless the momentum is 0.0."""
        return {"momentum": "momentum_buffer"} if self.momentum else {}

    @property
    def counts_steps(self) -> bool:
        """False: all steps are alike."""
        return False

    @property
    def divides(self) -> bool:
        """False."""
        return False

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], learning_rate: Tensor, step: Tensor | None
    ) -> tuple[Tensor, Tensors]:
        """Return the parameter and its velocity after one step."""
        if self.weight_decay:
            gradient = gradient + self.weight_decay * value
        if not self.momentum:
            return value - learning_rate * gradient, {}
        velocity = self.momentum * state["momentum"] + gradient
        along = gradient + self.momentum * velocity if self.nesterov else velocity
        return value - learning_rate * along, {"momentum": velocity}

    def eager(self, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        """Return ``torch.optim.SGD`` with these settings."""
        return torch.optim.SGD(
            parameters,
            lr=learning_rate,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Adam, or AdamW with ``decoupled``.

    Args:
        beta1: Decay of the running mean of the gradient, from 0.0 to below 1.0.
        beta2: Decay of the running mean of its square, from 0.0 to below 1.0.
        epsilon: Added to the denominator, between 0.0 and 1.0.
        weight_decay: Factor of the parameter that is added to the gradient, or with ``decoupled`` subtracted from the
            parameter itself.
        decoupled: Whether the weight decay is decoupled from the gradient (AdamW).

    Reference:
        Kingma and Ba 2015, arXiv 1412.6980, algorithm 1. Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        _check_range("beta1", self.beta1, 1.0)
        _check_range("beta2", self.beta2, 1.0)
        _check_range("weight_decay", self.weight_decay, float("inf"))
        _check_epsilon("Adam", self.epsilon)

    @property
    def states(self) -> Mapping[str, str]:
        """The running means of the gradient and of its square."""
        return {"mean": "exp_avg", "square": "exp_avg_sq"}

    @property
    def counts_steps(self) -> bool:
        """True: the bias correction needs the number of the step."""
        return True

    @property
    def divides(self) -> bool:
        """True."""
        return True

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], learning_rate: Tensor, step: Tensor | None
    ) -> tuple[Tensor, Tensors]:
        """Return the parameter and its running means after one step."""
        assert step is not None, "counts_steps is True"
        if self.weight_decay and self.decoupled:
            value = value - learning_rate * self.weight_decay * value
        elif self.weight_decay:
            gradient = gradient + self.weight_decay * value
        mean = self.beta1 * state["mean"] + (1.0 - self.beta1) * gradient
        square = self.beta2 * state["square"] + (1.0 - self.beta2) * gradient * gradient
        seen_mean = _one_less_power(self.beta1, step)
        seen = torch.sqrt(_one_less_power(self.beta2, step))
        # torch divides by sqrt(square) / seen + epsilon. Here both sides are multiplied by seen: the ONNX optimizer
        # replaces an added constant of 1e-8 by 0, which gives 0 / 0 where a gradient was always zero.
        spread = torch.sqrt(square) + self.epsilon * seen
        return value - (learning_rate * seen / seen_mean) * (mean / spread), {"mean": mean, "square": square}

    def eager(self, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        """Return ``torch.optim.Adam`` or ``torch.optim.AdamW`` with these settings."""
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind(
            parameters,
            lr=learning_rate,
            betas=(self.beta1, self.beta2),
            eps=self.epsilon,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsProp:
    """RMSprop: ``s = decay * s + (1 - decay) * g^2``, ``p = p - learning_rate * g / (sqrt(s) + epsilon)``.

    Args:
        decay: Decay of the running mean of the squared gradient, from 0.0 to below 1.0 (torch: ``alpha``).
        momentum: Factor of the velocity of the quotients, from 0.0 to below 1.0.
        epsilon: Added to the denominator, between 0.0 and 1.0.
        weight_decay: Factor of the parameter that is added to its gradient.

    Reference:
        Tieleman and Hinton 2012, Coursera, Neural Networks for Machine Learning, lecture 6.5.
    """

    decay: float = 0.99
    momentum: float = 0.0
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_range("decay", self.decay, 1.0)
        _check_range("momentum", self.momentum, 1.0)
        _check_range("weight_decay", self.weight_decay, float("inf"))
        _check_epsilon("RmsProp", self.epsilon)

    @property
    def states(self) -> Mapping[str, str]:
        """The running mean of the squared gradient, and the velocity unless the momentum is 0.0."""
        return {"square": "square_avg"} | ({"momentum": "momentum_buffer"} if self.momentum else {})

    @property
    def counts_steps(self) -> bool:
        """False: all steps are alike."""
        return False

    @property
    def divides(self) -> bool:
        """True."""
        return True

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], learning_rate: Tensor, step: Tensor | None
    ) -> tuple[Tensor, Tensors]:
        """Return the parameter and its states after one step."""
        if self.weight_decay:
            gradient = gradient + self.weight_decay * value
        square = self.decay * state["square"] + (1.0 - self.decay) * gradient * gradient
        along = _quotient(gradient, square, self.epsilon)
        if not self.momentum:
            return value - learning_rate * along, {"square": square}
        velocity = self.momentum * state["momentum"] + along
        return value - learning_rate * velocity, {"square": square, "momentum": velocity}

    def eager(self, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        """Return ``torch.optim.RMSprop`` with these settings."""
        return torch.optim.RMSprop(
            parameters,
            lr=learning_rate,
            alpha=self.decay,
            momentum=self.momentum,
            eps=self.epsilon,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad:
    """Adagrad: ``s = s + g^2``, ``p = p - learning_rate * g / (sqrt(s) + epsilon)``.

    Args:
        epsilon: Added to the denominator, between 0.0 and 1.0.
        weight_decay: Factor of the parameter that is added to its gradient.

    Reference:
        Duchi et al. 2011, JMLR 12, section 1.1 with diagonal matrices.
    """

    epsilon: float = 1e-10
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_range("weight_decay", self.weight_decay, float("inf"))
        _check_epsilon("Adagrad", self.epsilon)

    @property
    def states(self) -> Mapping[str, str]:
        """The sum of the squared gradients."""
        return {"square": "sum"}

    @property
    def counts_steps(self) -> bool:
        """False: all steps are alike."""
        return False

    @property
    def divides(self) -> bool:
        """True."""
        return True

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], learning_rate: Tensor, step: Tensor | None
    ) -> tuple[Tensor, Tensors]:
        """Return the parameter and its sum after one step."""
        if self.weight_decay:
            gradient = gradient + self.weight_decay * value
        square = state["square"] + gradient * gradient
        return value - learning_rate * _quotient(gradient, square, self.epsilon), {"square": square}

    def eager(self, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        """Return ``torch.optim.Adagrad`` with these settings."""
        return torch.optim.Adagrad(parameters, lr=learning_rate, eps=self.epsilon, weight_decay=self.weight_decay)


def clipped(gradients: Tensors, max_norm: float) -> Tensors:
    """Scale all gradients down together so that their common norm is at most ``max_norm`` (0.0: no limit).

    Reference:
        Pascanu et al. 2013, arXiv 1211.5063, algorithm 1, as in ``torch.nn.utils.clip_grad_norm_``.
    """
    if not max_norm:
        return gradients
    squares = torch.stack([(gradient * gradient).sum() for gradient in gradients.values()])
    scale = (max_norm / (torch.sqrt(squares.sum()) + CLIP_EPSILON)).clamp(max=1.0)
    return {name: gradient * scale for name, gradient in gradients.items()}


def _one_less_power(beta: float, step: Tensor) -> Tensor:
    """Return 1 - beta^step for a step that is an input of the graph, from 1.

    Computed as 2 t / (1 + t) with t = tanh(-step log(beta) / 2), which every runtime has. The direct form
    1 - exp(step log(beta)) would lose half of its digits in the first steps, where beta^step is close to 1.
    """
    # For a beta of 0 any large argument works: its power is 0 in float32.
    tanh = torch.tanh(step * (-0.5 * math.log(beta) if beta else 100.0))
    return 2.0 * tanh / (1.0 + tanh)


def _quotient(gradient: Tensor, square: Tensor, epsilon: float) -> Tensor:
    """Return gradient / (sqrt(square) + epsilon), with both sides scaled."""
    return SCALE * gradient / (SCALE * torch.sqrt(square) + SCALE * epsilon)


def _check_epsilon(name: str, epsilon: float) -> None:
    # SCALE times a smaller one would be an added constant that is replaced by 0.
    if not MIN_EPSILON <= epsilon < 1.0:
        raise UnsupportedModel(f"{name}: got epsilon {epsilon}, expected at least {MIN_EPSILON:g} and below 1.0")


def _check_range(name: str, value: float, end: float) -> None:
    if not 0.0 <= value < end:
        raise UnsupportedModel(f"optimizer: got {name} {value}, expected at least 0.0 and below {end}")
