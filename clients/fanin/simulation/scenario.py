"""One Run told beforehand and carried out on a virtual clock: a pure function of its Scenario."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from fanin.clients.testing.clock import run_virtual
from fanin.clients.testing.member import Member
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.tensors import Float32s
from fanin.protos.control import LoggedEvent, VersionPublished
from fanin.protos.plans import Plan
from fanin.server.aggregation.parameters import load_parameters
from fanin.server.aggregation.verify import Verdict, verify_run
from fanin.simulation.federation import Federation, Noted

RUN = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A Plan, the Bundle that ``publisher`` signed, and who takes part.

    All chance is drawn from ``seed`` but for what the Plan's own seed decides. The coordinator ends at each of the
    seconds ``stops_s``, and serves again ``down_s`` later from what its folder has. A Run that has not ended after
    ``max_s`` never will: who is still there cannot make a quorum.
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
    """What a Scenario ends in: the Run's record, what everybody did, the verdicts of ``fanin verify`` on each Version,
    and the newest parameters (num_values,)."""

    events: tuple[LoggedEvent, ...]
    log: tuple[Noted, ...]
    verdicts: tuple[Verdict, ...]
    parameters: Float32s

    @property
    def versions(self) -> tuple[VersionPublished, ...]:
        """The Versions, oldest first."""
        found = (recorded.event for recorded in self.events)
        return tuple(event for event in found if isinstance(event, VersionPublished))

    @property
    def digests(self) -> tuple[str, ...]:
        """Their SHA-256."""
        return tuple(event.version_sha256 for event in self.versions)


def simulate(scenario: Scenario, folder: Path) -> Outcome:
    """Carry out a Scenario until its Run rests; ``folder`` gets the coordinator's state, and must be new.

    Raises TimeoutError if the Run has not ended after the Scenario's ``max_s``.
    """
    found = run_virtual(_carried_out(scenario, folder))
    if found is None:
        raise TimeoutError(f"scenario: the run has not ended after {scenario.max_s:g} s; are enough members left?")
    return found


async def _carried_out(scenario: Scenario, folder: Path) -> Outcome | None:
    async with Federation(folder, scenario.seed) as federation:
        await federation.start_run(RUN, scenario.plan, scenario.bundle, scenario.publisher)
        for member in scenario.members:
            federation.join(member, scenario.bundle)
        federation.interrupt(scenario.stops_s, scenario.down_s)
        try:
            async with asyncio.timeout(scenario.max_s):
                events = [recorded async for recorded in federation.watch(RUN)]
        except TimeoutError:
            return None
        return _outcome(federation, scenario, events)


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
