"""The parts that all published comparisons use: the tuning of a method, and a figure with a panel for each setting.

All methods have the same learning rates. A parameter of a method's own has a grid, too. All points of the grid run
with the first seed. The best one runs with the other seeds. The points are those of a ``Study``: a stopped comparison
resumes from its folder, and one with more seeds runs the missing points alone.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from fanin.edge.export import App, Recipe, Sgd
from fanin.protos.errors import FaninError
from fanin.simulation import ClientWork, Method, Partition, SimulationSettings, Study
from fanin.simulation.grids.points import StudyPoint
from fanin.simulation.grids.results import StudyCurve
from fanin.simulation.studies.comparison import PlotForm, points_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RATE: Final = "training.learning_rate"
RECIPE: Final = Recipe(optimizer=Sgd(momentum=0.0), proximal=True)
"""Plain SGD. The proximal term is 0 unless a Plan has it."""
CONTROLLED: Final = Recipe(optimizer=Sgd(momentum=0.0), proximal=True, scaffold=True)
"""The same for SCAFFOLD and FedDyn, whose devices correct each gradient."""


ACCURACY: Final = "test_accuracy"
COLUMNS: Final = ("round", "test_loss", "test_accuracy", "num_clients")
"""The columns of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A method of a panel.

    Attributes:
        plan: Its keys of the Plan.
        work: How much of a training its devices do.
        is_controlled: Whether its train graph has the inputs of control variates.
        grid: The values of each parameter of its own; all methods have the learning rates.
        cohort: Devices whose Updates are in a Round.
    """

    plan: Mapping[str, object] = field(default_factory=dict)
    work: ClientWork | None = None
    is_controlled: bool = False
    grid: Mapping[str, Sequence[object]] = field(default_factory=dict)
    cohort: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How bad a Run is.

    Attributes:
        of: Returns the score of a Run. The smallest one is the best.
        is_rounds: Whether the score is the number of Rounds to a target. Then a Run that tunes ends after as many
            Rounds as the best one before needed.
    """

    of: Callable[[StudyPoint], float]
    is_rounds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The common settings of all methods of a panel.

    Attributes:
        folder: The record of the points, with a folder for each method.
        app: The App of a Recipe.
        clients: The devices and their examples.
        rounds: Most Rounds of a Run.
        settings: The settings, with the keys of all Plans.
        rates: The learning rates.
        seeds: The seeds. The first one tunes.
        score: What the best point of a grid is.
    """

    folder: Path
    app: Callable[[Recipe], App]
    clients: Partition
    rounds: int
    settings: SimulationSettings
    rates: Sequence[float]
    seeds: Sequence[int]
    score: Score

    def tuned(self, name: str, entry: Entry) -> StudyCurve:
        """Tune a method with the first seed. Return the best values of its grid with all seeds.

        Raises:
            FaninError: Each point of the grid failed.
        """
        grid = {RATE: self.rates, **entry.grid}
        best: StudyPoint | None = None
        least, most = math.inf, self.rounds
        for values in product(*grid.values()):
            point = self._point(name, entry, dict(zip(grid, values, strict=True)), (self.seeds[0], most))
            score = math.inf if point.error else self.score.of(point)
            if best is None or best.error or score < least:
                best, least = point, score
                most = int(min(most, score)) if self.score.is_rounds else most
        assert best is not None, "a grid has a point"
        if best.error:
            raise FaninError(f"{name}: {best.error}")
        others = (self._point(name, entry, best.values, (seed, self.rounds)) for seed in self.seeds[1:])
        return StudyCurve(method=name, values=best.values, points=(best, *others))

    def _point(
        self, name: str, entry: Entry, values: Mapping[str, object], seed_and_rounds: tuple[int, int]
    ) -> StudyPoint:
        """Run a point, or read it from the folder."""
        seed, rounds = seed_and_rounds
        # Methods have different Apps, and several commands may run methods of a panel at once.
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        app = self.app(CONTROLLED if entry.is_controlled else RECIPE)
        grid = {key: (value,) for key, value in values.items()}
        method = Method(plan=entry.plan, work=entry.work)
        study = Study(folder=folder, grid=grid, seeds=(seed,), methods={name: method})
        result = study.run(app, self.clients, cohort=entry.cohort, rounds=rounds, settings=self.settings)
        if not result.is_complete:
            raise KeyboardInterrupt
        return result.points[0]


def final_loss(point: StudyPoint) -> float:
    """Return the mean test loss of the last three evaluated Versions, so that one good Round does not decide."""
    losses = [loss for loss in point.table["test_loss"] if math.isfinite(loss)][-3:]
    return math.fsum(losses) / len(losses)


def rounds_score(target: float) -> Score:
    """Return the score by the Rounds to an accuracy. Among Runs that do not reach it, the most accurate is best."""

    def score(point: StudyPoint) -> float:
        number = point.first_round(ACCURACY, target, higher_is_better=True)
        return number if math.isfinite(number) else 1e9 * (2.0 - max(point.table[ACCURACY]))

    return Score(of=score, is_rounds=True)


def rounds_text(curve: StudyCurve, target: float, most: int) -> str:
    """Return the median of the Rounds to an accuracy and those of each seed; ``> 40`` for a seed without it."""
    numbers = [point.first_round(ACCURACY, target, higher_is_better=True) for point in curve.points]

    def shown(number: float) -> str:
        return f"{number:g}" if math.isfinite(number) else f"> {most}"

    return f"{shown(median(numbers))} ({', '.join(map(shown, numbers))})"


def row_of(panel: str, name: str, curve: StudyCurve) -> dict[str, Any]:
    """Return a curve as a row of the report."""
    seeds = [
        {
            "seed": point.seed,
            "seconds": point.seconds,
            # JSON has no NaN: null is a Version that was not evaluated.
            **{key: [value if math.isfinite(value) else None for value in point.table[key]] for key in COLUMNS},
        }
        for point in curve.points
    ]
    return {"panel": panel, "method": name, "values": dict(curve.values), "seeds": seeds}


def draw(panels: Mapping[str, Mapping[str, StudyCurve]], column: str, path: Path, *, num_wide: int, label: str) -> None:
    """Draw a panel for each setting: the curve of each method with the range of its seeds. Losses are on a log axis."""
    figure, axes = figure_of(len(panels), num_wide)
    form, handles = PlotForm(band="range"), dict[str, Any]()
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    for place, (title, curves) in zip(axes, panels.items(), strict=False):
        for name, curve in curves.items():
            points, color = points_of(curve.columns(), column, form), f"C{names.index(name)}"
            xs = [point.x for point in points]
            (handles[name],) = place.plot(xs, [point.mean for point in points], color=color, linewidth=1.3)
            lows, highs = [point.low for point in points], [point.high for point in points]
            place.fill_between(xs, lows, highs, color=color, alpha=0.2, linewidth=0)
        place.set_title(title, fontsize="small")
        if column.endswith("loss"):
            place.set_yscale("log")
            place.yaxis.set_major_formatter("{x:g}")
            place.yaxis.set_minor_formatter("{x:g}")
            place.tick_params(which="minor", labelsize="xx-small")
    figure.supxlabel("Round", fontsize="small")
    figure.supylabel(label, fontsize="small")
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=3, fontsize="small")
    figure.savefig(path)


def figure_of(num_panels: int, num_wide: int) -> "tuple[Figure, list[Axes]]":
    """Return a figure and its panels."""
    from matplotlib.figure import Figure

    num_high = -(-num_panels // num_wide)
    figure = Figure(figsize=(max(2.5 * num_wide, 6.0), max(1.9 * num_high, 2.8) + 0.6), dpi=90, layout="constrained")
    axes = list(figure.subplots(num_high, num_wide, squeeze=False).flat)
    for place in axes:
        place.tick_params(labelsize="x-small")
        place.grid(alpha=0.3)
    return figure, axes


def parser_of(doc: str, *, rounds: int, rates: Sequence[float]) -> argparse.ArgumentParser:
    """Return the options that all comparisons have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="most Rounds of a Run")
    parser.add_argument("--rates", type=numbers, default=tuple(rates), help="learning rates of the grid")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of the best values; the first one tunes")
    parser.add_argument("--folder", type=Path, help="the record: a stopped comparison resumes from it")
    parser.add_argument("--plot", type=Path, help="write the figure, in the format of the suffix")
    parser.add_argument("--json", type=Path, help="write the curves")
    return parser


def numbers(text: str) -> tuple[float, ...]:
    """Return the numbers of an option, such as ``0.01,0.1``."""
    return tuple(float(word) for word in text.split(","))


def shares(text: str) -> tuple[float, ...]:
    """Return the shares of an option, such as ``0,0.1``."""
    values = numbers(text)
    if any(not 0.0 <= value <= 1.0 for value in values):
        raise argparse.ArgumentTypeError(f"got {text}, expected shares from 0 to 1")
    return values


def report(options: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the curves as JSON, if the option is set."""
    if options.json:
        options.json.write_text(json.dumps({"rows": list(rows)}, indent=1))


@contextmanager
def record(options: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder of ``--folder``, or a temporary one."""
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
        yield options.folder
        return
    with TemporaryDirectory() as folder:
        yield Path(folder)
