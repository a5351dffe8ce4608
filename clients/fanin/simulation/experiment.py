"""``simulate``: federated training on simulated clients of this machine, in one call.

A torch App is exported as a Bundle of ONNX graphs. A Flower app is called as on a device, and its Bundle has the
initial arrays. The clients are devices of a ``Federation``: the production coordinator and the production session of a
device, on a virtual clock. They train in this process, or as tasks of a backend. All clients of a process use the same
open graphs, so a Round opens them once.
"""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import num_held_out
from fanin.clients.flower.project import resolved
from fanin.edge.bundles.arrays import read_layout
from fanin.edge.bundles.manifest import NO_GRAPHS
from fanin.edge.codecs.grid import first_change_notes
from fanin.edge.runtimes.base import VersionValues
from fanin.edge.tensors import Float32s
from fanin.protos.plans import Plan
from fanin.protos.plans.named import passing
from fanin.server.evaluation.metrics import VersionMetrics
from fanin.server.runs.admission import check_no_graphs
from fanin.server.runs.data import DataSource, NoData
from fanin.server.runs.recorded_setup import check_names
from fanin.server.selection.policies import POLICIES
from fanin.server.storage.protocols.files import BlobReader
from fanin.server.strategies.process import Strategies
from fanin.simulation.after.baseline import with_baseline
from fanin.simulation.after.per_client import PerClient
from fanin.simulation.arguments import check_devices, check_plan, plan_of
from fanin.simulation.backends.backend import Backend, ThisProcess
from fanin.simulation.backends.opening import open_backend
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.devices.work import ClientWork
from fanin.simulation.engines.choice import Chosen, Workload, choose
from fanin.simulation.engines.exporting import check_no_int8, choose_vmap
from fanin.simulation.engines.vectorized import VectorTrainings
from fanin.simulation.flower import FlowerSubject, FlowerTrainings
from fanin.simulation.host import exits_at_sigterm, quiet_coordinator
from fanin.simulation.preparation import ModuleSubject, Preparation, prepare, subject_for
from fanin.simulation.result import (
    BestVersion,
    ClientFailed,
    KeptVersion,
    Result,
    RunStopped,
    code_of,
    text_of,
    total_of,
)
from fanin.simulation.rows import ClientFailure, OnFailure, RoundRow, SimulationEvent
from fanin.simulation.settings import SimulationSettings, checked
from fanin.simulation.simulated_run import EvaluateNewest, RowLists, SimulatedRun, local_by_name, run_to_end
from fanin.simulation.studies.records import hold_record, recorded
from fanin.simulation.studies.tests import TestedArrays
from fanin.simulation.studies.versions import TestedRanges, TestedVersions, model_examples
from fanin.simulation.trainers import ClientRuntime, SimulationEnded
from fanin.simulation.workers import (
    GraphSubject,
    GraphTrainings,
    LocalTrainings,
    OwnTrainings,
    SharedGraphs,
    Trainings,
)


def simulate(
    app: object,
    clients: Partition | int,
    *,
    cohort: int | None = None,
    rounds: int | None = None,
    settings: SimulationSettings | None = None,
) -> Result:
    """Train an App or a Flower app on simulated clients by federated averaging, or as a Plan specifies.

    The same arguments give bit-identical Versions in every process on one machine. The engine
    ``auto`` measures in each call, and may choose another engine. ``Result.engine`` names the engine that ran.

    Args:
        app: An App, whose module keeps its parameters. Or a Flower app: a ClientApp, a NumPyClient, a function
            ``client_fn(context)``, or a ``FlowerSettings`` that names one.
        clients: The examples of each client. For a Flower app, which loads its own data, the number of clients.
        cohort: Clients that train in a Round. None if ``settings.plan`` is a Plan.
        rounds: Rounds to train. None if ``settings.plan`` is a Plan.
        settings: Test data, further keys of the Plan, and seed.

    Returns:
        The rows of all Rounds and clients, and the final parameters. Ctrl-C ends the simulation, and the result then
        has the completed Rounds.

    Raises:
        UnsupportedModel: The module cannot be exported, and the engine is ``graph`` or torch cannot train it either.
        InvalidPlan: A key of the Plan is unknown, or a value is wrong.
        InvalidInput: The cohort is larger than the number of clients, the seed is negative, or cohort and rounds are
            set together with a Plan. Or the model cannot use the examples, or the Flower app cannot be imported.
        RuntimeMissing: A library that the settings or the app need is not installed.
        RunStopped: The Run failed or rests, or no client is available any more. The message has the reason, and
            ``result`` has the completed Rounds.
        ClientFailed: The training of a client failed, and ``settings.stop_on_failure`` is set. Or the first trainings
            of ten clients, of a larger cohort, or of all clients failed. Otherwise the Round continues without the
            client, and the failure is in ``Result.failures``.

    Example:
        ``simulate(app, partition(data, 100, Dirichlet(alpha=0.3)), cohort=10, rounds=20)``
    """
    settings = checked(settings)
    with passing(settings.passed_parts):
        return _all_seeds(app, clients, {"cohort": cohort, "rounds": rounds}, settings)


