"""Lion, which moves each value by the learning rate, along the sign of a mean of gradients.

torch has no Lion, so ``EagerLion`` is the reference of the exported step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fanin.edge.bundles.manifest import OptimizerSetting
from fanin.edge.export.app.optimizers.fields import betas, check_range, checked_settable, decay
from fanin.edge.export.app.optimizers.optimizer import StepInputs, Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Lion:
    """Lion: ``p = p - learning_rate * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p)``,
    ``m = beta2 * m + (1 - beta2) * g``.

    The sign of 0 is 0, so a parameter whose gradient was always zero only decays. The paper's learning rate is 3 to 10
    times smaller than AdamW's. Its weight decay is larger by the same factor.

    Args:
        beta1: Share of the running mean in the direction of a step, from 0.0 to below 1.0.
        beta2: Decay of the running mean of the gradient, from 0.0 to below 1.0.
        weight_decay: Factor of the parameter that is subtracted from it, times the learning rate (decoupled).
        settable: Settings that a Plan may set although they are 0.0 here. The graph then computes with them.

    Reference:
        Chen et al. 2023, arXiv 2302.06675, algorithm 2.
    """

    counts_steps: ClassVar[bool] = False
    divides: ClassVar[bool] = True  # a sign is a quotient

    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    settable: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_range("beta1", self.beta1, 1.0)
        check_range("beta2", self.beta2, 1.0)
        check_range("weight_decay", self.weight_decay, float("inf"))
        known = ("beta1", "beta2", "weight_decay")
        object.__setattr__(self, "settable", checked_settable("Lion", self.settable, known))

    @property
    def states(self) -> Mapping[str, str]:
        """The running mean of the gradient."""
        return {"mean": "exp_avg"}

    @property
    def settings(self) -> Mapping[str, OptimizerSetting]:
        """Both betas, and the weight decay unless it is 0.0 and not settable."""
        return betas(beta1=self.beta1, beta2=self.beta2) | decay(self.weight_decay, self.settable)

    @property
    def setting_inputs(self) -> tuple[str, ...]:
        """The betas and their complements, and the weight decay itself."""
        return ("beta1", "beta1.complement", "beta2", "beta2.complement", *decay(self.weight_decay, self.settable))

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], inputs: StepInputs
    ) -> tuple[Tensor, Tensors]:
        """Return the parameter and its running mean after one step."""
        settings, mean = inputs.settings, state["mean"]
        along = settings["beta1"] * mean + settings["beta1.complement"] * gradient
        if "weight_decay" in settings:
            value = value - inputs.learning_rate * settings["weight_decay"] * value
        # Some runtimes return 0 or 1 as the sign of NaN. The product keeps NaN, so that a broken gradient is noticed;
        # tflite-runtime alone drops it.
        moved = value - inputs.learning_rate * (torch.sign(along) + 0.0 * along)
        return moved, {"mean": settings["beta2"] * mean + settings["beta2.complement"] * gradient}

    def eager(self, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        """Return ``EagerLion`` with these settings."""
        return EagerLion(parameters, lr=learning_rate, betas=(self.beta1, self.beta2), weight_decay=self.weight_decay)


class EagerLion(torch.optim.Optimizer):
    """Lion as an optimizer of torch, with the arguments and the state ``exp_avg`` of ``torch.optim.AdamW``.

    Args:
        params: The parameters, or parameter groups.
        lr: The learning rate.
        betas: Share of the mean in a step's direction, and decay of the mean.
        weight_decay: Factor of the decoupled weight decay.

    Reference:
        Chen et al. 2023, arXiv 2302.06675, algorithm 2.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # no overloads
        """Move all parameters that have a gradient. Returns the result of ``closure``, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for value in group["params"]:
                if value.grad is None:
                    continue
                mean = self.state[value].setdefault("exp_avg", torch.zeros_like(value))
                value.mul_(1.0 - group["lr"] * group["weight_decay"])
                value.add_(torch.sign(beta1 * mean + (1.0 - beta1) * value.grad), alpha=-group["lr"])
                mean.lerp_(value.grad, 1.0 - beta2)
        return loss
