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

import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Final

from fanin.edge.files import held
from fanin.protos.errors import FaninError, InvalidInput, InvalidPlan
from fanin.protos.names import MAX_NAME_CHARS, check_name, check_text_line
from fanin.protos.plans.keys import shown
from fanin.protos.plans.named import passing
from fanin.simulation.arguments import plan_of
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.devices.work import ClientWork
from fanin.simulation.experiment import check_simulation, simulate
from fanin.simulation.flower import FlowerSubject
from fanin.simulation.grids.points import StudyPoint, plan_digest
from fanin.simulation.grids.results import StudyResult
from fanin.simulation.preparation import ModuleSubject, subject_for
from fanin.simulation.result import ClientFailed, Result, RunStopped
from fanin.simulation.settings import SimulationSettings
from fanin.simulation.studies.digests import digest_of
from fanin.simulation.studies.records import subject_of
from fanin.simulation.studies.tests import TestData

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
        "work",
    }
)
"""Settings that are in the Plan, the seed or the work of a point, or that change no value of its table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method of a study.

    Attributes:
        plan: Its keys of the Plan, beside those of the settings and of the grid.
        app: Its App; None for that of the study. A method may need other graphs, such as ``Recipe(scaffold=True)``.
        work: The work of its clients; None for that of the settings. FedProx may count the partial work of stragglers
            that FedAvg drops.
    """

    plan: Mapping[str, object] = field(default_factory=dict)
    app: object = None
    work: ClientWork | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyData:
    """A data set of a study.

    Attributes:
        clients: The examples of each client, or the number of clients of a Flower app.
        test: Its test data, as in SimulationSettings; None for those of the settings.
    """

    clients: Partition | int
    test: "TestData | Mapping[str, TestData] | None" = None


