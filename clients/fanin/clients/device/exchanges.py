"""The exchanges of an Assignment, carried out: the device's message is made once, kept, sent and repeated.

1. a phase with an answer in the folder is over: nothing is sent
2. a message in the folder is repeated, byte for byte; else it is made, and is durable before it is sent
3. the answer is accepted by the protocol, and is durable before the next step
"""

from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from fanin.clients.device.session.protocols import (
    DeviceIdentity,
    EncodedUpdate,
    ExchangeContext,
    KeptExchange,
    Message,
    protocol_of,
    step_of,
)
from fanin.clients.device.storage.protocols import StoredExchanges
from fanin.edge.codecs.codec import codec_of
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidInput, foreign_text


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedExchange:
    """An exchange that is ready to be sent, or that has its answer already."""

    request: m.ExchangeRequest
    context: ExchangeContext
    kept: KeptExchange


class DeviceExchanges:
    """The exchanges of one device.

    Args:
        device: The device; None if it has no key here, so that it takes part in Rounds without messages alone.
        store: The kept exchanges.
    """

    def __init__(self, device: DeviceIdentity | None, store: StoredExchanges) -> None:
        self._device = device
        self._store = store

    def prepare(self, assignment: m.Assignment, phase: str, wait_s: float) -> PreparedExchange:
        """Return the exchange of a phase, whose message is durable.

        Raises:
            InvalidInput: The protocol cannot make the message.
            Corrupted: A kept exchange is damaged.
        """
        context = self._context(assignment)
        kept = context.kept.get(phase)
        if kept is None:
            try:
                message: object = step_of(assignment, phase).message(context)
            except Exception as exc:  # Any error: the protocol may come from another package.
                raise InvalidInput(f"exchange: {phase}: {foreign_text(exc)}", code="FN-1608") from exc
            if not isinstance(message, Message):
                raise InvalidInput(
                    f"exchange: {phase}: got {type(message).__name__}, expected a Message; correct the protocol",
                    code="FN-1608",
                )
            kept = KeptExchange(message=message)
            self._store.keep(assignment.assignment_id)
            self._store.put(assignment.assignment_id, phase, kept)
        request = m.ExchangeRequest(
            assignment_id=assignment.assignment_id, phase=phase, payload=kept.message.payload, wait_s=wait_s
        )
        return PreparedExchange(request=request, context=context, kept=kept)

    def finish(self, prepared: PreparedExchange, outcome: m.ExchangeOutcome) -> None:
        """Keep the coordinator's message.

        Raises:
            InvalidInput: The protocol does not continue with it.
        """
        if not isinstance(outcome, m.ExchangeAnswer):
            return
        phase, assignment = prepared.request.phase, prepared.context.assignment
        try:
            step_of(assignment, phase).accept(prepared.context, outcome.message)
        except Exception as exc:  # Any error: the protocol may come from another package.
            raise InvalidInput(f"exchange: {phase}: {foreign_text(exc)}", code="FN-1608") from exc
        self._store.put(assignment.assignment_id, phase, replace(prepared.kept, answer=outcome.message))

    def masked(self, assignment: m.Assignment, header: m.UpdateHeader, payload: bytes) -> tuple[m.UpdateHeader, bytes]:
        """Return an Update as its protocol sends it.

        The header of a masked Update tells nothing of the data: its weight is that of one example, and statistics,
        steps and durations are absent.

        Raises:
            InvalidInput: The protocol cannot mask the Update.
        """
        mask = protocol_of(assignment.round_protocol).mask
        if mask is None:
            return header, payload
        if any(header.shifts):
            raise InvalidInput(
                f"masks: got the shifts {sorted(set(header.shifts))}, expected 0: all devices of the sum need one "
                "grid; set codec.max_shift to 0",
                code="FN-1608",
            )
        values = codec_of(assignment.codec).codec.decode(memoryview(payload)).astype(np.int64)
        update = EncodedUpdate(values=values, counts=header.statistics.counts)
        try:
            masked: object = mask(self._context(assignment), update)
        except Exception as exc:  # Any error: the protocol may come from another package.
            raise InvalidInput(f"masks: {foreign_text(exc)}", code="FN-1608") from exc
        if not isinstance(masked, bytes):
            raise InvalidInput(f"masks: got {type(masked).__name__}, expected bytes", code="FN-1608")
        telemetry = m.Telemetry(runtime=header.telemetry.runtime, fanin_version=header.telemetry.fanin_version)
        statistics = m.Statistics(counts=MappingProxyType({m.EXAMPLES: 1}))
        return replace(
            header, payload=artifact_of(masked), statistics=statistics, telemetry=telemetry, ranges=m.RangeCounts()
        ), masked

    def forget(self) -> None:
        """Remove all exchanges."""
        self._store.keep("")

    def _context(self, assignment: m.Assignment) -> ExchangeContext:
        if self._device is None:
            raise InvalidInput(
                "exchange: got no key of this device, expected one; pass it to the client", code="FN-1608"
            )
        phases = protocol_of(assignment.round_protocol).steps
        found = {phase: self._store.get(assignment.assignment_id, phase) for phase in phases}
        kept = {phase: each for phase, each in found.items() if each is not None}
        return ExchangeContext(device=self._device, assignment=assignment, kept=kept)
