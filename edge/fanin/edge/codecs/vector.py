"""The vector of an Update: one or more groups of values, each with the layout of the parameters.

    [parameters: n values] [control: n values] ..

The change of the parameters is the first group. A stage may add a group, such as SCAFFOLD's control change. The groups
follow each other in one vector of integers, so codec, fold and grid need no second code path. A block of the vector is
one tensor of one group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Final, TypeVar

import numpy as np

from fanin.edge.tensors import Float32s, TensorSpec, TensorTable
from fanin.protos.errors import InvalidInput

PARAMETERS: Final = "parameters"
"""The group of the change of the parameters."""
VALUES: Final = "values"
"""The only tensor in the canonical bytes of the auxiliary tensor of a group."""
T = TypeVar("T")


class Weighting(Enum):
    """The weighting of an Update in the mean of a group."""

    EXAMPLES = "examples"
    ONE = "one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group of a vector: its name and the weight of an Update in it."""

    name: str
    weighting: Weighting


MAIN: Final = Group(name=PARAMETERS, weighting=Weighting.EXAMPLES)
Vector = Mapping[str, Float32s]
"""The values of each group (num_values of the table,), by the name of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorLayout:
    """The layout of the vectors of a Run.

    Attributes:
        table: The layout of the parameters, and of each group.
        groups: The groups, the parameters first.
        total_table: The layout of the vector: the blocks of the first group, then those of the second one, and so on.
    """

    table: TensorTable
    groups: tuple[Group, ...] = (MAIN,)
    total_table: TensorTable = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if names[:1] != [PARAMETERS] or len(set(names)) < len(names):
            raise ValueError(f"vector: got groups {names}, expected different names, {PARAMETERS!r} first")
        # The number of the group keeps the names in rising order, as a table needs them.
        specs = (
            TensorSpec(name=f"{number}.{spec.name}", shape=spec.shape, role=spec.role)
            for number in range(len(names))
            for spec in self.table.specs
        )
        total_table = self.table if len(names) == 1 else TensorTable(tuple(specs))
        object.__setattr__(self, "total_table", total_table)

    @property
    def auxiliary(self) -> TensorTable:
        """The layout of the auxiliary tensor of a group: one value for each value of the parameters."""
        return TensorTable.of({VALUES: (self.table.num_values,)})

    def span(self, group: str) -> tuple[int, int]:
        """Return the first and the last position (exclusive) of a group."""
        index = [each.name for each in self.groups].index(group)
        return index * self.table.num_values, (index + 1) * self.table.num_values

    def per_block(self, per_group: Mapping[Weighting, T]) -> tuple[T, ...]:
        """Return for each block of the vector the value of its group's weighting."""
        num_blocks = len(self.table.specs)
        return tuple(chain.from_iterable((per_group[group.weighting],) * num_blocks for group in self.groups))

    def for_all(self, per_block: Sequence[T]) -> tuple[T, ...]:
        """Return values for the blocks of one group, repeated for all groups."""
        return tuple(per_block) * len(self.groups)

    def join(self, vector: Vector) -> Float32s:
        """Return the groups as one flat vector (total_table.num_values,).

        Raises:
            InvalidInput: Groups are missing or unknown, or a group has another shape or dtype.
        """
        names = [group.name for group in self.groups]
        if set(vector) != set(names):
            raise InvalidInput(
                f"change: got the groups {sorted(vector)}, expected {names}; correct the trainer or the stage",
                code="FN-0386",
            )
        for name, values in vector.items():
            self.check_group(name, values)
        return vector[PARAMETERS] if len(names) == 1 else np.concatenate([vector[name] for name in names])

    def check_group(self, name: str, values: Float32s) -> None:
        """Raise InvalidInput unless the values of a group are float32 (table.num_values,)."""
        if values.shape != (self.table.num_values,) or values.dtype != np.float32:
            raise InvalidInput(
                f"change: got {values.dtype} {values.shape} for the group {name!r}, expected float32 "
                f"({self.table.num_values},); correct the trainer or the stage",
                code="FN-0386",
            )
