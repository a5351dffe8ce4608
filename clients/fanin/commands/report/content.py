"""What a report has, whether it is about a Run or about a simulation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Point = tuple[float, float]
"""The number of a Version or of a Round, and a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves of one unit over Versions or Rounds.

    Attributes:
        title: What the curves show.
        x_label: What the horizontal axis counts.
        series: The points of each curve, by its name; at most two. A curve without a point is left out.
        is_amount: Whether the values are amounts, such as seconds: their axis begins at 0.
        is_bytes: Whether they are bytes.
        note: A sentence about them; "" for none.
    """

    title: str
    x_label: str
    series: Mapping[str, Sequence[Point]]
    is_amount: bool = False
    is_bytes: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table of texts.

    Attributes:
        title: Its heading.
        head: The names of the columns; without names, the first cell of each row is a heading.
        rows: The cells.
        note: A sentence about them; "" for none.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A report.

    Attributes:
        name: The Run, or the simulation.
        kind: ``run`` or ``simulation``.
        state: Its state; ``is_good`` is whether it is one to be content with.
        is_good: See ``state``.
        reason: The reason of the state; "" for none.
        figures: The most important numbers, each with its name and a remark.
        warnings: What an operator should look at.
        charts: Curves.
        tables: Tables.
    """

    name: str
    kind: str
    state: str
    is_good: bool
    reason: str = ""
    figures: Sequence[tuple[str, str, str]] = ()
    warnings: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Grid] = field(default_factory=tuple)
