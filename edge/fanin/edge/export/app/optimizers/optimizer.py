"""The Protocol of an optimizer, the inputs of its step, and the bound on gradients."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from fanin.edge.bundles.manifest import OptimizerSetting
from fanin.edge.runtimes.graphs import SETTING_PREFIX, setting_values
from fanin.protos.errors import UnsupportedModel

Tensors = dict[str, Tensor]
CLIP_EPSILON: Final = 1e-6
"""The constant that ``torch.nn.utils.clip_grad_norm_`` adds to a norm before it divides by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The inputs of a step that all parameters share. All of them are scalars.

    Attributes:
        learning_rate: The learning rate.
        step: Number of this step, from 1; None unless the optimizer counts steps.
        settings: The settings of the optimizer, by ``Optimizer.setting_inputs``.
    """

    learning_rate: Tensor
    step: Tensor | None
    settings: Mapping[str, Tensor]


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

    @property
    def settings(self) -> Mapping[str, OptimizerSetting]:
        """The settings that a Plan may change, by name."""
        ...

    @property
    def setting_inputs(self) -> tuple[str, ...]:
        """The inputs of the graph for the settings. A step uses all of them.

        A setting ``s`` has one or more of ``s``, ``s.complement`` (1 - s) and ``s.log`` (its natural logarithm).
        """
        ...

    def move(
        self, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], inputs: StepInputs
    ) -> tuple[Tensor, Tensors]:
        """Return the next value and the next states of one parameter.

        Args:
            value: The parameter.
            gradient: Its gradient, of the same shape.
            state: Its states by name, of the same shape.
            inputs: The inputs of the step that all parameters share.
        """
        ...

    def eager(self, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        """Return torch's own optimizer with the same settings."""
        ...


def check_optimizer(optimizer: object) -> None:
    """Raise UnsupportedModel for an object that is not an ``Optimizer``, such as one of torch's."""
    methods = ("states", "counts_steps", "divides", "settings", "setting_inputs", "move", "eager")
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
        f"{advice}",
        code="FN-0745",
    )


def setting_tensors(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Tensors:
    """Return the inputs of a graph for the settings of an optimizer, by ``setting_inputs``: scalars."""
    values = setting_values({name: setting.default for name, setting in optimizer.settings.items()})
    return {name: torch.tensor(values[SETTING_PREFIX + name], dtype=dtype) for name in optimizer.setting_inputs}


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
