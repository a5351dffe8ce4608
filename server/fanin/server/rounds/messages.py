"""The messages of one Run's Rounds: recorded, and answered from the record alone.

The facts about a Round change only when a roster is frozen. So they are read once for each roster. Checks and answers
are code of the protocol, whose time may grow with the cohort. They run on the disk lane.
"""

from collections.abc import Callable
from functools import partial

from fanin.edge.rings import Adjustment
from fanin.protos.errors import InvalidInput, foreign_text
from fanin.protos.messages import MAX_MESSAGE_BYTES
from fanin.server.protocols.facts import adjustment_of, facts_of
from fanin.server.protocols.machine import RoundProtocol
from fanin.server.protocols.phases import Phase, RoundFacts
from fanin.server.rounds.troubles import Damaged
from fanin.server.storage.records import RoundMessage, RoundRecord
from fanin.server.storage.stores import DriverStores, Files, Stores


class RoundMessages:
    """The messages of the Rounds of one Run.

    Args:
        protocol: The protocol of the Rounds.
        stores: The record of the Run.
        files: Its lane runs the code of the protocol.
    """

    def __init__(self, protocol: RoundProtocol, stores: DriverStores, files: Files) -> None:
        self._protocol = protocol
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
        if self._facts is None or self._facts[0] != num_rosters or self._facts[1].round != record.round:
            store, run_id = self._stores.messages, record.run_id
            rosters = await store.rosters(run_id, record.round)
            newest = await self._stores.rounds.last(run_id)
            closed = record if newest is None or newest.round != record.round else newest
            facts = facts_of(self._protocol, closed, rosters, await store.messages(run_id, record.round))
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
            raise InvalidInput(f"exchange: {phase}: {foreign_text(exc)}", code="FN-1606") from exc

    async def answer(self, phase: Phase, facts: RoundFacts, device: str) -> bytes:
        """Return the coordinator's message for a device of the roster of a phase.

        Raises:
            Damaged: The protocol fails.
        """
        assert phase.exchange is not None, "only a phase with an exchange has messages"
        try:
            message: object = await self._files.run(phase.exchange.respond, facts, device)
        except Exception as exc:  # Any error: the protocol may come from another package.
            raise Damaged(f"the protocol {self._protocol.name} cannot answer {phase}: {foreign_text(exc)}") from exc
        if not isinstance(message, bytes) or len(message) > MAX_MESSAGE_BYTES:
            kind = f"{len(message)} bytes" if isinstance(message, bytes) else type(message).__name__
            raise Damaged(
                f"the protocol {self._protocol.name} answers {phase} with {kind}, expected at most {MAX_MESSAGE_BYTES} "
                "bytes"
            )
        return message


async def adjustment_in(
    protocol: RoundProtocol, record: RoundRecord, stores: Stores
) -> Callable[[], Adjustment | None]:
    """Return the function that computes what a protocol adds to the sum of a closed Round. It reads nothing itself."""
    rosters = await stores.messages.rosters(record.run_id, record.round)
    messages = await stores.messages.messages(record.run_id, record.round) if rosters else ()
    return partial(adjustment_of, protocol, facts_of(protocol, record, rosters, messages))
