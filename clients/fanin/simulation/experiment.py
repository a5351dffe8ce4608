"""``simulate``: federated training of a torch module on this machine, in one call.

The App is exported as a Bundle of ONNX graphs. The clients are devices of a ``Federation``: the production coordinator
and the production session of a device, on a virtual clock. Each client trains in onnxruntime on its own examples, in
this process or in worker processes. All clients of a process use the same open graphs, so a Round opens them once.
"""

import asyncio
import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.examples import Examples, check_examples
from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.graphs import BundleGraphs
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.updates import Change
from fanin.clients.planfile import parse_plan
from fanin.clients.testing.clock import run_virtual
from fanin.clients.testing.habits import Habits
from fanin.clients.testing.member import Member
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import Predict
from fanin.edge.runtimes.measure import measure
from fanin.edge.runtimes.models import model_inputs
from fanin.edge.runtimes.quality import Quality
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.control import RoundClosed, RunRested, RunState, VersionPublished
from fanin.protos.errors import FaninError, InvalidInput
from fanin.protos.plans import Plan
from fanin.server.aggregation.parameters import load_parameters
from fanin.simulation.federation import Federation
from fanin.simulation.partitioning import Partition
from fanin.simulation.result import Result
from fanin.simulation.rows import ClientFailure, ClientRow, RoundRow, client_name, client_rows, initial_row, round_row
from fanin.simulation.workers import (
    FORMAT,
    LocalTrainings,
    PendingTraining,
    Trainings,
    WorkerFiles,
    WorkerPool,
    write_partition,
)

if TYPE_CHECKING:
    from fanin.edge.export.app import App

