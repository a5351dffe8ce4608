"""The query of a statistics Run: the features that devices count, and the layout of their integers.

A *feature* is a number of each example: an element, a column or a channel of an input, or of the targets ``y``. Its
values are counted on a *lattice* of integers, which the signed manifest of the Run's Bundle declares::

    u(x) = round((x - low) / step), ties to even      0 <= u <= U = (high - low) / step

A value below ``low``, above ``high``, or that is no number is counted as such, and in nothing else. So no value wraps.

The tensors of group g, whose features are rows and whose last axis are digits (``digits``), the first of them the
number of devices::

    g.inside       (features, 1 + count + sum + squares)   values in the range: their number, sum u and sum u^2
    g.outside      (features, 3, 1 + count)                values below, above, and no numbers
    g.bins         (features, bins, 1 + count)             the histogram of u; ``g.points`` if a bin is one point
    g.narrow.K     (features x quantiles, bins, 1 + count) Version K + 1 narrows each quantile: the values in equal
                                                           parts of its bracket (``brackets``)

Everything is an exact integer. The constructor proves that no integer of a device or of a fleet overflows.

Reference:
    Quantiles by refinement of histograms: Munro and Paterson 1980, Selection and Sorting with Limited Storage: each
    pass over the data narrows the interval that has the quantile.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Final

from fanin.edge.queries.digits import MAX_DEVICES, digit_bits, num_digits
from fanin.edge.tensors import TensorTable
from fanin.protos.errors import InvalidInput
from fanin.protos.names import MAX_NAME_CHARS, is_name
from fanin.protos.roles import RoleKind, TensorRole

ALL: Final = "all"
ELEMENT: Final = "element"
COLUMN: Final = "column"
CHANNEL: Final = "channel"
FORMS: Final = (ALL, ELEMENT, COLUMN, CHANNEL)
"""What is a feature of an input: all its values together, each value of the flattened example, each index of the last
axis, or each index of the first axis of an example."""
SUM: Final = TensorRole(role=RoleKind.SUM)
INSIDE: Final = "inside"
OUTSIDE: Final = "outside"
BINS: Final = "bins"
POINTS: Final = "points"
"""A histogram whose bins are points: sums of values would tell its withheld cells, so they are withheld with them."""
NARROW: Final = "narrow"
NUM_OUTSIDE: Final = 3
MAX_GROUPS: Final = 64
MAX_POINTS_BITS: Final = 31
MAX_BINS: Final = 4096
MAX_CELLS: Final = 1 << 24
MAX_SUM_BITS: Final = 62
"""Bits of the largest sum of one device. Its int64 has a bit to spare."""
LEAST_DEVICES: Final = 2
"""With one device, a cell is the value of a device."""
INVALID: Final = "FN-1860"
OVERFLOW: Final = "FN-1861"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureGroup:
    """Features of one input that share a lattice.

    Attributes:
        input: The input of the examples, such as ``x``, or the targets ``y``.
        names: The names of the features, in the order of the input. One for ``all``.
        by: What is a feature: one of ``FORMS``.
        low: The lowest value in the range.
        high: The highest one: ``low`` plus a whole number of steps.
        step: Distance of two points of the lattice. Values are rounded to the nearest point.
        bins: Bins of the histogram, and the parts into which each further Version divides the bracket of a quantile.
        quantiles: The quantiles, each above 0 and below 1.

    Raises:
        InvalidInput: A value is out of its range.
    """

    input: str
    names: tuple[str, ...]
    by: str = ALL
    low: float
    high: float
    step: float
    bins: int = 32
    quantiles: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        where = f"feature {self.input!r}"
        if not is_name(self.input):
            raise InvalidInput(f"{where}: got it as an input, expected a name; correct input", code=INVALID)
        if self.by not in FORMS:
            raise InvalidInput(f"{where}: by: got {self.by!r}, expected one of {', '.join(FORMS)}", code=INVALID)
        if not self.names or len(set(self.names)) < len(self.names) or (self.by == ALL and len(self.names) > 1):
            expected = "one name" if self.by == ALL else "at least one, each once"
            raise InvalidInput(
                f"{where}: names: got {len(self.names)} of which {len(set(self.names))} differ, expected {expected}",
                code=INVALID,
            )
        if wrong := [name for name in self.names if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable()]:
            raise InvalidInput(
                f"{where}: names: got {wrong[0][:MAX_NAME_CHARS]!r}, expected 1 to {MAX_NAME_CHARS} printable "
                "characters",
                code=INVALID,
            )
        self._check_lattice(where)
        if not 1 <= self.bins <= min(MAX_BINS, self.num_points):
            raise InvalidInput(
                f"{where}: bins: got {self.bins}, expected 1 to {min(MAX_BINS, self.num_points)}: the range has "
                f"{self.num_points} points",
                code=INVALID,
            )
        rising = all(0.0 < each < 1.0 for each in self.quantiles) and sorted(set(self.quantiles)) == [*self.quantiles]
        if not rising or (self.quantiles and self.bins == 1):
            raise InvalidInput(
                f"{where}: quantiles: got {list(self.quantiles)} with {self.bins} bins, expected numbers above 0 and "
                "below 1 in rising order, and at least 2 bins",
                code=INVALID,
            )

    def _check_lattice(self, where: str) -> None:
        ends = (self.low, self.high, self.step)
        if not all(map(math.isfinite, ends)) or self.step <= 0 or self.high <= self.low:
            raise InvalidInput(
                f"{where}: got low {self.low:g}, high {self.high:g} and step {self.step:g}, expected finite numbers, "
                "low below high, and a step above 0",
                code=INVALID,
            )
        steps = (self.high - self.low) / self.step
        if not math.isclose(steps, round(steps), rel_tol=1e-9) or round(steps) >= 1 << MAX_POINTS_BITS:
            raise InvalidInput(
                f"{where}: got {steps:.10g} steps of {self.step:g} from {self.low:g} to {self.high:g}, expected a "
                f"whole number below 2^{MAX_POINTS_BITS}; change step or high",
                code=INVALID,
            )

    @property
    def num_points(self) -> int:
        """Points of the lattice: U + 1."""
        return round((self.high - self.low) / self.step) + 1

    @property
    def num_parts(self) -> int:
        """Bins that have points. With 5 bins for 6 points, each bin has 2 and the last ones have none."""
        return -(-self.num_points // self.bin_width)

    @property
    def bin_width(self) -> int:
        """Points of a bin of the histogram."""
        return -(-self.num_points // self.bins)

    @property
    def histogram(self) -> str:
        """The kind of the tensor of the histogram."""
        return POINTS if self.bin_width == 1 else BINS

    @property
    def num_versions(self) -> int:
        """Versions until the brackets of the quantiles are one point wide."""
        width, num_versions = self.bin_width, 1
        while self.quantiles and width > 1:
            width, num_versions = -(-width // self.bins), num_versions + 1
        return num_versions

    def value(self, point: int) -> float:
        """Return the value of a point of the lattice."""
        return float(Fraction(self.low) + point * Fraction(self.step))


@dataclass(frozen=True, kw_only=True)
class StatisticsQuery:
    """The statistics that the devices of a Run are asked for.

    Attributes:
        groups: The features, each group of another input: two counts of the same values could be subtracted.
        min_devices: A cell to which fewer devices contribute is withheld.
        num_devices: Devices of a Round, at most: ``cohort.buffer`` of the Plan.
        max_values: Values of a feature on one device, at most. A device with more gives up.

    Raises:
        InvalidInput: A value is out of its range, or a sum could overflow.
    """

    groups: tuple[FeatureGroup, ...]
    min_devices: int = 5
    num_devices: int
    max_values: int = 1 << 24

    def __post_init__(self) -> None:
        inputs = [group.input for group in self.groups]
        if not 0 < len(inputs) <= MAX_GROUPS or len(set(inputs)) < len(inputs):
            raise InvalidInput(
                f"features: got the inputs {inputs}, expected 1 to {MAX_GROUPS}, each once: two counts of the same "
                "values could be subtracted; remove one",
                code=INVALID,
            )
        if not LEAST_DEVICES <= self.min_devices <= self.num_devices <= MAX_DEVICES:
            raise InvalidInput(
                f"min_devices: got {self.min_devices} with at most {self.num_devices} devices of a round, expected "
                f"{LEAST_DEVICES} to the number of devices, and at most {MAX_DEVICES} devices",
                code=INVALID,
            )
        if self.max_values < 1:
            raise InvalidInput(f"max_values: got {self.max_values}, expected at least 1", code=INVALID)
        for group in self.groups:
            if (bits := self._square_bits(group)) > MAX_SUM_BITS:
                raise InvalidInput(
                    f"feature {group.input!r}: the sum of squares could overflow: {self.max_values} values of up to "
                    f"{group.num_points - 1} steps need {bits} bits, expected at most {MAX_SUM_BITS}; raise step, or "
                    "lower max_values",
                    code=OVERFLOW,
                )
        if self.table.num_values > MAX_CELLS:
            raise InvalidInput(
                f"features: got {self.table.num_values} integers for each device, expected at most {MAX_CELLS}; ask "
                "for fewer features, bins or quantiles",
                code=INVALID,
            )

    def _square_bits(self, group: FeatureGroup) -> int:
        return (self.max_values * (group.num_points - 1) ** 2).bit_length()

    @property
    def bits(self) -> int:
        """Bits of a digit."""
        return digit_bits(self.num_devices)

    @property
    def num_versions(self) -> int:
        """Versions of the Run: the histogram, then one for each narrowing of the quantiles."""
        return max(group.num_versions for group in self.groups)

    def widths(self, group: FeatureGroup) -> tuple[int, int, int]:
        """Return the digits of a count, of a sum and of a sum of squares."""
        largest = group.num_points - 1
        sums = (self.max_values, self.max_values * largest, self.max_values * largest**2)
        count, total, squares = (num_digits(each, self.bits) for each in sums)
        return count, total, squares

    @cached_property
    def table(self) -> TensorTable:
        """The tensors of the query, which are the parameters of its Bundle."""
        shapes: dict[str, tuple[int, ...]] = {}
        for index, group in enumerate(self.groups):
            widths, rows = self.widths(group), len(group.names)
            cell = 1 + widths[0]
            shapes[tensor(index, INSIDE)] = (rows, 1 + sum(widths))
            shapes[tensor(index, OUTSIDE)] = (rows, NUM_OUTSIDE, cell)
            shapes[tensor(index, group.histogram)] = (rows, group.bins, cell)
            for number in range(1, group.num_versions):
                narrow = (rows * len(group.quantiles), group.bins, cell)
                shapes[tensor(index, f"{NARROW}.{number:02}")] = narrow
        table = TensorTable.of(shapes)
        return table.with_roles(dict.fromkeys(shapes, SUM))

    @property
    def texts(self) -> tuple[str, ...]:
        """What is asked, as lines for the owner of a device."""
        return tuple(
            f"{len(group.names)} of {group.input} ({group.by}): counts, sums and squares from {group.low:g} to "
            f"{group.high:g}, a histogram of {group.bins} bins"
            + (f", the quantiles {', '.join(f'{each:g}' for each in group.quantiles)}" if group.quantiles else "")
            + f"; cells of fewer than {self.min_devices} devices are withheld"
            for group in self.groups
        )


def tensor(index: int, kind: str) -> str:
    """Return the name of a tensor of a group."""
    return f"{index:02}.{kind}"
