"""``simulate``: federated training of a torch module on this machine, in one call.

The App is exported as a Bundle of ONNX graphs. The clients are devices of a ``Federation``: the production coordinator
and the production session of a device, on a virtual clock. Each client trains in onnxruntime on its own examples, in
this process or in worker processes. All clients of a process use the same open graphs, so a Round opens them once.
"""

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fanin.clients.data.examples import Examples, check_examples
from fanin.clients.planfile import parse_plan
from fanin.clients.testing.clock import run_virtual
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.runtimes.models import model_inputs
from fanin.protos.errors import InvalidInput
from fanin.protos.plans import Plan
from fanin.simulation.course import SimulatedRun
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.result import Result
from fanin.simulation.rows import RoundRow
from fanin.simulation.trainers import ClientFailed, SharedGraphs
from fanin.simulation.workers import (
    FORMAT,
    LocalTrainings,
    Trainings,
    WorkerFiles,
    WorkerPool,
    write_partition,
)

if TYPE_CHECKING:
    from fanin.edge.export.app import App


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """The options of a simulation.

    Attributes:
        test: Examples on which each Version is evaluated, in float and in int8.
        plan: Further keys of the Plan with their values, by dotted name (docs/plan.md); or a Plan.
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
        cohort: Clients that train in a Round. None if ``settings.plan`` is a Plan.
        rounds: Rounds to train. None if ``settings.plan`` is a Plan.
        settings: Test data, further keys of the Plan, and seed.

    Returns:
        The rows of all Rounds and clients, and the final parameters. Ctrl-C ends the simulation, and the result has the
        Rounds that have ended.

    Raises:
        UnsupportedModel: The module cannot be exported.
        InvalidPlan: A key of the Plan is unknown, or a value is wrong.
        InvalidInput: The cohort is larger than the number of clients, the seed is negative, cohort and rounds are given
            together with a Plan, or the model cannot use the examples.
        FaninError: The Run failed or rests; the message has its reason.
        ClientFailed: The training of a client failed, and ``settings.stop_on_failure`` is set. Otherwise the Round
            continues without it, and the failure is in ``Result.failures``.

    Example:
        ``simulate(app, partition(data, 100, Dirichlet(alpha=0.3)), cohort=10, rounds=20)``
    """
    from fanin.edge.export.build import export

    _check_kinds(app, clients)
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
        graphs = SharedGraphs()
        trainings = _trainings(clients, settings, graphs, bundle, Path(folder))
        run = SimulatedRun(
            bundle=bundle,
            plan=plan,
            num_clients=len(clients),
            trainings=trainings,
            graphs=graphs,
            test=None if settings.test is None else _model_examples(settings.test, bundle, graphs),
            seed=settings.seed,
            stops=settings.stop_on_failure,
            on_round=settings.on_round,
        )
        try:
            rows = run_virtual(run.play(key))
        except* ClientFailed as group:
            raise _first(group) from None
        finally:
            trainings.close()
    return Result(
        app=app,
        table=bundle.manifest.table,
        rounds=tuple(rows.rounds),
        clients=tuple(rows.clients),
        failures=tuple(rows.failures),
        parameters=rows.parameters,
        digests=tuple(rows.digests),
        is_complete=rows.is_complete,
    )


def _plan(app: "App", cohort: int | None, rounds: int | None, settings: SimulationSettings) -> Plan:
    """Return the Plan of a simulation. Raises InvalidPlan and InvalidInput."""
    if not 0.0 < settings.validation_fraction < 1.0:
        raise InvalidInput(
            f"simulate: got validation_fraction {settings.validation_fraction}, expected between 0 and 1: each client "
            "evaluates the Versions on a part of its examples"
        )
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


def _check_kinds(app: object, clients: object) -> None:
    """Raise InvalidInput unless these are an App and a Partition."""
    from fanin.edge.export.app import App

    if not isinstance(app, App) or not isinstance(clients, Partition):
        raise InvalidInput(
            f"simulate: got {type(app).__name__} and {type(clients).__name__}, expected an App and a Partition; see "
            "fanin.edge.export.App and fanin.simulation.partition"
        )


def _check_data(app: "App", clients: Partition, test: Examples | None) -> None:
    """Raise InvalidInput unless the model can use the examples. ``preprocess`` checks the shape of raw ones."""
    accepted = {str(part.dtype).removeprefix("torch.") for part in (app.calibration, app.raw) if part is not None}
    for what, examples in (("clients", clients.examples), ("test", test)):
        if examples is None:
            continue
        if str(examples.x.dtype) not in accepted:
            raise InvalidInput(
                f"simulate: {what}: got x {examples.x.dtype}, expected {' or '.join(sorted(accepted))} as in the App's "
                "calibration or raw data; convert it with astype"
            )
        if app.preprocess is not None:
            continue
        try:
            check_examples(examples, tuple(app.calibration.shape[1:]), app.num_classes)
        except InvalidInput as exc:
            raise InvalidInput(f"simulate: {what}: {str(exc).removeprefix('examples: ')}") from exc


def _model_examples(examples: Examples, bundle: Bundle, graphs: SharedGraphs) -> Examples:
    """Return examples as inputs of the model: what ``preprocess`` makes of raw ones."""
    return Examples(x=model_inputs(bundle, examples.x, graphs.preprocess(bundle)), y=examples.y)


def _trainings(
    clients: Partition, settings: SimulationSettings, graphs: SharedGraphs, bundle: Bundle, folder: Path
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


def _first(group: BaseException) -> BaseException:
    """Return the first error of a group of errors, which may contain further groups."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