RUN: Final = "run"
PIECE_BYTES: Final = 1 << 20
STEADY: Final = Habits(work_s=(1.0, 1.1))
"""Every client takes about a virtual second to train. The fewer virtual seconds pass, the fewer idle clients poll."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """What a simulation does beside training.

    Attributes:
        test: Examples on which each Version is evaluated, in float and in int8.
        plan: Further keys of the Plan with their values, by dotted name (docs/plan.md); or a whole Plan.
        seed: Seed of all random choices, 0 or more.
        validation_fraction: Share of each client's examples that it holds out for its own evaluation.
        processes: Processes that train clients side by side; 1 trains them in this process. The Versions are the same.
        stop_on_failure: Whether an error in the training of a client ends the simulation.
        on_round: Called with each row as soon as its Round has ended.
    """

    test: Examples | None = None
    plan: Mapping[str, object] | Plan = field(default_factory=dict)
    seed: int = 0
    validation_fraction: float = 0.1
    processes: int = 1
    stop_on_failure: bool = False
    on_round: Callable[[RoundRow], None] = lambda row: None


def simulate(
    app: "App",
    clients: Partition,
    *,
    cohort: int | None = None,
    rounds: int | None = None,
    settings: SimulationSettings | None = None,
) -> Result:
    """Train an App on simulated clients by federated averaging, or as the Plan says.

    The same arguments give bit-identical Versions in every process on one machine.

    Args:
        app: The App. Its module keeps its parameters.
        clients: The examples of each client.
        cohort: Clients that train in a Round. None if ``settings.plan`` is a whole Plan.
        rounds: Rounds to train. None if ``settings.plan`` is a whole Plan.
        settings: Test data, further keys of the Plan, and seed.

    Returns:
        The rows of all Rounds and clients, and the final parameters. Ctrl-C ends the simulation, and the result has the
        Rounds that have ended.

    Raises:
        UnsupportedModel: The module cannot be exported.
        InvalidPlan: A key of the Plan is unknown, or a value is wrong.
        InvalidInput: The cohort is larger than the number of clients, the seed is negative, cohort and rounds are given
            beside a whole Plan, or the model cannot use the examples.
        FaninError: The Run failed or rests; the message has its reason.
        ClientFailed: The training of a client failed, and ``settings.stop_on_failure`` is set. Otherwise the Round goes
            on without it, and the failure is in ``Result.failures``.

    Example:
        ``simulate(app, partition(data, 100, Dirichlet(alpha=0.3)), cohort=10, rounds=20)``
    """
    from fanin.edge.export.build import export

    settings = settings or SimulationSettings()
    _check_data(app, clients, settings.test)
    plan = _plan(app, cohort, rounds, settings)
    if plan.cohort.concurrency > len(clients):
        raise InvalidInput(
            f"simulate: got a cohort of {plan.cohort.concurrency}, expected at most the {len(clients)} clients"
        )
    with tempfile.TemporaryDirectory(prefix="fanin-simulation-") as folder:
        key = SigningKey(hashlib.sha256(f"fanin simulation {settings.seed}".encode()).digest())
        bundle = export(app, Path(folder) / "bundle", key, formats=(FORMAT,)).bundle
        graphs = _SharedGraphs()
        trainings = _trainings(clients, settings, graphs, bundle, Path(folder))
        simulation = _Simulation(
            app=app,
            bundle=bundle,
            num_clients=len(clients),
            plan=plan,
            settings=settings,
            test=None if settings.test is None else _model_examples(settings.test, bundle, graphs),
            graphs=graphs,
            trainings=trainings,
        )
        try:
            return run_virtual(simulation.run(key))
        except* ClientFailed as group:
            raise _first(group) from None
        finally:
            trainings.close()


def _plan(app: "App", cohort: int | None, rounds: int | None, settings: SimulationSettings) -> Plan:
    """Return the Plan of a simulation. Raises InvalidPlan and InvalidInput."""
    if settings.processes < 1:
        raise InvalidInput(f"simulate: got {settings.processes} processes, expected at least 1")
    if settings.seed < 0:
        raise InvalidInput(f"simulate: got seed {settings.seed}, expected 0 or more")
    if isinstance(settings.plan, Plan):
        if cohort is not None or rounds is not None:
            raise InvalidInput("simulate: got cohort or rounds beside a whole Plan, expected them in the Plan")
        return settings.plan
    if cohort is None or rounds is None:
        raise InvalidInput("simulate: got no cohort or no rounds, expected both, or a whole Plan in the settings")
    first = {
        "name": app.name,
        "bundle": "bundle",
        "cohort.concurrency": cohort,
        "training.seed": settings.seed,
        "stop.max_rounds": rounds,
    }
    overrides = [f"{key}={_toml(value)}" for key, value in (first | dict(settings.plan)).items()]
    return parse_plan("", "simulate", overrides).plan


def _toml(value: object) -> str:
    """Return a value in TOML. A text is always quoted."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            escaped = "".join(f"\\u{ord(char):04x}" if ord(char) < 32 or char in '\\"\x7f' else char for char in value)
            return f'"{escaped}"'
        case Mapping():
            return "{" + ", ".join(f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case _:
            return str(value)


def _check_data(app: "App", clients: Partition, test: Examples | None) -> None:
    """Raise InvalidInput unless the model can use the examples. Raw examples are checked by ``preprocess``."""
    if app.preprocess is not None:
        return
    for what, examples in (("clients", clients.examples), ("test", test)):
        if examples is None:
            continue
        try:
            check_examples(examples, tuple(app.calibration.shape[1:]), app.num_classes)
        except InvalidInput as exc:
            raise InvalidInput(f"simulate: {what}: {str(exc).removeprefix('examples: ')}") from exc


def _model_examples(examples: Examples, bundle: Bundle, graphs: "_SharedGraphs") -> Examples:
    """Return examples as inputs of the model: what ``preprocess`` makes of raw ones."""
    return Examples(x=model_inputs(bundle, examples.x, graphs.preprocess(bundle)), y=examples.y)


def _trainings(
    clients: Partition, settings: SimulationSettings, graphs: "_SharedGraphs", bundle: Bundle, folder: Path
) -> Trainings:
    """Return where the clients train: in this process, or in worker processes."""
    if settings.processes == 1:
        return LocalTrainings(graphs, clients, settings.validation_fraction)
    write_partition(clients, folder / "data")
    files = WorkerFiles(
        bundle=folder / "bundle",
        data=folder / "data",
        publisher=bundle.signed.public_key,
        validation_fraction=settings.validation_fraction,
    )
    return WorkerPool(settings.processes, files)


class ClientFailed(Exception):
    """The training of a client raised an error, and the settings stop the simulation then."""


def _first(group: BaseException) -> BaseException:
    """Return the first error of a group of errors, which may contain further groups."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


class _ClientTrainer:
    """The Trainer of one client. It notes each error of its training with the client and the Round."""

    def __init__(self, client: int, crew: "_Crew") -> None:
        self._client = client
        self._crew = crew
        self._begun: tuple[str, PendingTraining] | None = None

    @property
    def runtime(self) -> str:
        """See Trainer."""
        return self._crew.runtime

    @property
    def graph_format(self) -> str:
        """See Trainer."""
        return FORMAT

    def begin(self, model: OpenedModel, assignment: m.Assignment) -> None:
        """See EarlyTrainer."""
        self._begun = assignment.assignment_id, self._crew.trainings.begin(self._client, model, assignment)

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """See Trainer. Raises ClientFailed if the settings stop the simulation, and the client's error otherwise."""
        assert self._begun is not None, "a device begins each training"
        begun_for, pending = self._begun
        assert begun_for == assignment.assignment_id, f"begun for {begun_for}, not for {assignment.assignment_id}"
        try:
            return pending()
        except Exception as exc:  # Of any kind: the store, and what the App's data needs, may be the user's code.
            failure = ClientFailure(round=assignment.round, client=self._client, error=str(exc))
            self._crew.failures.append(failure)
            if self._crew.stops:
                raise ClientFailed(f"simulate: {failure}") from exc
            if isinstance(exc, FaninError | ValueError):
                raise
            # Another error would end the federation. As InvalidInput it ends this client's part in the Round.
            raise InvalidInput(f"training: {type(exc).__name__}: {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crew:
    """What the trainers of all clients share."""

    trainings: Trainings
    runtime: str
    failures: list[ClientFailure]
    stops: bool


class _SharedGraphs(BundleGraphs):
    """The open graphs of all clients. It keeps ``infer`` of the newest Version, too: all clients of a Round use it."""

    def __init__(self) -> None:
        super().__init__(open_runtime(FORMAT))
        self._newest: tuple[str, Float32s, Predict] | None = None

    def open_predict(self, bundle: Bundle, parameters: Float32s) -> Predict:
        if self._newest is not None:
            digest, known, predict = self._newest
            if digest == bundle.sha256 and np.array_equal(known, parameters):
                return predict
        predict = super().open_predict(bundle, parameters)
        self._newest = (bundle.sha256, parameters.copy(), predict)
        return predict


@dataclass(slots=True, kw_only=True)
class _Rows:
    """The rows so far."""

    rounds: list[RoundRow] = field(default_factory=list)
    clients: list[ClientRow] = field(default_factory=list)
    failures: list[ClientFailure] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Simulation:
    app: "App"
    bundle: Bundle
    num_clients: int
    plan: Plan
    settings: SimulationSettings
    test: Examples | None
    graphs: "_SharedGraphs"
    trainings: Trainings

    async def run(self, publisher: SigningKey) -> Result:
        """Run the Plan to its end, or until Ctrl-C."""
        rows, is_complete = _Rows(), False
        async with Federation(seed=self.settings.seed, piece_bytes=PIECE_BYTES) as federation:
            await federation.start_run(RUN, self.plan, self.bundle, publisher)
            rows.digests.append(self.bundle.manifest.artifacts[self.bundle.manifest.initial].sha256)
            rows.rounds.append(initial_row(await self._quality(federation, 0)))
            self.settings.on_round(rows.rounds[0])
            crew = _Crew(
                trainings=self.trainings,
                runtime=self.graphs.name,
                failures=rows.failures,
                stops=self.settings.stop_on_failure,
            )
            for index in range(self.num_clients):
                member = Member(device=client_name(index), trainer=_ClientTrainer(index, crew), habits=STEADY)
                federation.join(member, self.bundle)
            try:
                await self._follow(federation, rows)
                is_complete = True
            except asyncio.CancelledError:
                # After Ctrl-C, the Rounds that have ended are the result. If a client has failed instead, the
                # federation raises its error at the end of this block.
                task = asyncio.current_task()
                assert task is not None, "a coroutine runs in a task"
                task.uncancel()
            parameters = await self._parameters(federation, rows.rounds[-1].version)
        return Result(
            app=self.app,
            bundle=self.bundle,
            rounds=tuple(rows.rounds),
            clients=tuple(rows.clients),
            failures=tuple(rows.failures),
            parameters=parameters,
            digests=tuple(rows.digests),
            is_complete=is_complete,
        )

    async def _follow(self, federation: Federation, rows: "_Rows") -> None:
        """Add the rows of each Version until the Run ends. Raises FaninError if the Run does not finish."""
        num_accepted = 0
        async for recorded in federation.watch(RUN):
            event = recorded.event
            match event:
                case RoundClosed():
                    num_accepted = event.num_accepted
                case VersionPublished():
                    quality = await self._quality(federation, event.number)
                    updates = await federation.state.stores.rounds.updates(RUN, event.round)
                    now = asyncio.get_running_loop().time()
                    rows.clients += client_rows(updates, event.round)
                    rows.digests.append(event.version_sha256)
                    rows.rounds.append(round_row(event, now, num_accepted, quality))
                    self.settings.on_round(rows.rounds[-1])
                case RunRested() if event.state is not RunState.FINISHED:
                    failures = rows.failures
                    first = f"; first of {len(failures)} failures: {failures[0]}" if failures else ""
                    raise FaninError(f"simulate: the run is {event.state.name.lower()}: {event.reason}{first}")

    async def _quality(self, federation: Federation, number: int) -> Quality | None:
        """Return the quality of a Version on the test data; None without test data."""
        if self.test is None:
            return None
        parameters = await self._parameters(federation, number)
        batches = batches_in_order(self.test, self.bundle.manifest.batch_size)
        return measure(self.graphs, self.bundle, parameters, batches)

    async def _parameters(self, federation: Federation, number: int) -> Float32s:
        version = await federation.state.stores.runs.version(RUN, number)
        assert version is not None, "the event of a version follows its record"
        return load_parameters(federation.state.blobs, version, self.bundle.manifest.table)
