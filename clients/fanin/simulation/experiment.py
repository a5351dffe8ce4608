"""``simulate``: federated training of a torch module on this machine, in one call.

The App is exported as a Bundle of ONNX graphs. The clients are devices of a ``Federation``: the production coordinator
and the production session of a device, on a virtual clock. Each client trains in onnxruntime on its own examples, in
this process or in worker processes. All clients of a process use the same open graphs, so a Round opens them once.
"""

import hashlib
import tempfile
from dataclasses import dataclass, replace
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
from fanin.simulation.result import BestVersion, Result
from fanin.simulation.rows import RoundRow
from fanin.simulation.setup.arguments import check_arguments, plan_of
from fanin.simulation.setup.progress import SimulationProgress
from fanin.simulation.setup.settings import SimulationSettings
from fanin.simulation.setup.termination import exits_at_sigterm
from fanin.simulation.studies.baseline import Baseline, pooled
from fanin.simulation.studies.records import BUNDLE, RecordedTrainings, RecordFolder, subject_of
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
    app = _started(app, settings)
    limits = {"cohort": cohort, "rounds": rounds}
    studies = [(each, plan_of(app, clients, limits, each)) for each in settings.each_seed]
    results: list[Result] = []
    with exits_at_sigterm(), tempfile.TemporaryDirectory(prefix="fanin-simulation-") as folder:
        exported = _exported(app, clients, settings, Path(folder))
        for each, plan in studies:
            results.append(_simulated(exported, clients, plan, each))
            if not results[-1].is_complete:
                break
    return replace(results[0], repeats=tuple(results)) if settings.seeds else results[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exported:
    """An App that is ready for its simulations, and the folder of its Bundle."""

    app: "App"
    bundle: Bundle
    key: SigningKey
    folder: Path
    progress: SimulationProgress
    record: RecordFolder | None


def _started(app: "App", settings: SimulationSettings) -> "App":
    """Return the App with the parameters from which the training starts."""
    from fanin.edge.export.prepare import with_state

    return app if settings.initial is None else with_state(app, settings.initial)


def _exported(app: "App", clients: Partition, settings: SimulationSettings, folder: Path) -> _Exported:
    """Export the App, or open the Bundle of the record. Raises the errors of ``simulate``."""
    from fanin.edge.export.build import export

    progress, key = SimulationProgress(quiet=settings.quiet), SigningKey(hashlib.sha256(b"fanin simulation").digest())
    record = None
    if settings.resume is not None:
        record = RecordFolder(
            settings.resume, subject_of(app, clients, (settings.validation_fraction, settings.engine))
        )
        folder = record.folder
    bundle = None if record is None else record.bundle(key.public)
    if bundle is None:
        with progress.exporting(app.name):
            bundle = export(app, folder / BUNDLE, key, formats=(FORMAT,)).bundle
    return _Exported(app=app, bundle=bundle, key=key, folder=folder, progress=progress, record=record)


def _simulated(exported: _Exported, clients: Partition, plan: Plan, settings: SimulationSettings) -> Result:
    """Play the Run of an App. Raises the errors of ``simulate``."""
    bundle, graphs = exported.bundle, SharedGraphs()

    def note(row: RoundRow) -> None:
        exported.progress.row(row)
        settings.on_round(row)

    chosen = choose(settings, exported.app, bundle, graphs, plan.cohort.concurrency)
    if chosen.reason:
        exported.progress.show(chosen.reason)
    with tempfile.TemporaryDirectory(prefix="fanin-simulation-") as data:
        if chosen.step is None:
            trainings = _trainings(clients, settings, graphs, exported, Path(data))
        else:
            trainings = VectorTrainings(chosen.step, graphs, clients, settings.validation_fraction)
        test = None if settings.test is None else _model_examples(settings.test, bundle, graphs)
        run = SimulatedRun(
            bundle=bundle,
            plan=plan,
            work=_work(clients, plan.training.epochs, settings.validation_fraction),
            devices=settings.devices,
            trainings=trainings if exported.record is None else RecordedTrainings(trainings, exported.folder),
            graphs=graphs,
            test=test,
            seed=settings.seed,
            stops=settings.stop_on_failure,
            on_round=note,
            on_event=settings.on_event,
        )
        try:
            rows = run_virtual(run.play(exported.key))
        except* ClientFailed as group:
            raise _first(group) from None
        finally:
            trainings.close()
    result = _result(exported, chosen.engine, rows)
    if not settings.baseline:
        return result
    exported.progress.show("training the centralized baseline")
    train = _model_examples(pooled(clients, settings.validation_fraction), bundle, graphs)
    baseline = Baseline(bundle=bundle, graphs=graphs, train=train, test=test, training=plan.training)
    return replace(result, baseline=baseline.rows(result.rounds, result.clients))


def _work(clients: Partition, epochs: int, validation_fraction: float) -> tuple[int, ...]:
    """Return the examples of one training of each client."""
    return tuple(epochs * (size - num_held_out(size, validation_fraction)) for size in clients.sizes)


def _result(exported: _Exported, engine: str, rows: RowLists) -> Result:
    table = exported.bundle.manifest.table
    return Result(
        app=exported.app,
        engine=engine,
        table=table,
        rounds=tuple(rows.rounds),
        clients=tuple(rows.clients),
        failures=tuple(rows.failures),
        events=tuple(rows.events),
        parameters=rows.parameters,
        best=rows.best and BestVersion(app=exported.app, table=table, row=rows.best[0], parameters=rows.best[1]),
        digests=tuple(rows.digests),
        is_complete=rows.is_complete,
    )


def _model_examples(examples: Examples, bundle: Bundle, graphs: SharedGraphs) -> Examples:
    """Return examples as inputs of the model: what ``preprocess`` makes of raw ones."""
    return Examples(x=model_inputs(bundle, examples.x, graphs.preprocess(bundle)), y=examples.y)


def _trainings(
    clients: Partition, settings: SimulationSettings, graphs: SharedGraphs, exported: _Exported, data: Path
) -> Trainings:
    """Return where the clients train: in this process, or in worker processes."""
    if settings.processes == 1:
        return LocalTrainings(graphs, clients, settings.validation_fraction)
    write_partition(clients, data / "data")
    files = WorkerFiles(
        bundle=exported.folder / BUNDLE,
        data=data / "data",
        publisher=exported.bundle.signed.public_key,
        validation_fraction=settings.validation_fraction,
    )
    return WorkerPool(settings.processes, files)


def _first(group: BaseException) -> BaseException:
    """Return the first error of a group of errors, which may contain further groups."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
