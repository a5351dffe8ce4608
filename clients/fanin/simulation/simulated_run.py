"""The course of a simulation: its Run from the start to the end, and a row for each Version."""

import asyncio
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from fanin.clients.device.models import OpenedModel, own_table
from fanin.clients.device.storage.personal import local_values
from fanin.clients.transport import PIECE_BYTES
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.manifest import NO_GRAPHS
from fanin.edge.runtimes.base import VersionValues
from fanin.edge.tensors import Float32s
from fanin.protos.messages import RoundClosed, RoundFailed, RunRested, RunState, RunWarned, Version, VersionPublished
from fanin.protos.plans import DATA, EvaluationPlan, Plan
from fanin.protos.texts import counted
from fanin.server.access.limits import Limits
from fanin.server.aggregation.parameters import load_version
from fanin.server.aggregation.rules import StrategySource
from fanin.server.aggregation.statistics import evaluation_of, reported_examples, with_examples
from fanin.server.evaluation.metrics import VersionMetrics
from fanin.server.rounds.troubles import SEE_LOG
from fanin.server.runs.data import DataSource
from fanin.server.selection.policies import SelectionPolicy
from fanin.server.storage.protocols.files import BlobReader
from fanin.simulation.devices.models import DeviceModel
from fanin.simulation.federation.clock import VirtualTimeLoop, run_virtual
from fanin.simulation.federation.coordinator import CoordinatorOptions
from fanin.simulation.federation.federation import Federation
from fanin.simulation.federation.member import Member
from fanin.simulation.federation.memory import MemoryStates
from fanin.simulation.federation.observed import REFUSED, TARGET, DeviceEvent
from fanin.simulation.federation.rotation import Rotation
from fanin.simulation.host import rare_collections
from fanin.simulation.progress import evaluation_text
from fanin.simulation.rows import (
    EVALUATED,
    ClientFailure,
    ClientRow,
    OnEvent,
    OnFailure,
    RoundRow,
    SimulationEvent,
    client_name,
    client_of,
    client_rows,
    initial_row,
    round_row,
    with_clients,
    with_evaluation,
    without_int8,
)
from fanin.simulation.trainers import NUM_FAILING, ClientRuntime, ClientTrainer, Crew, SimulationEnded
from fanin.simulation.workers import Trainings

RUN: Final = "run"
EvaluateNewest = Callable[[Sequence[int], OpenedModel, Version], Sequence[Mapping[str, int]]]
AWAY: Final = "add later times at which devices are on to the traces, or run fewer rounds"
PRESENT: Final = 2
"""Clients of a ``Rotation`` that are present, as a multiple of the Plan's concurrency: a policy has a choice."""


