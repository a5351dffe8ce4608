"""Optimizers as functions from gradients to the next parameters, with their state as arguments.

Each is ``torch.optim``'s of the same name, operation for operation, so that the exported step and eager torch
differ by no more than the order of additions; ``eager`` gives that twin. The learning rate and the number of the
step are inputs of the graph, all else is fixed when it is exported.
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
"""What ``torch.nn.utils.clip_grad_norm_`` adds to a norm before it divides by it."""


class Optimizer(Protocol):
    """How a gradient moves a parameter."""

    @property
    def states(self) -> Mapping[str, str]:
        """What it keeps for each parameter, all of it zero to begin with, and torch's name for it."""
        ...

    @property
    def counts_steps(self) -> bool:
        """Whether the number of the step matters."""
        ...

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], learning_rate: Tensor, step: Tensor | None
    ) -> tuple[Tensor, Tensors]:
        """The parameter and its state after the step with this number (from 1)."""
        ...

    def eager(self, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        """torch's own optimizer of this kind."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """Gradient descent with momentum: ``m = momentum * m + g``, ``p = p - learning_rate * m``.

    With ``nesterov`` the step is along ``g + momentum * m`` (Sutskever et al. 2013, ICML, section 2).
    """

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_range("momentum", self.momentum, 1.0)
        _check_range("weight_decay", self.weight_decay, float("inf"))
        if self.nesterov and self.momentum == 0.0:
            raise UnsupportedModel("Sgd: got nesterov with momentum 0.0, expected a momentum")

    @property
    def states(self) -> Mapping[str, str]:
        """The velocity, if there is one."""
        return {"momentum": "momentum_buffer"} if self.momentum else {}

    @property
    def counts_steps(self) -> bool:
        """All steps are alike."""
        return False

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], learning_rate: Tensor, step: Tensor | None
    ) -> tuple[Tensor, Tensors]:
        """One step."""
        if self.weight_decay:
            gradient = gradient + self.weight_decay * value
        if not self.momentum:
            return value - learning_rate * gradient, {}
        velocity = self.momentum * state["momentum"] + gradient
        along = gradient + self.momentum * velocity if self.nesterov else velocity
        return value - learning_rate * along, {"momentum": velocity}

    def eager(self, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        """``torch.optim.SGD``."""
        return torch.optim.SGD(
            parameters,
            lr=learning_rate,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Adam (Kingma and Ba 2015, arXiv 1412.6980, algorithm 1).

    ``weight_decay`` is added to the gradient, or with ``decoupled`` taken from the parameter itself, which is
    AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2).
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
        if not 0.0 < self.epsilon < 1.0:
            raise UnsupportedModel(f"Adam: got epsilon {self.epsilon}, expected above 0.0 and below 1.0")

    @property
    def states(self) -> Mapping[str, str]:
        """The running means of the gradient and of its square."""
        return {"mean": "exp_avg", "square": "exp_avg_sq"}

    @property
    def counts_steps(self) -> bool:
        """For the bias correction."""
        return True

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], learning_rate: Tensor, step: Tensor | None
    ) -> tuple[Tensor, Tensors]:
        """One step."""
        assert step is not None, "counts_steps says that it is needed"
        if self.weight_decay and self.decoupled:
            value = value - learning_rate * self.weight_decay * value
        elif self.weight_decay:
            gradient = gradient + self.weight_decay * value
        mean = self.beta1 * state["mean"] + (1.0 - self.beta1) * gradient
        square = self.beta2 * state["square"] + (1.0 - self.beta2) * gradient * gradient
        seen_mean = _one_less_power(self.beta1, step)
        seen = torch.sqrt(_one_less_power(self.beta2, step))
        # torch divides by sqrt(square) / seen + epsilon. Both sides times seen: the ONNX optimizer takes an added
        # constant of 1e-8 for 0, and 0 / 0 is where a gradient was always zero.
        spread = torch.sqrt(square) + self.epsilon * seen
        return value - (learning_rate * seen / seen_mean) * (mean / spread), {"mean": mean, "square": square}

    def eager(self, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        """``torch.optim.Adam`` or ``torch.optim.AdamW``."""
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind(
            parameters,
            lr=learning_rate,
            betas=(self.beta1, self.beta2),
            eps=self.epsilon,
            weight_decay=self.weight_decay,
        )


def clipped(gradients: Tensors, max_norm: float) -> Tensors:
    """The gradients, scaled down together where their common norm is over ``max_norm`` (0.0: never).

    Pascanu et al. 2013, arXiv 1211.5063, algorithm 1, as ``torch.nn.utils.clip_grad_norm_`` has it.
    """
    if not max_norm:
        return gradients
    squares = torch.stack([(gradient * gradient).sum() for gradient in gradients.values()])
    scale = (max_norm / (torch.sqrt(squares.sum()) + CLIP_EPSILON)).clamp(max=1.0)
    return {name: gradient * scale for name, gradient in gradients.items()}


def _one_less_power(beta: float, step: Tensor) -> Tensor:
    """1 - beta^step, for a step that is an input of the graph, from 1.

    As 2 t / (1 + t) with t = tanh(-step log(beta) / 2), which every runtime has: 1 - exp(step log(beta)) would
    lose half of its digits in the first steps, where beta^step is next to 1.
    """
    # A beta of 0 is one whose power is 0 in float32.
    tanh = torch.tanh(step * (-0.5 * math.log(beta) if beta else 100.0))
    return 2.0 * tanh / (1.0 + tanh)


def _check_range(name: str, value: float, end: float) -> None:
    if not 0.0 <= value < end:
        raise UnsupportedModel(f"optimizer: got {name} {value}, expected 0.0 to below {end}")
