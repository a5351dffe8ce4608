"""A study: the same grid of Plans for each method, with several seeds.

    study = Study(folder="study", grid={"training.learning_rate": (0.03, 0.1)}, seeds=(0, 1, 2),
                  methods={"FedAvg": {}, "FedProx": Method(plan={"training.proximal_weight": 0.1})})
    result = study.run(app, clients, cohort=10, rounds=50, settings=SimulationSettings(test=data.test))
    result.best("test_accuracy"); result.plot("compared.png", "test_accuracy")

All Plans are checked before the first simulation. The points run one after the other, and ``processes`` train the
clients of a point. The App is exported once: the folder has a record for each App, from which a point that was stopped
goes on (``SimulationSettings.resume``). When the point has ended, its trainings are deleted. The error of a point is
kept with it, and the next point begins. A further call reads the points that are complete, and runs the others.
"""

import csv
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fanin.edge.files import held
from fanin.protos.errors import FaninError, InvalidInput
from fanin.protos.names import check_name
from fanin.protos.plans.keys import shown
from fanin.simulation.arguments import plan_of
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.experiment import simulate
from fanin.simulation.flower import FlowerSubject
from fanin.simulation.grids.points import StudyPoint, plan_digest
from fanin.simulation.preparation import ModuleSubject, subject_for
from fanin.simulation.result import ClientFailed, RunStopped
from fanin.simulation.settings import SimulationSettings
from fanin.simulation.studies.comparison import PlotForm, plot_results
from fanin.simulation.studies.digests import digest_of
from fanin.simulation.studies.records import subject_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOG: Final = logging.getLogger("fanin.simulation.study")
NO_RESULT: Final = frozenset(
    {
        "plan",
        "seed",
        "seeds",
        "resume",
        "processes",
        "cluster",
        "on_round",
        "on_version",
        "on_event",
        "on_failure",
        "quiet",
    }
)
"""Settings that are in the Plan or the seed of a point, or that change no value of its table."""
ORDERS: Final = {True: max, False: min}


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method of a study.

    Attributes:
        plan: Its keys of the Plan, beside those of the settings and of the grid.
        app: Its App; None for that of the study. A method may need other graphs, such as ``Recipe(scaffold=True)``.
    """

    plan: Mapping[str, object] = field(default_factory=dict)
    app: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study.

    Attributes:
        folder: A new folder, or that of this study: then the points that are missing run.
        grid: The values of each key of the Plan, such as ``{"training.learning_rate": (0.01, 0.1)}``. Each method has
            all combinations.
        seeds: The seeds of each combination.
        methods: The methods by name, each a ``Method`` or its keys of the Plan.
        processes: Processes that train the clients of a point.
    """

    folder: Path | str
    grid: Mapping[str, Sequence[object]] = field(default_factory=dict)
    seeds: Sequence[int] = (0,)
    methods: "Mapping[str, Method | Mapping[str, object]]" = field(default_factory=lambda: {"study": Method()})
    processes: int = 1

    def __post_init__(self) -> None:
        grid: Mapping[str, object] = self.grid
        for key, values in grid.items():
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                raise InvalidInput(
                    f"study: grid: {key}: got {shown(values)}, expected a sequence of values such as (0.01, 0.1)",
                    code="FN-1896",
                )
        seeds = list(self.seeds)
        if not seeds or len(set(seeds)) < len(seeds) or not self.methods:
            raise InvalidInput(
                f"study: got seeds {seeds} and {len(self.methods)} methods, expected at least one of each, and each "
                "seed once",
                code="FN-1896",
            )
        for name in self.methods:
            check_name("study: methods", name)

    def run(
        self,
        app: object,
        clients: Partition | int,
        *,
        cohort: int,
        rounds: int,
        settings: SimulationSettings | None = None,
    ) -> "StudyResult":
        """Run the points that have no complete file. Arguments are those of ``simulate``.

        Ctrl-C ends the study: the result then has the points before it.

        Raises:
            InvalidPlan: The Plan of a point is not valid. No simulation has begun.
            InvalidInput: An argument is wrong, or the settings have what the study sets.
            Conflict: Another study uses the folder.
        """
        base = settings or SimulationSettings()
        _check_base(base)
        with held(Path(self.folder), "wait for that study to end, or give another folder"):
            jobs = list(self._jobs(app, clients, {"cohort": cohort, "rounds": rounds}, base))
            points: list[StudyPoint] = []
            for number, job in enumerate(jobs, 1):
                before = StudyPoint.read(job.path)
                is_kept = before is not None and not before.error
                point = before if is_kept else job.run(clients, cohort, rounds)
                if point is None:
                    break
                points.append(point)
                if not base.quiet:
                    sys.stderr.write(f"study: {number} of {len(jobs)}{' (kept)' if is_kept else ''}: {_line(point)}\n")
        return StudyResult(points=tuple(points), is_complete=len(points) == len(jobs))

    def _jobs(
        self, app: object, clients: Partition | int, limits: Mapping[str, int | None], base: SimulationSettings
    ) -> "Iterator[_Job]":
        """Yield the points of the study, each with its checked Plan."""
        (points_folder := Path(self.folder) / "points").mkdir(exist_ok=True)
        apps: list[object] = []
        facts: dict[int, str] = {}
        results = {each.name: getattr(base, each.name) for each in fields(base) if each.name not in NO_RESULT}
        common = digest_of(results)
        for name, given in self.methods.items():
            method = given if isinstance(given, Method) else Method(plan=given)
            own = app if method.app is None else method.app
            if not any(each is own for each in apps):
                apps.append(own)
            number = next(index for index, each in enumerate(apps) if each is own)
            subject = subject_for(own, clients, base)
            if number not in facts:
                facts[number] = _facts(subject, own)
            resumes = isinstance(subject, ModuleSubject) and base.trainer is None
            record = Path(self.folder) / f"app-{number}" if resumes else None
            for chosen, seed in product(product(*self.grid.values()), self.seeds):
                values = dict(zip(self.grid, chosen, strict=True))
                keys = {**_keys(base), **method.plan, **values}
                settings = replace(base, plan=keys, seed=seed, resume=record, processes=self.processes, quiet=True)
                plan = plan_of(subject.name, subject.num_clients, limits, settings)
                point = StudyPoint(method=name, values=values, seed=seed, plan_sha256=plan_digest(plan))
                digest = digest_of((point.plan_sha256, seed, name, facts[number], common))
                yield _Job(app=own, point=point, settings=settings, path=points_folder / f"{digest}.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A point to run: its App, its settings and its file."""

    app: object
    point: StudyPoint
    settings: SimulationSettings
    path: Path

    def run(self, clients: Partition | int, cohort: int, rounds: int) -> StudyPoint | None:
        """Run the simulation and write its file. Return None after Ctrl-C."""
        began_s, error = time.monotonic(), ""
        try:
            result = simulate(self.app, clients, cohort=cohort, rounds=rounds, settings=self.settings)
        except KeyboardInterrupt:
            return None
        except (RunStopped, ClientFailed) as exc:
            result, error = exc.result, str(exc)
        except FaninError as exc:
            result, error = None, str(exc)
        except Exception as exc:  # Any error: the other points do not depend on it.
            LOG.exception("study: a point failed")
            result, error = None, f"{type(exc).__name__}: {exc}"
        if result is not None and not result.is_complete and not error:
            return None
        table = {} if result is None else result.columns()
        point = replace(self.point, seconds=time.monotonic() - began_s, error=error, table=table)
        point.write(self.path)
        if self.settings.resume is not None:
            # Only a simulation that was stopped needs them.
            for file in (Path(self.settings.resume) / "trainings").glob("*.npz"):
                file.unlink()
        return point


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyCurve:
    """The points of a method with the same values of the grid: its seeds.

    Attributes:
        method: The method.
        values: The values of the grid.
        points: The complete points, one for each seed.
    """

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
class StudyResult:
    """The result of a study.

    Attributes:
        points: The points in the order of the study: methods, then the grid, then seeds.
        is_complete: Whether all points have run. False after Ctrl-C.
    """

    points: tuple[StudyPoint, ...]
    is_complete: bool

    @property
    def failures(self) -> tuple[StudyPoint, ...]:
        """The points that failed."""
        return tuple(point for point in self.points if point.error)

    @property
    def curves(self) -> tuple[StudyCurve, ...]:
        """The complete points, by method and values. One of which a seed failed or is missing is left out."""
        groups: dict[str, list[StudyPoint]] = {}
        for point in self.points:
            groups.setdefault(repr((point.method, dict(point.values))), []).append(point)
        num_seeds = max((len(group) for group in groups.values()), default=0)
        return tuple(
            StudyCurve(method=group[0].method, values=group[0].values, points=tuple(group))
            for group in groups.values()
            if len(group) == num_seeds and not any(point.error for point in group)
        )

    def best(self, column: str, *, higher_is_better: bool = True) -> dict[str, StudyCurve]:
        """Return the curve of each method with the best mean of the last values of a column.

        Raises:
            InvalidInput: No complete point has such a column.
        """
        curves = [curve for curve in self.curves if math.isfinite(curve.mean(column))]
        if not curves:
            known = sorted({name for point in self.points for name in point.table})
            raise InvalidInput(
                f"study: got the column {shown(column)}, expected one with a number in each seed of a point: {known}",
                code="FN-1896",
            )
        choose = ORDERS[higher_is_better]
        return {
            method: choose((each for each in curves if each.method == method), key=lambda curve: curve.mean(column))
            for method in dict.fromkeys(curve.method for curve in curves)
        }

    def plot(
        self,
        path: Path | str | None,
        columns: str | Sequence[str],
        *,
        higher_is_better: bool = True,
        form: PlotForm | None = None,
    ) -> "Figure":
        """Draw the best curve of each method by the first column, with a band over its seeds. See ``plot_results``."""
        first = columns if isinstance(columns, str) else columns[0]
        curves = self.best(first, higher_is_better=higher_is_better)
        return plot_results(curves, path, columns=columns, form=form)

    def write_csv(self, path: Path | str) -> None:
        """Write a row for each point: its method, values, seed and Plan, its last values, and its error."""
        keys = list(dict.fromkeys(key for point in self.points for key in point.values))
        names = list(dict.fromkeys(name for point in self.points for name in point.table if name != "seed"))
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["method", *keys, "seed", "plan_sha256", "seconds", "error", *names])
            for point in self.points:
                about = [point.seed, point.plan_sha256, point.seconds, point.error]
                row = [point.method, *(point.values.get(key, "") for key in keys), *about]
                writer.writerow([*row, *(point.last(name) for name in names)])


