"""Figures that compare results: a line for each result, with a band over its seeds, of any column of the Rounds.

A point is the mean over the seeds that have the Round and a finite value in it. The band of n values is

    range       from the smallest to the largest
    deviation   mean +- s, with the sample standard deviation s
    error       mean +- s / sqrt(n), the standard error of the mean
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from fanin.protos.errors import InvalidInput
from fanin.protos.plans.keys import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROUND: Final = "round"
BANDS: Final = ("deviation", "error", "range", "none")
LOGS: Final = ("", "x", "y", "xy")
NUM_WIDE: Final = 3
"""Axes side by side. More of them are in further rows."""


class HasColumns(Protocol):
    """The part of a ``Result`` that ``plot_results`` draws."""

    def columns(self) -> Mapping[str, Sequence[float]]:
        """Return the Rounds of all seeds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotForm:
    """How results are drawn.

    Attributes:
        x: The column of the horizontal axis, such as ``round``, ``time_s`` or ``bytes_up``.
        band: What surrounds the mean over the seeds: ``deviation``, ``error``, ``range`` or ``none``.
        log: The axes with a logarithmic scale: ``x``, ``y``, ``xy`` or none.
        cumulative: Whether x is summed over the Rounds, as for the bytes so far.
    """

    x: str = ROUND
    band: str = "deviation"
    log: str = ""
    cumulative: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (("band", self.band, BANDS), ("log", self.log, LOGS)):
            if value not in known:
                raise InvalidInput(f"plot: {name}: got {value!r}, expected one of {list(known)}", code="FN-1895")


@dataclass(frozen=True, slots=True, kw_only=True)
class BandPoint:
    """One Round of a result: the mean of x and of a column over its seeds, and the ends of the band."""

    x: float
    mean: float
    low: float
    high: float


def plot_results(
    results: "Mapping[str, HasColumns]",
    path: Path | str | None = None,
    *,
    columns: str | Sequence[str] = (),
    form: PlotForm | None = None,
) -> "Figure":
    """Draw several results in one figure, with a band over the seeds of each.

    Args:
        results: The results by name, such as ``{"FedAvg": first, "FedProx": second}``.
        path: The file to write, in the format of its suffix. None writes none.
        columns: Columns of the Rounds, such as ``test_accuracy`` or ``metrics.corrupted.nll``; each has axes of its
            own. Without any: the test accuracy, or the loss if there is none.
        form: The horizontal axis, the band and the scales.

    Returns:
        The matplotlib Figure, which a notebook shows.

    Raises:
        InvalidInput: There is no result or no such column, or matplotlib does not know the format.
        ModuleNotFoundError: matplotlib is not installed.
    """
    return plot_panels({"": results}, path, columns=columns, form=form)


def plot_panels(
    panels: "Mapping[str, Mapping[str, HasColumns]]",
    path: Path | str | None = None,
    *,
    columns: str | Sequence[str] = (),
    form: PlotForm | None = None,
) -> "Figure":
    """Draw results of several data sets, each with axes of its own. See ``plot_results``.

    Args:
        panels: The results by name, by the title of their axes.
        path: See ``plot_results``.
        columns: See ``plot_results``. Several columns have a row of axes each.
        form: See ``plot_results``.
    """
    if not panels or not all(panels.values()):
        raise InvalidInput("plot: got no results, expected at least one", code="FN-1147")
    form = form or PlotForm()
    parts = {title: {name: result.columns() for name, result in each.items()} for title, each in panels.items()}
    tables = {f"{title} {name}".strip(): table for title, each in parts.items() for name, table in each.items()}
    names = [columns] if isinstance(columns, str) else list(columns)
    names = names or [_usual(list(tables.values()))]
    for name in (*names, form.x):
        if absent := [result for result, table in tables.items() if name not in table]:
            raise InvalidInput(
                f"plot: got the column {shown(name)}, which {', '.join(absent)} does not have; expected one of "
                f"{sorted(set.intersection(*(set(table) for table in tables.values())))}",
                code="FN-1895",
            )
    from fanin.simulation.data.figures import new_figure, save_figure

    figure, first = new_figure()
    axes, places = [first], [(title, name) for name in names for title in parts]
    if len(places) > 1:
        figure.clear()
        num_wide = len(parts) if len(parts) > 1 else min(NUM_WIDE, len(places))
        num_high = -(-len(places) // num_wide)
        width, height = figure.get_size_inches()
        figure.set_size_inches(width * (1 + num_wide) / 3, height * num_high)
        axes = [figure.add_subplot(num_high, num_wide, 1 + index) for index in range(len(places))]
    for place, (title, name) in zip(axes, places, strict=True):
        _draw(place, parts[title], name, form)
        place.set_title(title)
    axes[0].legend(fontsize="small")
    save_figure(figure, path)
    return figure


def _draw(place: "Axes", tables: Mapping[str, Mapping[str, Sequence[float]]], name: str, form: PlotForm) -> None:
    """Draw a column of several results."""
    for index, (result, table) in enumerate(tables.items()):
        points = points_of(table, name, form)
        xs = [point.x for point in points]
        place.plot(xs, [point.mean for point in points], color=f"C{index}", label=result)
        if any(point.low < point.high for point in points):
            low, high = [point.low for point in points], [point.high for point in points]
            place.fill_between(xs, low, high, color=f"C{index}", alpha=0.2, linewidth=0.0)
    if "x" in form.log:
        place.set_xscale("log")
    if "y" in form.log:
        place.set_yscale("log")
    place.set_xlabel(form.x.replace("_", " "))
    place.set_ylabel(name.replace("_", " "))


def points_of(table: Mapping[str, Sequence[float]], column: str, form: PlotForm) -> list[BandPoint]:
    """Return the points of a column, in the order of the Rounds. A point on a logarithmic axis is above 0."""
    values: defaultdict[float, list[tuple[float, float]]] = defaultdict(list)
    totals: defaultdict[float, float] = defaultdict(float)
    for seed, number, x, value in zip(table["seed"], table[ROUND], table[form.x], table[column], strict=True):
        totals[seed] += x
        place = totals[seed] if form.cumulative else x
        if math.isfinite(value) and math.isfinite(place):
            values[number].append((place, value))
    points = []
    for _, pairs in sorted(values.items()):
        xs, ys = zip(*pairs, strict=True)
        mean = math.fsum(ys) / len(ys)
        low, high = _band(ys, mean, form.band)
        point = BandPoint(x=math.fsum(xs) / len(xs), mean=mean, low=low, high=high)
        if ("x" not in form.log or point.x > 0) and ("y" not in form.log or point.mean > 0):
            points.append(point)
    return points


def _band(values: Sequence[float], mean: float, band: str) -> tuple[float, float]:
    if band == "range":
        return min(values), max(values)
    if band == "none" or len(values) < 2:
        return mean, mean
    half = statistics.stdev(values) / (math.sqrt(len(values)) if band == "error" else 1.0)
    return mean - half, mean + half


def _usual(tables: Sequence[Mapping[str, Sequence[float]]]) -> str:
    """Return the first column of which all results have a number."""
    for name in ("test_accuracy", "test_loss"):
        if all(any(map(math.isfinite, table[name])) for table in tables):
            return name
    return "train_loss"
