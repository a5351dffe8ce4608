"""The result of a study: its curves, the best values of the grid, and the Rounds to a target.

Whether larger values of a column are better follows from the column: losses are lower, shares of correct answers
higher, and each metric declares it. Of another column the caller says it.
"""

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fanin.edge.metrics.metric import INT8, OUR_VALUES, metrics_of
from fanin.protos.errors import InvalidInput
from fanin.protos.plans.keys import shown
from fanin.simulation.grids.points import StudyPoint
from fanin.simulation.studies.comparison import PlotForm, plot_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OF_COLUMNS: Final = ("test_", "train_", "validation_")
OF_TABLES: Final = ("metrics.", "means.", "per_client.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyCurve:
    """The points of a method with the same values of the grid on one data set: its seeds.

    Attributes:
        data: The name of the data set; "" for one without a name.
        method: The method.
        values: The values of the grid.
        points: The complete points, one for each seed.
    """

    data: str = ""
    method: str
    values: Mapping[str, object]
    points: tuple[StudyPoint, ...]

    def columns(self) -> Mapping[str, Sequence[float]]:
        """Return the Rounds of all seeds as columns by name, for ``plot_results``."""
        names = list(dict.fromkeys(name for point in self.points for name in point.table))
        table: dict[str, list[float]] = {name: [] for name in names}
        for point in self.points:
            num_rounds = len(point.table["round"])
            for name in names:
                table[name] += point.table.get(name, [math.nan] * num_rounds)
        return table

    def mean(self, column: str) -> float:
        """Return the mean over the seeds of the last value of a column; NaN if a seed has none."""
        return math.fsum(point.last(column) for point in self.points) / len(self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsTo:
    """The Rounds that a curve needs to a target.

    Attributes:
        curve: The curve.
        last: The mean over the seeds of the last value of the column.
        rounds: The first Round at the target or better, for each seed; infinity if a seed never reaches it.
    """

    curve: StudyCurve
    last: float
    rounds: tuple[float, ...]

    @property
    def num_reached(self) -> int:
        """The seeds that reach the target."""
        return sum(map(math.isfinite, self.rounds))

    @property
    def median(self) -> float:
        """The median over all seeds; infinity if too few of them reach the target."""
        return statistics.median(self.rounds)

    @property
    def mean(self) -> float:
        """The mean over all seeds; infinity if one of them never reaches the target."""
        return statistics.fmean(self.rounds)

    def __str__(self) -> str:
        num, of = self.num_reached, len(self.rounds)
        if num == of:
            return f"median {self.median:g}, mean {self.mean:g} ({of} of {of} seeds)"
        median = f"median {self.median:g}" if math.isfinite(self.median) else "not reached"
        return f"{median} ({num} of {of} seeds)"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """The result of a study.

    Attributes:
        points: The points in the order of the study: data sets, methods, then the grid, then seeds.
        is_complete: Whether all points have run. False after Ctrl-C.
        directions: Whether larger values of each metric of the settings are better.
    """

    points: tuple[StudyPoint, ...]
    is_complete: bool
    directions: Mapping[str, bool] = field(default_factory=dict)

    @property
    def failures(self) -> tuple[StudyPoint, ...]:
        """The points that failed."""
        return tuple(point for point in self.points if point.error)

    @property
    def data(self) -> tuple[str, ...]:
        """The names of the data sets."""
        return tuple(dict.fromkeys(point.data for point in self.points))

    @property
    def curves(self) -> tuple[StudyCurve, ...]:
        """The complete points, by data set, method and values. One of which a seed failed or is missing is left out."""
        groups: dict[str, list[StudyPoint]] = {}
        for point in self.points:
            groups.setdefault(repr((point.data, point.method, dict(point.values))), []).append(point)
        num_seeds = max((len(group) for group in groups.values()), default=0)
        return tuple(
            StudyCurve(data=group[0].data, method=group[0].method, values=group[0].values, points=tuple(group))
            for group in groups.values()
            if len(group) == num_seeds and not any(point.error for point in group)
        )

    def of(self, data: str) -> "StudyResult":
        """Return the result on one data set.

        Raises:
            InvalidInput: The study has no such data set.
        """
        if data not in self.data:
            raise InvalidInput(
                f"study: got the data set {shown(data)}, expected one of {list(self.data)}", code="FN-1889"
            )
        return replace(self, points=tuple(point for point in self.points if point.data == data))

    def best(
        self, column: str, *, higher_is_better: bool | None = None, target: float | None = None
    ) -> dict[str, StudyCurve]:
        """Return the best curve of each method: the best mean of the last values of a column.

        Args:
            column: The column.
            higher_is_better: Whether larger values are better. None: as the column declares.
            target: Choose by the median of the Rounds to this value of the column. Curves with the same median are
                compared by the last values.

        Raises:
            InvalidInput: No complete point has such a column, the column declares no direction, or the study has
                several data sets.
        """
        if len(self.data) > 1:
            raise InvalidInput(
                f"study: got the data sets {list(self.data)}, expected one; call of({self.data[0]!r}) first",
                code="FN-1889",
            )
        curves = [curve for curve in self.curves if math.isfinite(curve.mean(column))]
        if not curves:
            known = sorted({name for point in self.points for name in point.table})
            raise InvalidInput(
                f"study: got the column {shown(column)}, expected one with a number in each seed of a point: {known}",
                code="FN-1896",
            )
        is_higher = self._is_higher(column, higher_is_better)
        sign = -1.0 if is_higher else 1.0

        def rank(curve: StudyCurve) -> tuple[float, float]:
            first = [] if target is None else [each.first_round(column, target, is_higher) for each in curve.points]
            return statistics.median(first) if first else 0.0, sign * curve.mean(column)

        return {
            method: min((each for each in curves if each.method == method), key=rank)
            for method in dict.fromkeys(curve.method for curve in curves)
        }

    def rounds_to(self, column: str, target: float, *, higher_is_better: bool | None = None) -> tuple[RoundsTo, ...]:
        """Return the Rounds to a target value of a column, for each method with its fastest values of the grid.

        The first Round at the target or better counts, without smoothing. A row has all seeds: a seed that never
        reaches the target has infinity.

        Raises:
            InvalidInput: See ``best``.
        """
        is_higher = self._is_higher(column, higher_is_better)
        curves = [
            curve
            for data in self.data
            for curve in self.of(data).best(column, higher_is_better=is_higher, target=target).values()
        ]
        return tuple(
            RoundsTo(
                curve=curve,
                last=curve.mean(column),
                rounds=tuple(point.first_round(column, target, is_higher) for point in curve.points),
            )
            for curve in curves
        )

    def plot(
        self,
        path: Path | str | None,
        columns: str | Sequence[str],
        *,
        higher_is_better: bool | None = None,
        form: PlotForm | None = None,
    ) -> "Figure":
        """Draw the best curve of each method by the first column, with a band over its seeds. See ``plot_results``.

        Each data set has axes of its own.
        """
        first = columns if isinstance(columns, str) else columns[0]
        panels = {data: self.of(data).best(first, higher_is_better=higher_is_better) for data in self.data}
        return plot_panels(panels, path, columns=columns, form=form)

    def write_csv(
        self, path: Path | str, *, target: tuple[str, float] | None = None, higher_is_better: bool | None = None
    ) -> None:
        """Write a row for each point: its data set, method, values, seed and Plan, its last values, and its error.

        Args:
            path: The file.
            target: A column and its target value: the column ``rounds_to`` has the first Round that reaches it, and
                "never" if none does.
            higher_is_better: See ``best``.
        """
        keys = list(dict.fromkeys(key for point in self.points for key in point.values))
        names = list(dict.fromkeys(name for point in self.points for name in point.table if name != "seed"))
        is_higher = target is not None and self._is_higher(target[0], higher_is_better)
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            reached = [] if target is None else ["rounds_to"]
            writer.writerow(["data", "method", *keys, "seed", "plan_sha256", "seconds", "error", *reached, *names])
            for point in self.points:
                about: list[object] = [point.seed, point.plan_sha256, point.seconds, point.error]
                if target is not None:
                    first = point.first_round(*target, is_higher)
                    about.append(first if math.isfinite(first) else "" if point.error else "never")
                row = [point.data, point.method, *(point.values.get(key, "") for key in keys), *about]
                writer.writerow([*row, *(point.last(name) for name in names)])

    def _is_higher(self, column: str, higher_is_better: bool | None) -> bool:
        return checked_direction(column, higher_is_better, self.directions)


def checked_direction(column: str, higher_is_better: bool | None, own: Mapping[str, bool]) -> bool:
    """Return whether larger values of a column are better: as the caller says, else by its metric.

    Raises:
        InvalidInput: The caller does not say it, and the column is that of no metric.
    """
    known = _direction(column, own) if higher_is_better is None else higher_is_better
    if known is None:
        raise InvalidInput(
            f"study: got the column {shown(column)}, whose better direction is not known, expected one such as "
            "test_accuracy, test_loss or metrics.nll; or pass higher_is_better",
            code="FN-1888",
        )
    return known


def _direction(column: str, own: Mapping[str, bool]) -> bool | None:
    """Return whether larger values of a column are better; None if it declares nothing."""
    name = column
    for prefix in OF_COLUMNS:
        if column.startswith(prefix) and column.removeprefix(prefix) in OUR_VALUES:
            return OUR_VALUES[column.removeprefix(prefix)].higher_is_better
    if not column.startswith(OF_TABLES):
        return None
    while "." in name:
        # A test set, and the part of a statistic. A name of a metric may have dots.
        name = name.partition(".")[2]
        if name in OUR_VALUES:
            return OUR_VALUES[name].higher_is_better
        plain = name.removesuffix(INT8)
        if plain in own:
            return own[plain]
        try:
            return metrics_of([plain])[plain].higher_is_better
        except InvalidInput:
            continue
    return None
