"""The Recipe: the trainable parameters of a module, their optimizer, and the personal parameters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fanin.edge.export.app.optimizers.fields import are_names, check_switch, integer
from fanin.edge.export.app.optimizers.optimizer import Optimizer, check_optimizer
from fanin.edge.export.app.optimizers.rules import Sgd
from fanin.protos.errors import UnsupportedModel
from fanin.protos.numbers import is_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters for frozen linear layers, 2-D convolutions and attention (LoRA).

    An adapter adds ``scale * B A`` to a frozen weight, with ``scale = alpha / rank``. A is random and B is zero at
    first.

    Args:
        rank: Rank of the product, at least 1.
        alpha: Numerator of the scale. 0.0 selects the rank itself, so the scale is 1.

    Reference:
        Hu et al. 2021, arXiv 2106.09685, section 4.1.
    """

    rank: int
    alpha: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", integer("adapters: rank", self.rank))
        if self.rank < 1 or not _is_bound(self.alpha):
            raise UnsupportedModel(
                f"adapters: got rank {self.rank} and alpha {self.alpha!r}, expected a rank of at least 1 and a float "
                "alpha of at least 0.0",
                code="FN-0747",
            )

    @property
    def scale(self) -> float:
        """The factor of the product B A."""
        return self.alpha / self.rank if self.alpha else 1.0


Trains = Literal["full", "head", "bias"] | Adapters
"""The part that learns: all parameters that require a gradient, the last layer, the biases, or adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The training of an App on a device. The complete recipe is fixed in the train graph.

    Args:
        optimizer: The optimizer of a train step, ``Sgd()`` by default.
        trains: The trainable part: ``"full"``, ``"head"``, ``"bias"`` or ``Adapters(rank=...)``. The other weights are
            frozen to int8.
        clip_norm: Bound on the norm of all gradients together. 0.0 means no bound.
        proximal: Whether the graph has the anchor of FedProx as inputs.
        scaffold: Whether the graph has the control variates of SCAFFOLD as inputs, for Runs with the stage
            ``scaffold``; zeros in other Runs. It needs an optimizer without state, such as ``Sgd(momentum=0.0)``.
        quantization_aware: Whether the forward pass rounds weights and activations to 8 bits. Gradients pass unchanged.
        rates: Factors of the learning rate by patterns over names of parameters, such as ``{"head.*": 10.0}``; ``*`` is
            any text. A parameter without a matching pattern has the factor 1.
        local: Patterns over names of personal parameters and running statistics, such as ``["head.*"]``. Each device
            trains its own and never sends them.
    """

    optimizer: Optimizer = field(default_factory=Sgd)
    trains: Trains = "full"
    clip_norm: float = 0.0
    proximal: bool = False
    scaffold: bool = False
    quantization_aware: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)
    local: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)
        for name in ("proximal", "scaffold", "quantization_aware"):
            check_switch(f"recipe: {name}", getattr(self, name))
        if not are_names(self.local):
            raise UnsupportedModel(
                f"recipe: local: got {self.local!r}, expected a list of patterns such as ['head.*']", code="FN-0748"
            )
        object.__setattr__(self, "local", tuple(self.local))
        rates: object = self.rates
        if not isinstance(rates, Mapping) or not are_names([*rates]):
            raise UnsupportedModel(
                f"recipe: rates: got {rates!r}, expected factors by pattern such as {{'head.*': 10.0}}", code="FN-0748"
            )
        for pattern, factor in self.rates.items():
            if not _is_bound(factor) or not factor:
                raise UnsupportedModel(
                    f"recipe: rates: got {factor!r} for {pattern!r}, expected a positive number; freeze a parameter by "
                    "requires_grad_(False)",
                    code="FN-0748",
                )
        if self.scaffold and self.rates:
            raise UnsupportedModel(
                f"recipe: got scaffold=True with rates {dict(self.rates)}, expected one of them: a device computes its "
                "mean gradient from one learning rate",
                code="FN-0751",
            )
        if self.scaffold and self.optimizer.states:
            # A device computes its mean gradient from the change: change / (steps x learning rate).
            raise UnsupportedModel(
                f"Recipe: got scaffold=True with {self.optimizer}, expected an optimizer without state; use "
                "Sgd(momentum=0.0)",
                code="FN-0751",
            )
        if self.trains not in ("full", "head", "bias") and not isinstance(self.trains, Adapters):
            raise UnsupportedModel(
                f"recipe: got trains {self.trains!r}, expected 'full', 'head', 'bias' or Adapters(rank=...)",
                code="FN-0747",
            )
        if not _is_bound(self.clip_norm):
            raise UnsupportedModel(
                f"recipe: got clip_norm {self.clip_norm!r}, expected 0.0 (none) or a positive number", code="FN-0746"
            )


def _is_bound(value: object) -> bool:
    return is_number(value) and 0.0 <= value < math.inf
