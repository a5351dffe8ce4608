"""The messages of one Run's Rounds: recorded, and answered from the record alone.

The facts about a Round change only when a roster is frozen. So they are read once for each roster. Checks and answers
are code of the protocol, whose time may grow with the cohort. They run on the disk lane.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fanin.edge.basis import RoundBasis, basis_of
from fanin.edge.rings import Adjustment
from fanin.protos.errors import FaninError, InvalidInput, foreign_text
from fanin.protos.messages import MAX_MESSAGE_BYTES
from fanin.server.privacy.noising import CentralNoise, SharedNoise
from fanin.server.protocols.facts import adjustment_of, common_work, facts_of
from fanin.server.protocols.phases import Phase, RoundFacts
from fanin.server.rounds.charging import noise_seed
from fanin.server.rounds.setup import RunSetup
from fanin.server.rounds.troubles import Damaged
from fanin.server.storage.records import RoundMessage, RoundRecord
from fanin.server.storage.stores import DriverStores, Files


class RoundMessages:
    """The messages of the Rounds of one Run.

    Args:
        setup: The setup of the Run.
        stores: The record of the Run.
        files: Its lane runs the code of the protocol.
    """

    def __init__(self, setup: RunSetup, stores: DriverStores, files: Files) -> None:
        self._setup = setup
        self._stores = stores
        self._files = files
        self._facts: tuple[int, RoundFacts] | None = None

    async def find(self, record: RoundRecord, phase: Phase, device: str) -> bytes | None:
        """Return the recorded message of a device in a phase, or None without one."""
        return await self._stores.messages.message(record.run_id, record.round, phase.name, device)

    async def add(self, record: RoundRecord, phase: Phase, device: str, payload: bytes) -> bytes | None:
        """Record a message, unless it comes too late. Return the recorded one, which may be an earlier one."""
        message = RoundMessage(round=record.round, phase=phase.name, device_id=device, payload=payload)
        recorded = await self._stores.writer.add_message(message)
        return None if recorded is None else recorded.payload

    async def facts(self, record: RoundRecord, num_rosters: int) -> RoundFacts:
        """Return the facts about a Round with this number of rosters."""
        if self._facts is None or self._facts[0] != num_rosters or self._facts[1].basis.round != record.round:
            store, run_id = self._stores.messages, record.run_id
            rosters = await store.rosters(run_id, record.round)
            newest = await self._stores.rounds.last(run_id)
            closed = record if newest is None or newest.round != record.round else newest
            basis = await _basis_of(self._setup, record, self._stores)
            messages = await store.messages(run_id, record.round)
            facts = facts_of(self._setup.protocol, basis, closed, rosters, messages)
            # A roster that was frozen in the meantime has the next number.
            if len(facts.rosters) != num_rosters:
                return facts
            self._facts = num_rosters, facts
        return self._facts[1]

    async def check(self, phase: Phase, facts: RoundFacts, device: str, payload: bytes) -> None:
        """Raise InvalidInput for a message that the protocol refuses."""
        assert phase.exchange is not None, "only a phase with an exchange has messages"
        try:
            await self._files.run(phase.exchange.check, facts, device, payload)
        except Exception as exc:  # Any error: the bytes come from a device, and the code may come from another package.
            # An error of ours keeps its code.
            code = exc.code if isinstance(exc, FaninError) else "FN-1606"
            raise InvalidInput(f"exchange: {phase}: {foreign_text(exc)}", code=code) from exc

    async def answer(self, phase: Phase, facts: RoundFacts, device: str) -> bytes | None:
        """Return the coordinator's message for a device of the roster of a phase; None if it leaves the device out.

        Raises:
            Damaged: The protocol fails.
        """
        assert phase.exchange is not None, "only a phase with an exchange has messages"
        name = self._setup.protocol.name
        try:
            message: object = await self._files.run(phase.exchange.respond, facts, device)
        except Exception as exc:  # Any error: the protocol may come from another package.
            raise Damaged(f"the protocol {name} cannot answer {phase}: {foreign_text(exc)}") from exc
        if message is None:
            return None
        if not isinstance(message, bytes) or len(message) > MAX_MESSAGE_BYTES:
            kind = f"{len(message)} bytes" if isinstance(message, bytes) else type(message).__name__
            raise Damaged(
                f"the protocol {name} answers {phase} with {kind}, expected at most {MAX_MESSAGE_BYTES} bytes"
            )
        return message


async def adjustment_in(
    setup: RunSetup, record: RoundRecord, noise: CentralNoise | SharedNoise | None, stores: DriverStores
) -> Callable[[], Adjustment | None]:
    """Return the function that computes what is added to the sum of a closed Round. It reads nothing itself."""
    if isinstance(noise, CentralNoise):
        return partial(noise.adjustment, await noise_seed(record, stores))
    denominator = None if noise is None else noise.denominator
    rosters = await stores.messages.rosters(record.run_id, record.round)
    messages = await stores.messages.messages(record.run_id, record.round) if rosters else ()
    basis = await _basis_of(setup, record, stores)
    facts = facts_of(setup.protocol, basis, record, rosters, messages)

    def adjustment() -> Adjustment | None:
        try:
            return adjustment_of(setup.protocol, facts, denominator)
        except Exception as exc:  # Any error: the protocol may come from another package.
            raise Damaged(f"the protocol {setup.protocol.name} cannot correct the sum: {foreign_text(exc)}") from exc

    return adjustment


async def _basis_of(setup: RunSetup, record: RoundRecord, stores: DriverStores) -> RoundBasis:
    """Return the facts of a Round under way on which its devices agree."""
    base = await stores.runs.version(record.run_id, record.base_version)
    assert base is not None, "a round has its base version"
    lineage = await stores.runs.lineage_start(record.run_id)
    privacy = None if setup.noise is None else setup.noise.terms
    work = replace(
        common_work(setup.plan, record, base, setup.bundle, lineage), statistics=setup.statistics, privacy=privacy
    )
    return basis_of(work, setup.layout.total_table.num_values)
