"""``simulate``: federated training of a torch module on this machine, in one call.

The App is exported as a Bundle of ONNX graphs. The clients are devices of a ``Federation``: the production coordinator
and the production session of a device, on a virtual clock. Each client trains in onnxruntime on its own examples, in
this process or in worker processes. All clients of a process use the same open graphs, so a Round opens them once.
"""

import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import num_held_out
from fanin.clients.testing.clock import run_virtual
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.runtimes.models import model_inputs
from fanin.protos.plans import Plan
from fanin.simulation.course import RowLists, SimulatedRun
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.engines.choice import choose
from fanin.simulation.engines.vectorized import VectorTrainings
from fanin.simulation.result import Result
from fanin.simulation.rows import RoundRow
from fanin.simulation.setup.arguments import check_arguments, plan_of
from fanin.simulation.setup.progress import SimulationProgress
from fanin.simulation.setup.settings import SimulationSettings
from fanin.simulation.setup.termination import exits_at_sigterm
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


def simulate(
    app: "App",
    clients: Partition,
    *,
    cohort: int | None = None,
    rounds: int | None = None,
    settings: SimulationSettings | None = None,
) -> Result:
    """Train an App on simulated clients by federated averaging, or as the Plan says.

    The same arguments give bit-identical Versions in every process on one machine, but for the engine ``auto``, which
    may choose another one next time. ``Result.engine`` names it.

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
        UnsupportedModel: The module cannot be exported, or the engine is ``vmap`` and cannot train it.
        InvalidPlan: A key of the Plan is unknown, or a value is wrong.
        InvalidInput: The cohort is larger than the number of clients, the seed is negative, cohort and rounds are given
            together with a Plan, or the model cannot use the examples.
        FaninError: The Run failed or rests; the message has its reason.
        ClientFailed: The training of a client failed, and ``settings.stop_on_failure`` is set. Otherwise the Round
            continues without it, and the failure is in ``Result.failures``.

    Example:
        ``simulate(app, partition(data, 100, Dirichlet(alpha=0.3)), cohort=10, rounds=20)``
    """
    settings = settings or SimulationSettings()
    check_arguments(app, clients, settings)
    plan = plan_of(app, clients, {"cohort": cohort, "rounds": rounds}, settings)
    with exits_at_sigterm(), tempfile.TemporaryDirectory(prefix="fanin-simulation-") as folder:
        return _simulated(app, clients, plan, settings, Path(folder))


def _simulated(app: "App", clients: Partition, plan: Plan, settings: SimulationSettings, folder: Path) -> Result:
    """Export the App and play its Run. Raises the errors of ``simulate``."""
    from fanin.edge.export.build import export

    progress = SimulationProgress(quiet=settings.quiet)
    key = SigningKey(hashlib.sha256(f"fanin simulation {settings.seed}".encode()).digest())
    with progress.exporting(app.name):
        bundle = export(app, folder / "bundle", key, formats=(FORMAT,)).bundle
    graphs = SharedGraphs()

    def note(row: RoundRow) -> None:
        progress.row(row)
        settings.on_round(row)

    chosen = choose(settings, app, bundle, graphs, plan.cohort.concurrency)
    if chosen.reason:
        progress.show(chosen.reason)
    if chosen.step is None:
        trainings = _trainings(clients, settings, graphs, bundle, folder)
    else:
        trainings = VectorTrainings(chosen.step, graphs, clients, settings.validation_fraction)
    run = SimulatedRun(
        bundle=bundle,
        plan=plan,
        work=_work(clients, plan.training.epochs, settings.validation_fraction),
        devices=settings.devices,
        trainings=trainings,
        graphs=graphs,
        test=None if settings.test is None else _model_examples(settings.test, bundle, graphs),
        seed=settings.seed,
        stops=settings.stop_on_failure,
        on_round=note,
        on_event=settings.on_event,
    )
    try:
        rows = run_virtual(run.play(key))
    except* ClientFailed as group:
        raise _first(group) from None
    finally:
        trainings.close()
    return _result(app, bundle, chosen.engine, rows)


def _work(clients: Partition, epochs: int, validation_fraction: float) -> tuple[int, ...]:
    """Return the examples of one training of each client."""
    return tuple(epochs * (size - num_held_out(size, validation_fraction)) for size in clients.sizes)


def _result(app: "App", bundle: Bundle, engine: str, rows: RowLists) -> Result:
    return Result(
        app=app,
        engine=engine,
        table=bundle.manifest.table,
        rounds=tuple(rows.rounds),
        clients=tuple(rows.clients),
        failures=tuple(rows.failures),
        events=tuple(rows.events),
        parameters=rows.parameters,
        digests=tuple(rows.digests),
        is_complete=rows.is_complete,
    )


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
