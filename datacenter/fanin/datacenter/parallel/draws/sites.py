"""The draws of a model: their modules, their order and their complete shapes. ``recording`` creates them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from fanin.edge.runtimes.randomness import RandomKind

LOSS: Final = "(loss)"
"""The site of the draws of the loss. No module has this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawShape:
    """The complete shape of one draw.

    Attributes:
        kind: ``uniform`` or ``normal``.
        shape: the shape for one example. The complete shape has ``shape[dim] * n`` instead for n examples.
        dim: the dimension of the examples; None if all examples share the draw. An example's values are consecutive.
    """

    kind: RandomKind
    shape: tuple[int, ...]
    dim: int | None

    @property
    def num_values(self) -> int:
        """Number of values for one example."""
        return math.prod(self.shape)

    def is_like(self, kind: RandomKind, shape: tuple[int, ...]) -> bool:
        """Return whether a draw has this one's kind and number of dimensions."""
        return (self.kind, len(self.shape)) == (kind, len(shape))

    def of(self, num_examples: int) -> tuple[int, ...]:
        """Return the complete shape for a number of examples."""
        return tuple(size * num_examples if dim == self.dim else size for dim, size in enumerate(self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A module that draws, in its own code or in functions that it calls.

    Attributes:
        names: the names of the module. Several if it is shared.
        train: its draws in one training pass, in order.
        evaluate: its draws in one evaluation pass.
        attention: whether it drops weights of a fused attention, which must then be computed by plain operators.
    """

    names: tuple[str, ...]
    train: tuple[DrawShape, ...] = ()
    evaluate: tuple[DrawShape, ...] = ()
    attention: bool = False

    @property
    def may_skip(self) -> bool:
        """Whether it draws a number of the step, by which it may skip a layer."""
        return any(draw.dim is None for draw in self.train)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDraws:
    """The draws of a model and of its loss.

    Attributes:
        sites: the modules that draw, by their first name, and ``LOSS``.
        fault: the reason why the draws are not known; empty if they are. A model that draws cannot be trained then.
    """

    sites: Mapping[str, Site] = field(default_factory=dict)
    fault: str = ""

    @property
    def in_evaluation(self) -> bool:
        """Whether the model draws in evaluation, too."""
        return any(site.evaluate for site in self.sites.values())

    def modules(self) -> Iterator[tuple[str, Site]]:
        """Yield the first name and the site of each module that draws."""
        return ((name, site) for name, site in self.sites.items() if name != LOSS)


NO_DRAWS: Final = ModelDraws()