@dataclass(slots=True, kw_only=True)
class RowLists:
    """The rows of a simulation so far.

    Attributes:
        seed: The seed of the simulation.
        rounds: The Rounds, the initial model first.
        clients: The clients of each Round.
        failures: Errors in the training of clients.
        events: The event log.
        digests: The SHA-256 of each Version.
        parameters: The parameters of the newest Version (num_values,).
        newest: The newest Version, its parameters and its ranges.
        local: The newest personal parameters of each client that has trained (num_local_values,), once the Run has
            ended.
        best: The row of the best Version on the test data, and its parameters (num_values,); None without test data.
        reason: Why the Run ended before its last Round; empty if it finished, or after Ctrl-C.
        is_complete: Whether the Run has finished.
        num_kept: Newest Versions whose parameters are kept.
        kept: Their parameters (num_values,), by number.
    """

    seed: int = 0
    rounds: list[RoundRow] = field(default_factory=list)
    clients: list[ClientRow] = field(default_factory=list)
    failures: list[ClientFailure] = field(default_factory=list)
    events: list[SimulationEvent] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    parameters: Float32s = field(default_factory=lambda: np.empty(0, np.float32))
    newest: tuple[Version, VersionValues] | None = None
    local: dict[int, Float32s] = field(default_factory=dict)
    best: tuple[RoundRow, Float32s] | None = None
    reason: str = ""
    is_complete: bool = False
    num_kept: int = 1
    kept: dict[int, Float32s] = field(default_factory=dict)
    _best_score: float = -math.inf

    def add(self, row: RoundRow, parameters: Float32s, score: float) -> None:
        """Add the row of a Version.

        Args:
            row: The row.
            parameters: The parameters (num_values,).
            score: Ranks Versions: larger is better. Among equally good Versions, the first one is the best. NaN if the
                Version was not evaluated.
        """
        row = replace(row, seed=self.seed)
        self.rounds.append(row)
        self.parameters = self.kept[row.version] = parameters
        for number in sorted(self.kept)[: -self.num_kept]:
            del self.kept[number]
        if score > self._best_score:
            self._best_score, self.best = score, (row, parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A Run of simulated clients.

    Attributes:
        bundle: The Bundle.
        plan: The Plan.
        work: Examples of one epoch of each client.
        devices: How the devices of the clients differ.
        engine: The engine of the trainings, for the event log: ``graph``, ``vmap``, ``vmap:cuda`` or ``flower``.
        trainings: Trains the clients.
        runtime: What trains them: the library and its version, and the format of the Bundle's graphs.
        evaluate: Returns the metrics of a Version from its number, its parameters (num_values,) and its ranges.
        score: Returns the number that ranks Versions from these metrics; NaN for a Version that was not evaluated.
        reached: Returns why a Version of this number and these metrics ends the Run; empty if it does not.
        evaluate_newest: Lets clients evaluate a Version, and returns the statistics of each. Each row then has the
            clients' evaluation of its own Version. None if it has that of the Version before.
        policies: Selection policies of the settings by name.
        strategies: Runs the Flower strategy of the Plan.
        data: Returns the data set of the Plan, over the blobs of the coordinator.
        seed: Seed of the choices that the Plan's own seed does not make.
        stops: Whether an error in the training of a client ends the simulation.
        on_round: Called with each row.
        on_event: Called with each event.
        on_failure: Called with each error in the training of a client.
    """

    bundle: Bundle
    plan: Plan
    work: Sequence[int]
    devices: DeviceModel
    engine: str
    trainings: Trainings
    runtime: ClientRuntime
    evaluate: Callable[[int, VersionValues], VersionMetrics]
    score: Callable[[VersionMetrics], float]
    reached: Callable[[int, Mapping[str, float]], str]
    evaluate_newest: EvaluateNewest | None
    policies: Mapping[str, SelectionPolicy]
    strategies: StrategySource
    data: Callable[[BlobReader], DataSource]
    seed: int
    stops: bool
    on_round: Callable[[RoundRow], None]
    on_event: OnEvent
    on_failure: OnFailure

    @property
    def _statistics(self) -> tuple[str, ...]:
        return tuple(statistic.name for statistic in self.plan.statistics)

    async def play(self, publisher: SigningKey, rows: RowLists) -> None:
        """Run the Plan to its end, or until Ctrl-C, a failure of the Run or a stall. The rows have the reason.

        The rows are the caller's. It has them also if a second Ctrl-C ends the event loop.

        Raises:
            InvalidPlan: ``score`` finds no metric by the Plan's name.
        """

        def fail(failure: ClientFailure) -> None:
            rows.failures.append(replace(failure, seed=rows.seed))
            self.on_failure(rows.failures[-1])

        def observe(event: DeviceEvent) -> None:
            client = client_of(event.device)
            self._note(rows, event.event, event.round, client=client, detail=event.detail)
            if event.event == REFUSED:
                fail(ClientFailure(round=event.round, client=client, error=event.detail))

        limits = Limits(max_parked=max(Limits().max_parked, self._num_present))
        options = CoordinatorOptions(limits=limits, policies=self.policies, strategies=self.strategies, data=self.data)
        async with Federation(seed=self.seed, options=options, piece_bytes=PIECE_BYTES, observe=observe) as federation:
            self._note(rows, "engine", 0, detail=self.engine)
            for traces in self.devices.sources:
                self._note(rows, "traces", 0, detail=traces.sha256)
            # The coordinator of a simulation does not evaluate: that is here. It measures ranges.
            data = self.plan.evaluation.data if self.plan.int8.ranges == DATA else ""
            stop = replace(self.plan.stop, target=None)
            plan = replace(self.plan, evaluation=EvaluationPlan(data=data), stop=stop)
            await federation.start_run(RUN, plan, self.bundle, publisher)
            rows.digests.append(self.bundle.manifest.artifacts[self.bundle.manifest.initial].sha256)
            parameters, quality = await self._evaluated(federation, 0, rows)
            rows.add(self._shown(initial_row(quality, self._statistics)), parameters, self.score(quality))
            self.on_round(rows.rounds[0])

            crew = Crew(
                trainings=self.trainings,
                runtime=self.runtime,
                failures=rows.failures,
                fail=fail,
                stops=self.stops,
                num_failing=min(len(self.work), max(NUM_FAILING, self.plan.cohort.concurrency)),
            )
            stored: defaultdict[int, MemoryStates] = defaultdict(MemoryStates)
            self._join(federation, crew, stored)
            try:
                rows.reason = await self._follow(federation, rows)
                rows.is_complete = not rows.reason
                if self.evaluate_newest is not None and rows.clients:
                    self._add_evaluation(rows, await self._following_row(federation, rows, self.evaluate_newest))
            except asyncio.CancelledError:
                # After Ctrl-C, the Rounds that have ended are the result. If a client has failed instead, the
                # federation raises its error at the end of this block.
                task, loop = asyncio.current_task(), asyncio.get_running_loop()
                assert task is not None, "a coroutine runs in a task"
                task.uncancel()
                if isinstance(loop, VirtualTimeLoop) and loop.has_stalled:
                    rows.reason = f"no client is available from {loop.time():.1f} s on; {AWAY}"
            newest = ((client, local_values(each, self.bundle, RUN)) for client, each in sorted(stored.items()))
            rows.local = {client: values for client, values in newest if values is not None}

    @property
    def _num_present(self) -> int:
        return PRESENT * self.plan.cohort.concurrency

    def _join(self, federation: Federation, crew: Crew, stored: Mapping[int, MemoryStates]) -> None:
        """Add the clients in a random order: all of them if the coordinator can park them, otherwise as a ``Rotation``.

        The first clients that check in are the first cohort. Without a random order it would be the same for all seeds.
        ``stored`` has the personal parameters of each client, also of clients that a rotation has sent away.
        """

        def member(client: int) -> Member:
            habits = self.devices.habits(client, self.work[client], self.seed)
            trainer = ClientTrainer(client, crew)
            return Member(device=client_name(client), trainer=trainer, habits=habits, locals=stored[client])

        if len(self.work) > max(Limits().max_parked, self._num_present):
            federation.join_rotation(Rotation(len(self.work), self._num_present, member, self.seed), self.bundle)
            return
        clients = range(len(self.work))
        for client in random.Random(f"{self.seed}/order").sample(clients, len(clients)):
            federation.join(member(client), self.bundle)

    async def _follow(self, federation: Federation, rows: RowLists) -> str:
        """Add the rows of each Version until the Run ends. Return why it did not finish; empty if it did."""
        num_accepted = 0
        async for entry in federation.watch(RUN):
            event = entry.event
            match event:
                case RoundClosed():
                    num_accepted = event.num_accepted
                    self._note(rows, "round closed", event.round, detail=counted(num_accepted, "update"))
                case RoundFailed():
                    self._note(rows, "round failed", event.round, detail=event.reason)
                case VersionPublished():
                    parameters, quality = await self._evaluated(federation, event.number, rows)
                    updates = await federation.state.stores.rounds.updates(RUN, event.round)
                    now = asyncio.get_running_loop().time()
                    num_classes = self.bundle.manifest.num_classes
                    clients = client_rows(updates, event.round, self.plan, num_classes)
                    rows.clients += [replace(each, seed=rows.seed) for each in clients]
                    rows.digests.append(event.version_sha256)
                    row = with_clients(round_row(event, now, num_accepted, quality, self._statistics), clients)
                    if self.evaluate_newest is not None:
                        self._add_evaluation(rows, row)
                        row = with_evaluation(row, initial_row(None, self._statistics))
                    rows.add(self._shown(row), parameters, self.score(quality))
                    self._note(rows, "version published", event.round, detail=event.version_sha256)
                    self.on_round(rows.rounds[-1])
                    if reason := self.reached(event.number, quality.values):
                        self._note(rows, TARGET, event.round, detail=reason)
                        return ""
                case RunWarned():
                    self._note(rows, "warning", 0, detail=event.text)
                case RunRested() if event.state is not RunState.FINISHED:
                    failures = rows.failures
                    first = f"; first of {len(failures)} failures: {failures[0]}" if failures else ""
                    # A simulation shows no log of its coordinator. The reason has the line of an error.
                    reason = event.reason.removesuffix(f"; {SEE_LOG}")
                    return f"the run is {event.state.name.lower()}: {reason}{first}"
        return ""

    def _add_evaluation(self, rows: RowLists, following: RoundRow) -> None:
        """Complete the last row by the clients' evaluation of its Version, and add it to the log."""
        rows.rounds[-1] = row = with_evaluation(rows.rounds[-1], following)
        if text := evaluation_text(row):
            self._note(rows, EVALUATED, row.round, detail=text)

    async def _following_row(self, federation: Federation, rows: RowLists, evaluate: EvaluateNewest) -> RoundRow:
        """Return a row with the evaluation of the newest Version by the clients of its Round."""
        last, sums = rows.rounds[-1], Counter[str]()
        version = await federation.state.stores.runs.version(RUN, last.version)
        assert version is not None, "a row has a version"
        clients = [each.client for each in rows.clients if each.round == last.round]
        model = OpenedModel(bundle=self.bundle, parameters=rows.parameters)
        for counts in evaluate(clients, model, version):
            sums.update(with_examples(counts))
        event = VersionPublished(
            number=last.version + 1,
            version_sha256="",
            parent=last.version,
            evaluation=evaluation_of(sums, 0),
            statistics={name: sums[name] for name in self._statistics if name in sums},
            statistics_examples=reported_examples(sums, self._statistics),
        )
        return round_row(event, 0.0, 0, None, self._statistics)

    def _shown(self, row: RoundRow) -> RoundRow:
        """Return a row without the numbers of int8 if the Bundle has no int8 model."""
        return without_int8(row) if self.bundle.manifest.graph_formats == (NO_GRAPHS,) else row

    def _note(
        self, rows: RowLists, event: str, round_number: int, *, client: int | None = None, detail: str = ""
    ) -> None:
        """Add an event to the log."""
        now = asyncio.get_running_loop().time()
        noted = SimulationEvent(
            seed=rows.seed, time_s=now, client=client, event=event, round=round_number, detail=detail
        )
        rows.events.append(noted)
        self.on_event(noted)

    async def _evaluated(self, federation: Federation, number: int, rows: RowLists) -> tuple[Float32s, VersionMetrics]:
        """Return the parameters and the metrics of a Version. It is the newest one of the rows from now on."""
        version, blobs = await federation.state.stores.runs.version(RUN, number), federation.state.blobs
        assert version is not None, "the event of a version follows its record"
        values = load_version(blobs, version, self.bundle.manifest)
        rows.newest = version, values
        return values.parameters, self.evaluate(number, values)


def run_to_end(run: SimulatedRun, key: SigningKey, rows: RowLists) -> None:
    """Fill the rows of a Run. Raises SimulationEnded, and the errors of ``play``."""
    try:
        with rare_collections():
            run_virtual(run.play(key, rows))
    except* SimulationEnded as group:
        first = _first(group)
        # The cause is the client's own error, with its traceback.
        raise first from first.__cause__


def _first(group: BaseException) -> BaseException:
    """Return the first error of a group of errors, which may contain further groups."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def local_by_name(bundle: Bundle, local: Mapping[int, Float32s]) -> dict[int, dict[str, Float32s]]:
    """Return the personal parameters of each client by name, or its copy of all parameters under Ditto."""
    return {client: own_table(bundle).views(values) for client, values in local.items()}
