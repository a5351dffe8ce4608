"""The optimizers of torch. Each is ``torch.optim``'s of the same name, operation for operation.

So the exported step and eager torch differ only by the order of additions. ``eager`` returns that torch optimizer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from fanin.edge.bundles.manifest import OptimizerSetting
from fanin.edge.export.app.optimizers.fields import (
    betas,
    check_epsilon,
    check_range,
    check_switch,
    checked_settable,
    decay,
    present,
)
from fanin.edge.export.app.optimizers.optimizer import StepInputs, Tensors
from fanin.protos.errors import UnsupportedModel

SCALE: Final = 2.0**30
"""Factor of both sides of a quotient with a tiny constant in its denominator. The ONNX optimizer replaces an added
constant of 1e-8 or less by 0, which gives 0 / 0 where a gradient was always zero. A power of two changes no digit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """Gradient descent with momentum: ``m = momentum * m + g``, ``p = p - learning_rate * m``.

    Args:
        momentum: Factor of the velocity, from 0.0 to below 1.0.
        nesterov: Whether the direction of the step is ``g + momentum * m``. Needs a momentum.
        weight_decay: Factor of the parameter that is added to its gradient.
        settable: Settings that a Plan may set although they are 0.0 here. The graph then computes with them.

    Reference:
        Sutskever et al. 2013, ICML, section 2 (Nesterov momentum).
    """

    counts_steps: ClassVar[bool] = False
    divides: ClassVar[bool] = False

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    settable: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_range("momentum", self.momentum, 1.0)
        check_range("weight_decay", self.weight_decay, float("inf"))
        check_switch("Sgd: nesterov", self.nesterov)
        if self.nesterov and self.momentum == 0.0:
            raise UnsupportedModel("Sgd: got nesterov with momentum 0.0, expected a momentum above 0.0", code="FN-0746")
        object.__setattr__(self, "settable", checked_settable("Sgd", self.settable, ("momentum", "weight_decay")))

    @property
    def states(self) -> Mapping[str, str]:
        """The velocity, if the momentum is in the graph."""
        return {"momentum": "momentum_buffer"} if "momentum" in self.settings else {}

    @property
    def settings(self) -> Mapping[str, OptimizerSetting]:
        """Momentum and weight decay, unless 0.0 and not settable."""
        return present({"momentum": self.momentum}, self.settable) | decay(self.weight_decay, self.settable)

    @property
    def setting_inputs(self) -> tuple[str, ...]:
        """The settings themselves."""
        return tuple(self.settings)

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], inputs: StepInputs
    ) -> tuple[Tensor, Tensors]:
        """Return the parameter and its velocity after one step."""
        if "weight_decay" in inputs.settings:
            gradient = gradient + inputs.settings["weight_decay"] * value
        if "momentum" not in inputs.settings:
            return value - inputs.learning_rate * gradient, {}
        momentum = inputs.settings["momentum"]
        velocity = momentum * state["momentum"] + gradient
        along = gradient + momentum * velocity if self.nesterov else velocity
        return value - inputs.learning_rate * along, {"momentum": velocity}

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
        settable: Settings that a Plan may set although they are 0.0 here. The graph then computes with them.

    Reference:
        Kingma and Ba 2015, arXiv 1412.6980, algorithm 1. Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2.
    """

    counts_steps: ClassVar[bool] = True
    divides: ClassVar[bool] = True

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    settable: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_range("beta1", self.beta1, 1.0)
        check_range("beta2", self.beta2, 1.0)
        check_range("weight_decay", self.weight_decay, float("inf"))
        check_epsilon("Adam", self.epsilon)
        check_switch("Adam: decoupled", self.decoupled)
        known = ("beta1", "beta2", "weight_decay")
        object.__setattr__(self, "settable", checked_settable("Adam", self.settable, known))

    @property
    def states(self) -> Mapping[str, str]:
        """The running means of the gradient and of its square."""
        return {"mean": "exp_avg", "square": "exp_avg_sq"}

    @property
    def settings(self) -> Mapping[str, OptimizerSetting]:
        """Both betas, and the weight decay unless it is 0.0 and not settable."""
        return betas(beta1=self.beta1, beta2=self.beta2) | decay(self.weight_decay, self.settable)

    @property
    def setting_inputs(self) -> tuple[str, ...]:
        """The betas in all forms, and the weight decay itself."""
        return (*_forms("beta1"), *_forms("beta2"), *decay(self.weight_decay, self.settable))

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], inputs: StepInputs
    ) -> tuple[Tensor, Tensors]:
        """Return the parameter and its running means after one step."""
        assert inputs.step is not None, "counts_steps is True"
        learning_rate, settings = inputs.learning_rate, inputs.settings
        if "weight_decay" in settings and self.decoupled:
            value = value - learning_rate * settings["weight_decay"] * value
        elif "weight_decay" in settings:
            gradient = gradient + settings["weight_decay"] * value
        mean = settings["beta1"] * state["mean"] + settings["beta1.complement"] * gradient
        square = settings["beta2"] * state["square"] + settings["beta2.complement"] * gradient * gradient
        seen_mean = _one_less_power(settings["beta1.log"], inputs.step)
        seen = torch.sqrt(_one_less_power(settings["beta2.log"], inputs.step))
        # torch divides by sqrt(square) / seen + epsilon. Here both sides are multiplied by seen. The ONNX optimizer
        # replaces an added constant of 1e-8 by 0, which would give 0 / 0 for a gradient that was always zero.
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
        settable: Settings that a Plan may set although they are 0.0 here. The graph then computes with them.

    Reference:
        Tieleman and Hinton 2012, Coursera, Neural Networks for Machine Learning, lecture 6.5.
    """

    counts_steps: ClassVar[bool] = False
    divides: ClassVar[bool] = True

    decay: float = 0.99
    momentum: float = 0.0
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    settable: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_range("decay", self.decay, 1.0)
        check_range("momentum", self.momentum, 1.0)
        check_range("weight_decay", self.weight_decay, float("inf"))
        check_epsilon("RmsProp", self.epsilon)
        known = ("decay", "momentum", "weight_decay")
        object.__setattr__(self, "settable", checked_settable("RmsProp", self.settable, known))

    @property
    def states(self) -> Mapping[str, str]:
        """The running mean of the squared gradient, and the velocity if the momentum is in the graph."""
        return {"square": "square_avg"} | ({"momentum": "momentum_buffer"} if "momentum" in self.settings else {})

    @property
    def settings(self) -> Mapping[str, OptimizerSetting]:
        """The decay of the mean, and momentum and weight decay unless they are 0.0 and not settable."""
        momentum = present({"momentum": self.momentum}, self.settable)
        return betas(decay=self.decay) | momentum | decay(self.weight_decay, self.settable)

    @property
    def setting_inputs(self) -> tuple[str, ...]:
        """The settings themselves, and the complement of the decay."""
        return ("decay.complement", *self.settings)

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], inputs: StepInputs
    ) -> tuple[Tensor, Tensors]:
        """Return the parameter and its states after one step."""
        settings = inputs.settings
        if "weight_decay" in settings:
            gradient = gradient + settings["weight_decay"] * value
        square = settings["decay"] * state["square"] + settings["decay.complement"] * gradient * gradient
        along = _quotient(gradient, square, self.epsilon)
        if "momentum" not in settings:
            return value - inputs.learning_rate * along, {"square": square}
        velocity = settings["momentum"] * state["momentum"] + along
        return value - inputs.learning_rate * velocity, {"square": square, "momentum": velocity}

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
        settable: Settings that a Plan may set although they are 0.0 here. The graph then computes with them.

    Reference:
        Duchi et al. 2011, JMLR 12, section 1.1 with diagonal matrices.
    """

    counts_steps: ClassVar[bool] = False
    divides: ClassVar[bool] = True

    epsilon: float = 1e-10
    weight_decay: float = 0.0
    settable: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_range("weight_decay", self.weight_decay, float("inf"))
        check_epsilon("Adagrad", self.epsilon)
        object.__setattr__(self, "settable", checked_settable("Adagrad", self.settable, ("weight_decay",)))

    @property
    def states(self) -> Mapping[str, str]:
        """The sum of the squared gradients."""
        return {"square": "sum"}

    @property
    def settings(self) -> Mapping[str, OptimizerSetting]:
        """The weight decay, unless it is 0.0 and not settable."""
        return decay(self.weight_decay, self.settable)

    @property
    def setting_inputs(self) -> tuple[str, ...]:
        """The weight decay itself."""
        return tuple(self.settings)

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], inputs: StepInputs
    ) -> tuple[Tensor, Tensors]:
        """Return the parameter and its sum after one step."""
        if "weight_decay" in inputs.settings:
            gradient = gradient + inputs.settings["weight_decay"] * value
        square = state["square"] + gradient * gradient
        return value - inputs.learning_rate * _quotient(gradient, square, self.epsilon), {"square": square}

    def eager(self, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        """Return ``torch.optim.Adagrad`` with these settings."""
        return torch.optim.Adagrad(parameters, lr=learning_rate, eps=self.epsilon, weight_decay=self.weight_decay)


def _forms(name: str) -> tuple[str, ...]:
    return name, f"{name}.complement", f"{name}.log"


def _one_less_power(log: Tensor, step: Tensor) -> Tensor:
    """Return 1 - beta^step from the logarithm of beta, for a step that is an input of the graph, from 1.

    Computed as 2 t / (1 + t) with t = tanh(-step log(beta) / 2), which every runtime has. The direct form
    1 - exp(step log(beta)) would lose half of its digits in the first steps, where beta^step is close to 1.
    """
    tanh = torch.tanh(step * (-0.5 * log))
    return 2.0 * tanh / (1.0 + tanh)


def _quotient(gradient: Tensor, square: Tensor, epsilon: float) -> Tensor:
    """Return gradient / (sqrt(square) + epsilon), with both sides scaled."""
    return SCALE * gradient / (SCALE * torch.sqrt(square) + SCALE * epsilon)
