"""The role of a tensor that travels: how the tensor of a Version changes from Round to Round.

    parameter   trained: the rule of the Plan aggregates its changes, and the outer optimizer steps along the aggregate
    statistic   a running statistic, such as the mean of a norm: the mean of the devices' values, weighted by examples
                and staleness. A device's value is that of its base Version plus its change
    counter     a whole number: the value before plus its difference to the same mean, rounded to the nearest whole
                number, ties to even
    sum         a whole number of a statistics Run: the exact sum of the devices' whole numbers (``fanin.edge.queries``)

Personal tensors have no role: they never travel. A role may have a range. An Update of a device whose statistic or
counter is out of its range is refused, and a Version with a value out of its range is never published.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final

from fanin.protos.errors import InvalidInput

LARGEST: Final = (2.0 - 2.0**-23) * 2.0**127
"""The largest float32: values of tensors are float32."""


class RoleKind(StrEnum):
    """The kinds of roles."""

    PARAMETER = "parameter"
    STATISTIC = "statistic"
    COUNTER = "counter"
    SUM = "sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRole:
    """The role of one tensor.

    Attributes:
        role: Its kind.
        lowest: The lowest allowed value, in the range of float32; None for no bound.
        highest: The highest allowed value, not below ``lowest``; None for no bound.

    Raises:
        InvalidInput: A bound is not finite or beyond float32, or ``highest`` is below ``lowest``.
    """

    role: RoleKind
    lowest: float | None = None
    highest: float | None = None

    def __post_init__(self) -> None:
        bounds = [each for each in (self.lowest, self.highest) if each is not None]
        if not all(math.isfinite(each) and abs(each) <= LARGEST for each in bounds) or sorted(bounds) != bounds:
            raise InvalidInput(
                f"role: got the range from {self.lowest} to {self.highest}, expected finite numbers of float32 in "
                "rising order",
                code="FN-0163",
            )

    @property
    def is_bounded(self) -> bool:
        """Whether the role has a bound."""
        return self.lowest is not None or self.highest is not None

    @property
    def range(self) -> str:
        """The range in words, such as "at least 0"."""
        bounds = (("at least", self.lowest), ("at most", self.highest))
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


PARAMETER: Final = TensorRole(role=RoleKind.PARAMETER)
BY_NAME: Final[Mapping[str, TensorRole]] = MappingProxyType(
    {
        "*running_mean": TensorRole(role=RoleKind.STATISTIC),
        "*running_var": TensorRole(role=RoleKind.STATISTIC, lowest=0.0),
        "*num_batches_tracked": TensorRole(role=RoleKind.COUNTER, lowest=0.0),
    }
)
"""The roles of the buffers of torch's norms, by patterns of their names. They apply where no graph of ours shows the
role: to arrays of Flower apps, and to the graphs of another exporter."""


def role_by_name(name: str) -> TensorRole:
    """Return the role that a tensor has by its name alone."""
    return next((role for pattern, role in BY_NAME.items() if fnmatchcase(name, pattern)), PARAMETER)
