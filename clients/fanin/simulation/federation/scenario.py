"""One Run on a virtual clock: its Outcome is a pure function of its Scenario."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.tensors import Float32s
from fanin.protos.errors import Unavailable
from fanin.protos.messages import LoggedEvent, VersionPublished
from fanin.protos.plans import Plan
from fanin.protos.texts import counted
from fanin.server.aggregation.parameters import load_parameters
from fanin.server.aggregation.verify import Verdict, verify_run
from fanin.simulation.federation.clock import run_virtual
from fanin.simulation.federation.federation import Federation, LogLine
from fanin.simulation.federation.member import Member

RUN = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The description of one Run.

    Attributes:
        plan: The Plan.
        bundle: The Bundle.
        publisher: The key that signed the Bundle.
        members: The devices; each has its own name.
        seed: Seed of all random choices that the Plan's own seed does not make.
        stops_s: Times in seconds at which the coordinator stops.
        down_s: Seconds after which it starts again, from its durable state.
        max_s: Seconds after which ``play`` gives up: the remaining devices cannot make a quorum.
    """

    plan: Plan
    bundle: Bundle
    publisher: SigningKey
    members: tuple[Member, ...]
    seed: int = 0
    stops_s: tuple[float, ...] = ()
    down_s: float = 5.0
    max_s: float = 7 * 86400.0

    def __post_init__(self) -> None:
        names = [member.device for member in self.members]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"scenario: got members {names}, expected at least one, each of another name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a Scenario.

    Attributes:
        events: The record of the Run.
        log: The events of all participants.
        verdicts: The result of ``fanin verify`` for each Version.
        parameters: The newest parameters (num_values,).
    """

    events: tuple[LoggedEvent, ...]
    log: tuple[LogLine, ...]
    verdicts: tuple[Verdict, ...]
    parameters: Float32s

    def __repr__(self) -> str:
        return f"Outcome(versions={len(self.versions)}; see .events, .log, .verdicts and .parameters)"

    @property
    def versions(self) -> tuple[VersionPublished, ...]:
        """The Versions, oldest first."""
        events = (entry.event for entry in self.events)
        return tuple(event for event in events if isinstance(event, VersionPublished))

    @property
    def digests(self) -> tuple[str, ...]:
        """The SHA-256 of each Version, oldest first."""
        return tuple(event.version_sha256 for event in self.versions)


def play(scenario: Scenario, folder: Path | None = None) -> Outcome:
    """Play a Scenario until its Run ends.

    Args:
        scenario: The Scenario.
        folder: A new folder for the coordinator's state. None keeps the state in memory, which survives the
            Scenario's stops.

    Raises:
        TimeoutError: The Run has not ended after the Scenario's ``max_s``.
    """
    return run_virtual(_run(scenario, folder))


async def _run(scenario: Scenario, folder: Path | None) -> Outcome:
    async with Federation(folder, scenario.seed) as federation:
        await federation.start_run(RUN, scenario.plan, scenario.bundle, scenario.publisher)
        for member in scenario.members:
            federation.join(member, scenario.bundle)
        federation.interrupt(scenario.stops_s, scenario.down_s)
        try:
            async with asyncio.timeout(scenario.max_s):
                events = [entry async for entry in federation.watch(RUN)]
        except TimeoutError:
            raise TimeoutError(await _unfinished(federation, scenario)) from None
        return _outcome(federation, scenario, events)


async def _unfinished(federation: Federation, scenario: Scenario) -> str:
    """Return why the Run of a Scenario has not ended in time."""
    late = f"scenario: the run has not ended after {scenario.max_s:g} s"
    try:
        description = await federation.runs.describe(RUN, 1)
    except Unavailable:
        return f"{late}: the coordinator is down at that time; end its stops earlier, or give it a longer max_s"
    run, current = description.run, description.rounds[-1]
    state = (
        f"round {current.round} is {current.phase.upper()} with {counted(current.num_updates, 'update')} of at least "
        f"{scenario.plan.cohort.quorum}, and {counted(description.live.num_at_work, 'device')} at work"
    )
    problem = run.reason or state
    return (
        f"{late}: version {run.version} of {scenario.plan.stop.max_rounds}, {problem}; give it more members that "
        "stay, or a longer max_s"
    )


def _outcome(federation: Federation, scenario: Scenario, events: list[LoggedEvent]) -> Outcome:
    state = federation.state
    newest = state.runs.version(RUN)
    assert newest is not None, "a run has at least version 0"
    return Outcome(
        events=tuple(events),
        log=tuple(federation.log),
        verdicts=tuple(verify_run(state, RUN)),
        parameters=load_parameters(state.blobs, newest, scenario.bundle.manifest.table),
    )