def _all_seeds(
    app: object, clients: Partition | int, limits: Mapping[str, int | None], settings: SimulationSettings
) -> Result:
    subject = subject_for(app, clients, settings)
    studies = [(each, plan_of(subject.name, subject.num_clients, limits, each)) for each in settings.each_seed]
    for _, plan in studies:
        check_simulation(subject, plan, settings)
    results: list[Result] = []
    try:
        with (
            exits_at_sigterm(),
            quiet_coordinator(quiet=settings.quiet),
            hold_record(settings.resume),
            closing(open_backend(settings.processes, settings.cluster)) as backend,
            tempfile.TemporaryDirectory(prefix="fanin-simulation-") as folder,
        ):
            prepared = prepare(subject, settings, Path(folder))
            first = studies[0][1]
            notes = () if isinstance(subject, ModuleSubject) else first_change_notes(first.codec)
            for note in (*first.notes, *notes):
                prepared.progress.show(f"note: {note}")
            for each, plan in studies:
                results.append(_simulated(prepared, plan, each, backend, f"seed {each.seed}: " * (len(studies) > 1)))
                if not results[-1].is_complete:
                    break
    except (ClientFailed, RunStopped) as exc:
        exc.result = total_of([*results, exc.result], settings.seeds or ())
        raise
    except Exception as exc:  # Any error: the results of the earlier seeds are kept.
        if not results:
            raise
        raise RunStopped(text_of(exc), total_of(results, settings.seeds or ()), code=code_of(exc)) from exc
    except KeyboardInterrupt:
        # Ctrl-C before the first Round of a later seed, or while the workers end.
        if not results:
            raise
    return total_of(results, settings.seeds or ())


