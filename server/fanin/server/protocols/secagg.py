"""Secure aggregation as a round protocol: the coordinator's side, without a secret.

    ADVERTISING -> SHARING -> TRAINING -> CLOSING [-> CONFIRMING] -> UNMASKING -> FOLDING
        |U1           |U2        |U3                     |proof         |shares

Each answer, and the correction of the sum, is a function of the recorded messages and of the frozen rosters. The states
of ``edge.masking.coordinator`` are computed from them, in a process after a restart and by ``fanin verify`` alike.

Reference:
    Bonawitz et al. 2017, Practical Secure Aggregation, figure 4. docs/explanation/secure-aggregation.md has each byte.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np

from fanin.edge.masking import coordinator, messages
from fanin.edge.masking.coordinator import Advertising, Confirming, Masking, Sharing, Unmasking
from fanin.edge.masking.keystream import MaskStream
from fanin.edge.masking.parameters import parameters
from fanin.edge.masking.settings import MaskSettings
from fanin.edge.masking.sharing import SHARE_BYTES
from fanin.edge.masking.terms import LEAST_HONEST, MaskTerms
from fanin.edge.rings import Correction
from fanin.edge.tensors import Int64s
from fanin.protos.calls import device_id_of
from fanin.protos.errors import Conflict, InvalidInput, InvalidPlan
from fanin.protos.messages import MAX_MESSAGE_BYTES
from fanin.protos.plans import SECAGG_PROTOCOL, Plan
from fanin.protos.plans.named import RecordFactory
from fanin.server.protocols.exchanging import exchanging
from fanin.server.protocols.machine import RoundProtocol
from fanin.server.protocols.phases import Phase, PhaseExchange, RoundFacts
from fanin.server.protocols.requirements import ring_of

ADVERTISING: Final = "advertising"
SHARING: Final = "sharing"
TRAINING: Final = "training"
CONFIRMING: Final = "confirming"
UNMASKING: Final = "unmasking"
State = TypeVar("State")
FROZEN: Final = "the phase before is frozen"
_DEVICE_ID: Final = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """The states of an attempt as far as the record has come. A state is None before its set is frozen.

    Attributes:
        sharing: After U1 is frozen.
        masking: After U2 is frozen.
        closed: After U3 is frozen.
        unmasking: After the confirmations are frozen; without them, the same as ``closed``.
        indexes: The index of each device of U1.
    """

    sharing: Sharing | None = None
    masking: Masking | None = None
    closed: Confirming | Unmasking | None = None
    unmasking: Unmasking | None = None
    indexes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


class SecureAggregation:
    """The functions of the protocol for one Plan.

    Args:
        settings: The options of the Plan.
    """

    def __init__(self, settings: MaskSettings) -> None:
        self._settings = settings
        # The facts are one object until the next roster is frozen, and all devices are answered from them.
        self._last: tuple[RoundFacts, AttemptView] | None = None

    def check_advertisement(self, facts: RoundFacts, device: str, payload: bytes) -> None:
        """Raise InvalidInput unless a message advertises keys of its sender."""
        terms = self._terms(facts)
        entry = messages.read_advertisement(terms.digest, payload, terms.is_active)
        # The id of an enrolled device is a digest of its key. A simulated device has a name.
        if _DEVICE_ID.fullmatch(device) and device_id_of(entry.device.hex()) != device:
            raise InvalidInput(
                f"secure aggregation: device {device}: got keys of {entry.device.hex()}, expected its own",
                code="FN-1632",
            )
        attempt = Advertising(terms=terms, authority=self._settings.authority)
        coordinator.check_advertisement(attempt, entry.device, payload)

    def check_shares(self, facts: RoundFacts, device: str, payload: bytes) -> None:
        """Raise InvalidInput unless a message has sealed shares for the neighbors of its sender."""
        view = self._view(facts)
        coordinator.check(_known(view.sharing), _index(view, device), payload)

    def check_confirmation(self, facts: RoundFacts, device: str, payload: bytes) -> None:
        """Raise InvalidInput unless a message confirms the survivors."""
        view = self._view(facts)
        assert view.closed is not None, FROZEN
        coordinator.check(view.closed, _index(view, device), payload)

    def check_unmasking(self, facts: RoundFacts, device: str, payload: bytes) -> None:
        """Raise InvalidInput unless a message has shares for the survivors."""
        view = self._view(facts)
        coordinator.check(_known(view.unmasking), _index(view, device), payload)

    def roster(self, facts: RoundFacts, device: str) -> bytes | None:
        """Return message 2."""
        view = self._view(facts)
        return (
            _only(coordinator.respond(_known(view.sharing), view.indexes[device])) if device in view.indexes else None
        )

    def delivery(self, facts: RoundFacts, device: str) -> bytes | None:
        """Return message 4."""
        view = self._view(facts)
        return (
            _only(coordinator.respond(_known(view.masking), view.indexes[device])) if device in view.indexes else None
        )

    def survivors(self, facts: RoundFacts, device: str) -> bytes | None:
        """Return message 5."""
        view = self._view(facts)
        assert view.closed is not None, FROZEN
        return coordinator.respond(view.closed, view.indexes[device])[0]

    def proof(self, facts: RoundFacts, device: str) -> bytes | None:
        """Return message 7."""
        view = self._view(facts)
        return coordinator.respond(_known(view.unmasking), view.indexes[device])[1]

    def end(self, facts: RoundFacts, device: str) -> bytes | None:
        """Return no bytes: the device has given its shares."""
        return b""

    def correct(self, facts: RoundFacts) -> Correction:
        """Return the correction of the sum over the survivors.

        Raises:
            Conflict: A secret has too few shares, or too many false ones.
        """
        view = self._view(facts)
        unmasking = _known(view.unmasking)
        shares = {view.indexes[device]: message for device, message in facts.messages[UNMASKING].items()}
        layout = unmasking.terms.layout
        stream = MaskStream(layout, coordinator.correction_of(unmasking, shares).keys)

        def correction(first: int, last: int) -> Int64s:
            if first < layout.num_values:
                words = np.zeros(last - first, layout.ring.dtype)
                stream.add(words, first)
                return layout.ring.signed(words)
            tail = np.zeros(layout.num_tail, np.uint64)
            stream.add_tail(tail)
            return tail.view(np.int64)[first - layout.num_values : last - layout.num_values]

        return correction

    def _terms(self, facts: RoundFacts) -> MaskTerms:
        return self._settings.terms(facts.basis)

    def _view(self, facts: RoundFacts) -> AttemptView:
        last = self._last
        if last is not None and last[0] is facts:
            return last[1]
        view = self._computed(facts)
        self._last = facts, view
        return view

    def _computed(self, facts: RoundFacts) -> AttemptView:
        terms = self._terms(facts)
        if ADVERTISING not in facts.rosters:
            return AttemptView()
        advertised = facts.messages[ADVERTISING]
        first = Advertising(terms=terms, authority=self._settings.authority)
        sharing = coordinator.freeze_roster(first, [advertised[device] for device in facts.rosters[ADVERTISING]])
        numbers = {entry: index for index, entry in sharing.roster.entries.items()}
        entries = {
            device: messages.read_advertisement(terms.digest, payload, terms.is_active)
            for device, payload in advertised.items()
        }
        indexes = {device: numbers[entry] for device, entry in entries.items() if entry in numbers}
        view = AttemptView(sharing=sharing, indexes=indexes)
        if SHARING not in facts.rosters:
            return view
        masking = coordinator.freeze_sharers(sharing, _by_index(indexes, facts.messages[SHARING]))
        view = replace(view, masking=masking)
        if TRAINING not in facts.rosters:
            return view
        committed = facts.rosters[TRAINING]
        closed = coordinator.freeze_survivors(masking, [_index(view, device) for device in committed])
        view = replace(view, closed=closed, unmasking=closed if isinstance(closed, Unmasking) else None)
        if isinstance(closed, Confirming) and CONFIRMING in facts.rosters:
            confirmed = coordinator.freeze_confirmations(closed, _by_index(indexes, facts.messages[CONFIRMING]))
            view = replace(view, unmasking=confirmed)
        return view


def _by_index(indexes: Mapping[str, int], payloads: Mapping[str, bytes]) -> dict[int, bytes]:
    return {indexes[device]: payload for device, payload in payloads.items()}


def _index(view: AttemptView, device: str) -> int:
    index = view.indexes.get(device)
    if index is None:
        raise Conflict(f"secure aggregation: got device {device}, which is not in the roster", code="FN-1633")
    return index


def _known(state: State | None) -> State:
    assert state is not None, FROZEN
    return state


def _only(answers: tuple[bytes, ...]) -> bytes | None:
    """Return the only answer; None if the device is left out."""
    return answers[0] if answers else None


def _secagg(plan: Plan, settings: MaskSettings) -> RoundProtocol:
    quorum = _checked_quorum(plan, settings)
    side = SecureAggregation(settings)
    terms_bytes, num_peers = 1 + 32, plan.cohort.concurrency
    exchange = partial(PhaseExchange, deadline_s=settings.deadline_s or None)
    entry_bytes = messages.entry_bytes(settings.is_active)
    advertising = exchange(respond=side.roster, check=side.check_advertisement, max_bytes=terms_bytes + entry_bytes)
    sharing = exchange(
        respond=side.delivery,
        check=side.check_shares,
        max_bytes=min(terms_bytes + 36 + num_peers * (4 + messages.SEALED_BYTES), MAX_MESSAGE_BYTES),
    )
    confirming = exchange(
        respond=side.proof,
        check=side.check_confirmation,
        max_bytes=terms_bytes + 32 + messages.SIGNATURE_BYTES,
        quorum=quorum,
    )
    unmasking = exchange(
        respond=side.end,
        check=side.check_unmasking,
        max_bytes=min(terms_bytes + 36 + num_peers * (5 + SHARE_BYTES), MAX_MESSAGE_BYTES),
        quorum=quorum,
    )
    after = [Phase(name=UNMASKING, assigns=True, exchange=unmasking)]
    if settings.is_active:
        after.insert(0, Phase(name=CONFIRMING, assigns=True, exchange=confirming))
    protocol = exchanging(
        SECAGG_PROTOCOL,
        before=(
            Phase(name=ADVERTISING, gives_places=True, assigns=True, exchange=advertising),
            Phase(name=SHARING, assigns=True, exchange=sharing),
        ),
        after=after,
        training=Phase(
            name=TRAINING,
            assigns=True,
            accepts_updates=True,
            exchange=PhaseExchange(respond=side.survivors, max_bytes=0),
        ),
    )
    num_honest = settings.num_honest(num_peers) if plan.privacy.is_shared else 0
    return replace(protocol, correct=side.correct, ring=ring_of(plan), is_masked=True, num_honest=num_honest)


secagg: Final = RecordFactory(MaskSettings, _secagg, 1)
"""The factory of the protocol."""


def _checked_quorum(plan: Plan, settings: MaskSettings) -> int:
    """Return the least number of survivors that must answer after the closed set.

    Raises:
        InvalidPlan: The cohort cannot meet the threshold or the least number of survivors, or a roster is too long.
    """
    assumptions, cohort = settings.assumptions, plan.cohort
    chosen = parameters(cohort.concurrency, assumptions)
    # A roster has any number of devices in between. Those of a complete graph are computed at once.
    for num_devices in range(cohort.quorum, cohort.concurrency) if settings.is_active else (cohort.quorum,):
        parameters(num_devices, assumptions)
    is_complete = chosen.degree == cohort.concurrency - 1
    least = max(
        settings.min_survivors,
        assumptions.num_adversarial(cohort.concurrency) + LEAST_HONEST,
        chosen.threshold if is_complete else 0,
    )
    num_gone, num_dropouts = cohort.concurrency - cohort.quorum, assumptions.num_dropouts(cohort.concurrency)
    if num_gone > num_dropouts:
        fraction = math.ceil(1000 * num_gone / cohort.concurrency) / 1000
        raise InvalidPlan(
            f"plan: round.options: got dropout_fraction {settings.dropout_fraction:g}, which lets {num_dropouts} of "
            f"{cohort.concurrency} devices drop out, expected at least {fraction:g}: with cohort.quorum "
            f"{cohort.quorum}, {num_gone} may be missing; raise dropout_fraction or the quorum",
            code="FN-1644",
        )
    if cohort.concurrency < least:
        raise InvalidPlan(
            f"plan: cohort.concurrency: got {cohort.concurrency} with round.protocol 'secagg', expected at least "
            f"{least} devices, so that their sum can be unmasked and hides each; raise concurrency, buffer and quorum",
            code="FN-1644",
        )
    if cohort.quorum < least:
        raise InvalidPlan(
            f"plan: cohort.quorum: got {cohort.quorum} with round.protocol 'secagg', expected at least {least} of "
            f"{cohort.concurrency} devices, so that their sum can be unmasked and hides each; raise the quorum, or "
            "change round.options",
            code="FN-1644",
        )
    row_bytes = 4 + messages.entry_bytes(settings.is_active)
    size_bytes = 1 + 32 + 16 + 32 + 4 + chosen.degree * row_bytes
    if size_bytes > MAX_MESSAGE_BYTES:
        most = (MAX_MESSAGE_BYTES - 85) // row_bytes + 1
        raise InvalidPlan(
            f"plan: cohort.concurrency: got {cohort.concurrency} with round.protocol 'secagg', expected at most "
            f"{most}: each device has {chosen.degree} neighbors, and a roster of {size_bytes} bytes exceeds the "
            f"{MAX_MESSAGE_BYTES} of a message; lower the concurrency or adversarial_fraction",
            code="FN-1644",
        )
    # In a complete graph, any ``threshold`` shares suffice; else it depends on which devices are missing.
    return min(cohort.quorum, chosen.threshold if is_complete else cohort.concurrency - num_dropouts)