OfStudy = StudyData | Partition | int | Mapping[str, StudyData | Partition | int]
"""One data set, or several by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study.

    Attributes:
        folder: A new folder, or that of this study: then the points that are missing run.
        grid: The values of each key of the Plan, such as ``{"training.learning_rate": (0.01, 0.1)}``. Each method has
            all combinations.
        seeds: The seeds of each combination.
        methods: The methods by name, each a ``Method`` or its keys of the Plan. A name is a line of text, such as
            "FedProx, mu = 0": the plot has it.
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
        given: object = self.seeds
        if isinstance(given, str) or not isinstance(given, Sequence) or not all(map(_is_seed, given)):
            raise InvalidInput(
                f"study: seeds: got {shown(given)}, expected a sequence of integers of 0 or more, such as (0, 1, 2)",
                code="FN-1172",
            )
        seeds = list(self.seeds)
        if not seeds or len(set(seeds)) < len(seeds) or not self.methods:
            raise InvalidInput(
                f"study: got seeds {seeds} and {len(self.methods)} methods, expected at least one of each, and each "
                "seed once",
                code="FN-1896",
            )
        for name in self.methods:
            check_text_line("study: methods", name, MAX_NAME_CHARS)

    def run(
        self,
        app: object,
        clients: OfStudy,
        *,
        cohort: int,
        rounds: int,
        settings: SimulationSettings | None = None,
    ) -> StudyResult:
        """Run the points that have no complete file. Arguments are those of ``simulate``.

        ``clients`` may be several data sets by name, each a ``StudyData`` or a Partition.

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
                point = before if is_kept else job.run(cohort, rounds)
                if point is None:
                    break
                points.append(point)
                if not base.quiet:
                    sys.stderr.write(f"study: {number} of {len(jobs)}{' (kept)' if is_kept else ''}: {_line(point)}\n")
        directions = {name: metric.higher_is_better for name, metric in base.own_metrics.items()}
        return StudyResult(points=tuple(points), is_complete=len(points) == len(jobs), directions=directions)

    def _jobs(
        self, app: object, clients: OfStudy, limits: Mapping[str, int | None], base: SimulationSettings
    ) -> "Iterator[_Job]":
        """Yield the points of the study, each with its checked Plan."""
        (Path(self.folder) / "points").mkdir(exist_ok=True)
        # Apps by identity: two of them may be equal and have other code.
        apps: list[tuple[object, str]] = []
        facts: dict[int, str] = {}
        for data, name in product(data_sets(clients), self.methods):
            given, part = self.methods[name], data_sets(clients)[data]
            method = given if isinstance(given, Method) else Method(plan=given)
            own = app if method.app is None else method.app
            if not any(each is own and of == data for each, of in apps):
                apps.append((own, data))
            number = next(index for index, (each, of) in enumerate(apps) if each is own and of == data)
            work = base.work if method.work is None else method.work
            settings = replace(base, work=work, test=base.test if part.test is None else part.test)
            subject = subject_for(own, part.clients, settings)
            if number not in facts:
                facts[number] = _facts(subject, own)
            resumes = isinstance(subject, ModuleSubject) and base.trainer is None
            record = Path(self.folder) / f"app-{number}" if resumes else None
            settings = replace(settings, resume=record, processes=self.processes, quiet=True)
            job = _Job(app=own, data=data, method=name, clients=part.clients, settings=settings)
            yield from self._of_method(job, method, (facts[number], limits, subject))

    def _of_method(
        self,
        job: "_Job",
        method: Method,
        about: tuple[str, Mapping[str, int | None], ModuleSubject | FlowerSubject],
    ) -> "Iterator[_Job]":
        """Yield the points of a method on a data set."""
        facts, limits, subject = about
        base = job.settings
        common = digest_of({each.name: getattr(base, each.name) for each in fields(base) if each.name not in NO_RESULT})
        for chosen, seed in product(product(*self.grid.values()), self.seeds):
            values = dict(zip(self.grid, chosen, strict=True))
            settings = replace(base, plan={**_keys(base), **method.plan, **values}, seed=seed)
            with passing(settings.passed_parts):
                try:
                    plan = plan_of(subject.name, subject.num_clients, limits, settings)
                    check_simulation(subject, plan, settings)
                except InvalidPlan as exc:
                    raise InvalidPlan(f"study: {_label(job.data, job.method, values)}: {exc}", code=exc.code) from exc
            sha256 = plan_digest(plan)
            point = StudyPoint(data=job.data, method=job.method, values=values, seed=seed, plan_sha256=sha256)
            work = base.work or ClientWork()
            digest = digest_of((sha256, seed, job.data, job.method, facts, work, common))
            path = Path(self.folder) / "points" / f"{digest}.json"
            yield replace(job, settings=settings, place=(point, path))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A point to run: its App, its data set and settings, and its file."""

    app: object
    data: str
    method: str
    clients: Partition | int
    settings: SimulationSettings
    place: tuple[StudyPoint, Path] | None = None

    @property
    def point(self) -> StudyPoint:
        """The point, without its result."""
        assert self.place is not None, "a job of a point"
        return self.place[0]

    @property
    def path(self) -> Path:
        """The file of the point."""
        assert self.place is not None, "a job of a point"
        return self.place[1]

    def run(self, cohort: int, rounds: int) -> StudyPoint | None:
        """Run the simulation and write its file. Return None after Ctrl-C."""
        began_s, error = time.monotonic(), ""
        try:
            result = simulate(self.app, self.clients, cohort=cohort, rounds=rounds, settings=self.settings)
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
        table = {} if result is None else _table(result)
        point = replace(self.point, seconds=time.monotonic() - began_s, error=error, table=table)
        point.write(self.path)
        if self.settings.resume is not None:
            # Only a simulation that was stopped needs them.
            for file in (Path(self.settings.resume) / "trainings").glob("*.npz"):
                file.unlink()
        return point


def data_sets(clients: OfStudy) -> dict[str, StudyData]:
    """Return the data sets by name. One without a name has the name ""."""
    several = clients if isinstance(clients, Mapping) else {"": clients}
    for name in several if isinstance(clients, Mapping) else ():
        check_name("study: data sets", name)
    if not several:
        raise InvalidInput("study: got no data set, expected at least one", code="FN-1896")
    return {name: each if isinstance(each, StudyData) else StudyData(clients=each) for name, each in several.items()}


def _is_seed(seed: object) -> bool:
    return isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0


def _check_base(base: SimulationSettings) -> None:
    """Raise InvalidInput if the settings have what a study sets itself."""
    if not isinstance(base.plan, Mapping):
        raise InvalidInput(
            f"study: settings: plan: got {shown(base.plan)}, expected keys of the Plan as a dict, such as "
            "{'training.learning_rate': 0.1}",
            code="FN-1896",
        )
    extra = [name for name in ("seed", "seeds", "resume") if getattr(base, name) not in (0, (), None)]
    extra += ["processes"] if base.processes != 1 else []
    if extra:
        raise InvalidInput(
            f"study: settings: got {', '.join(extra)}, expected none: a study has folder, seeds and processes of its "
            "own",
            code="FN-1896",
        )


def _facts(subject: ModuleSubject | FlowerSubject, app: object) -> str:
    """Return the digest of an app with its code, and of its clients."""
    if isinstance(subject, ModuleSubject):
        return digest_of(subject_of(subject.app, subject.clients))
    return digest_of((app, subject.num_clients))


def _table(result: Result) -> dict[str, list[float]]:
    """Return the columns of a result, and the summary of the quality for each client in the row of the last Round."""
    table = {name: list(column) for name, column in result.columns().items()}
    before = [math.nan] * (len(result.rounds) - 1)
    for name, summary in result.per_client_summary.items():
        table[f"per_client.mean.{name}"] = [*before, summary.mean]
        table[f"per_client.worst_decile.{name}"] = [*before, summary.worst_decile]
    return table


def _keys(base: SimulationSettings) -> Mapping[str, object]:
    assert isinstance(base.plan, Mapping), "checked at first"
    return base.plan


def _line(point: StudyPoint) -> str:
    end = point.error or f"{point.last('round'):g} rounds in {point.seconds:.1f} s"
    return f"{_label(point.data, point.method, point.values)}, seed {point.seed}: {end}"


def _label(data: str, method: str, values: Mapping[str, object]) -> str:
    return f"{data}{', ' if data else ''}{method}" + "".join(f", {key} {value}" for key, value in values.items())