def check_simulation(subject: ModuleSubject | FlowerSubject, plan: Plan, settings: SimulationSettings) -> None:
    """Check a Plan for an app that is not exported yet.

    Raises:
        InvalidPlan: The app cannot carry out the Plan.
        InvalidInput: A part of the Plan or of the settings is not installed, or is never used.
    """
    stages = check_names(plan, {**POLICIES, **settings.own_policies})
    if isinstance(subject, ModuleSubject):
        check_plan(subject.app, plan, stages, settings)
    else:
        check_no_graphs("simulate", plan, stages)
    check_devices(plan, subject.num_clients)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The parts that differ between an App and a Flower app. See SimulatedRun.

    Attributes:
        engine: The name of the engine.
        trainings: Trains the clients.
        runtime: The library that trains them, and its graph format.
        work: Examples of one epoch of each client, if known.
        evaluate: Returns the metrics of a Version.
        score: Returns the number that ranks Versions.
        reached: Returns why a Version ends the Run; empty if it does not.
        evaluate_newest: Lets clients evaluate the newest Version; None if they evaluate before they train alone.
        folder: The folder that a strategy of the Plan is imported from; None for the working directory.
        data: Returns the data set of the Plan, over the blobs of the coordinator.
        after: Adds to a result what follows the last Round.
    """

    engine: str
    trainings: Trainings
    runtime: ClientRuntime
    work: tuple[int, ...]
    evaluate: Callable[[int, VersionValues], VersionMetrics]
    score: Callable[[VersionMetrics], float]
    reached: Callable[[int, Mapping[str, float]], str] = lambda number, values: ""
    evaluate_newest: EvaluateNewest | None = None
    folder: Path | None = None
    data: Callable[[BlobReader], DataSource] = lambda blobs: NoData()
    after: Callable[[Result, RowLists], Result] = lambda result, rows: result


def _simulated(prepared: Preparation, plan: Plan, settings: SimulationSettings, backend: Backend, label: str) -> Result:
    """Return the result of the Run, whose lines begin with a label. Raises the errors of ``simulate``."""
    rows = RowLists(seed=settings.seed, num_kept=settings.keep_versions)

    def note(row: RoundRow) -> None:
        prepared.progress.row(row, label)
        settings.on_round(row)
        settings.on_version(_version(prepared, row, rows.parameters))

    def note_event(event: SimulationEvent) -> None:
        prepared.progress.event(event, label)
        settings.on_event(event)

    def note_failure(failure: ClientFailure) -> None:
        prepared.progress.failure(failure)
        settings.on_failure(failure)

    if isinstance(prepared.subject, FlowerSubject):
        parts = _flower_parts(prepared, plan, settings, backend)
    else:
        parts = _graph_parts(prepared, plan, settings, backend, note_failure)
    run = SimulatedRun(
        bundle=prepared.bundle,
        plan=plan,
        work=parts.work,
        devices=settings.devices,
        engine=parts.engine,
        trainings=parts.trainings,
        runtime=parts.runtime,
        evaluate=parts.evaluate,
        score=parts.score,
        reached=parts.reached,
        evaluate_newest=parts.evaluate_newest,
        policies=settings.own_policies,
        strategies=Strategies(parts.folder, allowed=None),
        data=parts.data,
        seed=settings.seed,
        stops=settings.stop_on_failure,
        on_round=note,
        on_event=note_event,
        on_failure=note_failure,
    )
    try:
        run_to_end(run, prepared.key, rows)
    except SimulationEnded as exc:
        # The cause is the client's own error, with its traceback.
        result = _result(prepared, plan, parts.engine, rows)
        raise ClientFailed(str(exc), exc.failure, result, code=code_of(exc.__cause__)) from exc.__cause__
    except KeyboardInterrupt:
        # Ctrl-C before the first Round, after the last one, or for the second time.
        if not rows.rounds:
            raise
        rows.is_complete = False
    except Exception as exc:  # Any error, also of the user's functions: the Rounds before it are kept.
        if not rows.rounds:
            raise
        raise RunStopped(text_of(exc), _result(prepared, plan, parts.engine, rows), code=code_of(exc)) from exc
    result = _result(prepared, plan, parts.engine, rows)
    if rows.reason:
        raise RunStopped(f"simulate: {rows.reason}", parts.after(result, rows), code="FN-1188")
    # After Ctrl-C, the user wants the result.
    return parts.after(result, rows) if rows.is_complete else result


def _flower_parts(prepared: Preparation, plan: Plan, settings: SimulationSettings, backend: Backend) -> _Parts:
    subject = prepared.subject
    assert isinstance(subject, FlowerSubject), "an App has graphs"
    evaluation = TestedArrays(
        tests=settings.tests,
        table=prepared.bundle.manifest.table,
        layout=read_layout(prepared.bundle),
        every=plan.evaluation.every,
        best=plan.evaluation.best,
    )
    trainings = FlowerTrainings(backend, subject, prepared.placed)
    return _Parts(
        engine="flower",
        trainings=trainings,
        runtime=ClientRuntime(name=subject.runtime, graph_format=NO_GRAPHS),
        work=(1,) * subject.num_clients,
        evaluate=evaluation.quality,
        score=evaluation.score,
        evaluate_newest=trainings.evaluate,
        folder=resolved(subject.settings).folder,
    )


def _graph_parts(
    prepared: Preparation, plan: Plan, settings: SimulationSettings, backend: Backend, fail: OnFailure
) -> _Parts:
    subject = prepared.subject
    assert isinstance(subject, ModuleSubject), "a Flower app has no graphs"
    assert prepared.graphs is not None, "an App has a runtime"
    refusal = prepared.graphs.refusal
    bundle, clients, graphs = prepared.bundle, subject.clients, SharedGraphs(prepared.graphs.runtime)
    fraction, metrics = settings.validation_fraction, settings.own_metrics
    sizes = [size - num_held_out(size, fraction) for size in clients.sizes]
    trained = bundle.at_batch(plan.training_in(1).batch_size)
    workload = Workload.of(plan, sizes, trained.manifest.batch_size)
    if refusal:
        check_no_int8(plan)
    if settings.trainer is not None:
        chosen = Chosen(engine="trainer")
    elif refusal:
        chosen = choose_vmap(refusal, subject.app, trained, workload, settings.engine)
    else:
        chosen = choose(settings, subject.app, trained, graphs, workload)
    if chosen.reason:
        prepared.progress.step(chosen.reason)
    trainings: Trainings
    work = (settings.work or ClientWork()).bound(len(clients.sizes))
    runtime = graphs.name
    if settings.trainer is not None:
        own = OwnTrainings(settings.trainer, clients, fraction)
        runtime = own.runtime_of(0)
        subject_of = GraphSubject.of(prepared.placed, clients, fraction, factory=settings.trainer)
        trainings = own if isinstance(backend, ThisProcess) else GraphTrainings(backend, subject_of)
    elif chosen.step is not None:
        trainings = VectorTrainings(chosen.step, graphs, clients, fraction, metrics).limited(work)
    elif isinstance(backend, ThisProcess):
        # The evaluation uses the same open graphs.
        trainings = LocalTrainings(graphs, clients, fraction, metrics, work)
    else:
        subject_of = GraphSubject.of(prepared.placed, clients, fraction, metrics)
        trainings = GraphTrainings(backend, replace(subject_of, work=work))
    tests = {
        name: model_examples(each, bundle, graphs)
        for name, each in settings.tests.items()
        if isinstance(each, Examples)
    }
    evaluation = TestedVersions(bundle=bundle, graphs=graphs, tests=tests, plan=plan, own=metrics)
    trainings = recorded(trainings, prepared.record, settings.work)
    each = PerClient(
        prepared=prepared, clients=clients, settings=settings, evaluation=evaluation, trainings=trainings, fail=fail
    )

    def after(result: Result, rows: RowLists) -> Result:
        return with_baseline(prepared, clients, evaluation, settings, each.added(result, rows))

    return _Parts(
        engine=chosen.engine,
        trainings=trainings,
        runtime=ClientRuntime(name=runtime, graph_format=graphs.graph_format),
        work=tuple(sizes),
        evaluate=evaluation.quality,
        score=evaluation.score,
        reached=evaluation.reached,
        data=partial(TestedRanges, evaluation),
        after=after,
    )


def _version(prepared: Preparation, row: RoundRow, parameters: Float32s) -> KeptVersion:
    """Return a Version with its parameters."""
    subject, table = prepared.subject, prepared.bundle.manifest.table
    if isinstance(subject, FlowerSubject):
        layout = read_layout(prepared.bundle)
        return KeptVersion(app=None, table=table, row=row, parameters=parameters, layout=layout)
    return KeptVersion(app=subject.app, table=table, row=row, parameters=parameters)


def _result(prepared: Preparation, plan: Plan, engine: str, rows: RowLists) -> Result:
    table, subject = prepared.bundle.manifest.table, prepared.subject
    app = None if isinstance(subject, FlowerSubject) else subject.app
    layout = read_layout(prepared.bundle) if isinstance(subject, FlowerSubject) else None
    best, kept = None, [row for row in rows.rounds if row.version in rows.kept]
    if rows.best is not None and app is not None:
        best = BestVersion(app=app, table=table, row=rows.best[0], parameters=rows.best[1])
    return Result(
        app=app,
        engine=engine,
        selection=plan.cohort.selection,
        table=table,
        rounds=tuple(rows.rounds),
        clients=tuple(rows.clients),
        failures=tuple(rows.failures),
        events=tuple(rows.events),
        parameters=rows.parameters,
        local=local_by_name(prepared.bundle, rows.local),
        versions={row.version: _version(prepared, row, rows.kept[row.version]) for row in kept},
        best=best,
        digests=tuple(rows.digests),
        is_complete=rows.is_complete,
        layout=layout,
    )