def _check_base(base: SimulationSettings) -> None:
    """Raise InvalidInput if the settings have what a study sets itself."""
    extra = [name for name in ("seed", "seeds", "resume") if getattr(base, name) not in (0, (), None)]
    extra += ["processes"] if base.processes != 1 else []
    if extra or not isinstance(base.plan, Mapping):
        received = ", ".join(extra) or "a Plan"
        raise InvalidInput(
            f"study: settings: got {received}, expected none: a study has folder, seeds, processes and keys of the "
            "Plan of its own; give the keys of the Plan as a dict",
            code="FN-1896",
        )


def _facts(subject: ModuleSubject | FlowerSubject, app: object) -> str:
    """Return the digest of an app with its code, and of its clients."""
    if isinstance(subject, ModuleSubject):
        return digest_of(subject_of(subject.app, subject.clients))
    return digest_of((app, subject.num_clients))


def _keys(base: SimulationSettings) -> Mapping[str, object]:
    assert isinstance(base.plan, Mapping), "checked at first"
    return base.plan


def _line(point: StudyPoint) -> str:
    values = "".join(f", {key} {value}" for key, value in point.values.items())
    end = point.error or f"{point.last('round'):g} rounds in {point.seconds:.1f} s"
    return f"{point.method}{values}, seed {point.seed}: {end}"
