"""The exchanges of an Assignment, carried out: the device's message is made once, kept, sent and repeated.

1. a phase with an answer in the folder is over: nothing is sent
2. a message in the folder is repeated, byte for byte; else it is made, and is durable before it is sent
3. the answer is accepted by the protocol, and is durable before the next step
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from fanin.clients.device.downloads import DeviceCalls
from fanin.clients.device.session.known import protocol_of
from fanin.clients.device.session.protocols import (
    DeviceIdentity,
    DeviceProtocol,
    DeviceStep,
    EncodedUpdate,
    ExchangeContext,
    KeptExchange,
    Message,
)
from fanin.clients.device.storage.protocols import DeviceFolder, StoredJournals
from fanin.edge.basis import RoundBasis, basis_of
from fanin.edge.bundles.arrays import table_in
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.clipped import with_clip_bit
from fanin.edge.codecs.codec import codec_of
from fanin.edge.codecs.fixed import decoded
from fanin.edge.codecs.stage import Stage
from fanin.edge.codecs.stages import layout_of
from fanin.edge.masking.terms import MaskFloor
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import FaninError, InvalidInput, foreign_text
from fanin.protos.plans import CENTRAL


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
        folder: The kept exchanges, the journals of protocols, and the floor.
    """

    def __init__(self, device: DeviceIdentity | None, folder: DeviceFolder) -> None:
        self._device = device
        self._store = folder.exchanges
        self._journals = folder.journals
        self._guard = folder.guard
        self._protocol: DeviceProtocol | None = None
        self._basis: RoundBasis | None = None
        self._floor = MaskFloor()

    def begin(self, assignment: m.Assignment, manifest: Manifest, stages: Mapping[str, Stage]) -> None:
        """Begin the exchanges of an Assignment, whose Bundle and stages are known."""
        self._floor = self._guard.floor(manifest).masks or MaskFloor()
        self._protocol = protocol_of(assignment.round_protocol)
        check_noise(assignment.privacy, self._protocol)
        num_values = layout_of(table_in(manifest, assignment.flower), stages).total_table.num_values
        self._basis = basis_of(assignment, num_values)

    async def exchange(
        self, calls: DeviceCalls, assignment: m.Assignment, phase: str, wait_s: float
    ) -> m.ExchangeOutcome:
        """Send the message of a phase, unless its answer is kept, and keep the answer."""
        prepared = self.prepare(assignment, phase, wait_s)
        if prepared.kept.answer is not None:
            return m.ExchangeAnswer(message=prepared.kept.answer)
        outcome = await calls.exchange(prepared.request)
        self.finish(prepared, outcome)
        return outcome

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
                message: object = self._step(phase).message(context)
            except Exception as exc:  # Any error: the protocol may come from another package.
                raise _refusal(f"exchange: {phase}", exc) from exc
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
            self._step(phase).accept(prepared.context, outcome.message)
        except Exception as exc:  # Any error: the protocol may come from another package.
            raise _refusal(f"exchange: {phase}", exc) from exc
        self._store.put(assignment.assignment_id, phase, replace(prepared.kept, answer=outcome.message))

    def masked(
        self, assignment: m.Assignment, header: m.UpdateHeader, payload: bytes, num_values: int
    ) -> tuple[m.UpdateHeader, bytes]:
        """Return an Update of ``num_values`` values as its protocol sends it.

        The header of a masked Update tells nothing of the data: its weight is that of one example, and statistics,
        steps and durations are absent.

        Raises:
            InvalidInput: The protocol cannot mask the Update.
        """
        assert self._protocol is not None, "exchanges begin with the Assignment"
        mask = self._protocol.mask
        if mask is None:
            return with_clip_bit(assignment, header, payload)
        if any(header.shifts):
            raise InvalidInput(
                f"masks: got the shifts {sorted(set(header.shifts))}, expected 0: all devices of the sum need one "
                "grid; set codec.max_shift to 0",
                code="FN-1608",
            )
        values = decoded(codec_of(assignment.codec).codec, payload, num_values).astype(np.int64)
        update = EncodedUpdate(values=values, counts=header.statistics.counts)
        try:
            masked: object = mask(self._context(assignment), update)
        except Exception as exc:  # Any error: the protocol may come from another package.
            raise _refusal("masks", exc) from exc
        if not isinstance(masked, bytes):
            raise InvalidInput(f"masks: got {type(masked).__name__}, expected bytes", code="FN-1608")
        telemetry = m.Telemetry(runtime=header.telemetry.runtime, fanin_version=header.telemetry.fanin_version)
        statistics = m.Statistics(counts=MappingProxyType({m.EXAMPLES: 1}))
        return replace(
            header, payload=artifact_of(masked), statistics=statistics, telemetry=telemetry, ranges=m.RangeCounts()
        ), masked

    def forget(self) -> None:
        """Remove all exchanges, and what the protocol need not keep any more."""
        self._store.keep("")
        if self._protocol is not None and self._basis is not None:
            self._protocol.end(_Journal(self._journals, self._basis.run_id))
            self._protocol, self._basis = None, None

    def _step(self, phase: str) -> DeviceStep:
        assert self._protocol is not None, "exchanges begin with the Assignment"
        step = self._protocol.steps.get(phase)
        if step is None:
            raise InvalidInput(f"exchange: got the phase {phase!r}, which the protocol does not have", code="FN-1602")
        return step

    def _context(self, assignment: m.Assignment) -> ExchangeContext:
        if self._device is None:
            raise InvalidInput(
                "exchange: got no key of this device, expected one; pass it to the client", code="FN-1608"
            )
        assert self._protocol is not None and self._basis is not None, "exchanges begin with the Assignment"
        phases = self._protocol.steps
        found = {phase: self._store.get(assignment.assignment_id, phase) for phase in phases}
        kept = {phase: each for phase, each in found.items() if each is not None}
        journal = _Journal(self._journals, assignment.run_id)
        return ExchangeContext(
            device=self._device,
            assignment=assignment,
            kept=kept,
            basis=self._basis,
            journal=journal,
            floor=self._floor,
        )


def check_noise(privacy: m.PrivacyTerms | None, protocol: DeviceProtocol) -> None:
    """Raise InvalidInput for noise on devices that this device would not add: it must not send a bare change."""
    if privacy is not None and privacy.mechanism != CENTRAL and not protocol.adds_noise:
        raise InvalidInput(
            f"assignment: privacy: got the mechanism {privacy.mechanism!r} with round.protocol {protocol.name!r}, "
            f"expected {CENTRAL!r}, or a protocol whose devices add noise; the coordinator must not start such a run",
            code="FN-1688",
        )


def _refusal(what: str, error: Exception) -> InvalidInput:
    """Return the error of a protocol. An error of ours keeps its code."""
    code = error.code if isinstance(error, FaninError) else "FN-1608"
    return InvalidInput(f"{what}: {foreign_text(error)}", code=code)


@dataclass(frozen=True, slots=True)
class _Journal:
    """The journal of a Run: a ``ProtocolJournal``."""

    store: StoredJournals
    run_id: str

    def read(self) -> bytes:
        return self.store.get(self.run_id)

    def write(self, data: bytes) -> None:
        self.store.put(self.run_id, data)
