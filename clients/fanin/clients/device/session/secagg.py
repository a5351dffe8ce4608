"""Secure aggregation as a round protocol: the device's side, with its journal in the device's folder.

    phase         message                     after the answer
    advertising   1 advertisement             2 roster: shares are sealed
    sharing       3 sealed shares             4 delivery: shares of others are opened
    training      the masked Update, then
                  none                        5 survivors: named and, unless confirmed, shares are given
    confirming    6 confirmation              7 proof: shares are given
    unmasking     8 shares                    the end

``edge.masking.device`` decides. This shell makes each fact durable before anything that follows from it is sent, so a
device that restarts repeats the same bytes, and one that lost its journal gives up. The journal has the secrets of the
attempt. The seed of the device's noise is drawn with its keys and kept with its first message: no other device and no
share can reveal it. It serves one payload, because an attempt masks one.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from fanin.clients.device.session.protocols import (
    DeviceProtocol,
    DeviceStep,
    EncodedUpdate,
    ExchangeContext,
    Message,
    ProtocolJournal,
)
from fanin.edge.masking import device
from fanin.edge.masking.journal import (
    AttemptEnded,
    Fact,
    Forget,
    KeysDrawn,
    MaskEffect,
    Remember,
    SharesGiven,
    SharesSealed,
    SurvivorsNamed,
    read_journal,
    record_of,
)
from fanin.edge.masking.keystream import masked_payload
from fanin.edge.masking.settings import MaskSettings
from fanin.edge.masking.terms import MaskIdentity, MaskTerms, decoded_terms
from fanin.edge.noise.streams import SEED_BYTES
from fanin.protos.errors import Conflict, Corrupted
from fanin.protos.plans import SECAGG_PROTOCOL
from fanin.protos.plans.named import RecordFactory

ADVERTISING: Final = "advertising"
Kind = TypeVar("Kind", KeysDrawn, SharesSealed, SurvivorsNamed, SharesGiven)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskJournal:
    """The content of a journal.

    Attributes:
        ended: The end of the newest earlier attempt of each lineage.
        facts: The attempt under way.
    """

    ended: tuple[AttemptEnded, ...] = ()
    facts: tuple[Fact, ...] = ()

    @staticmethod
    def read(journal: ProtocolJournal) -> "MaskJournal":
        """Return the content of a journal. Raises Corrupted if it is damaged."""
        facts = read_journal(journal.read())
        ended = tuple(fact for fact in facts if isinstance(fact, AttemptEnded))
        return MaskJournal(ended=ended, facts=facts[len(ended) :])

    def after(self, effects: Iterable[MaskEffect]) -> "MaskJournal":
        """Return the content after effects."""
        ended, facts = self.ended, self.facts
        for effect in effects:
            match effect:
                case Remember(fact):
                    facts = (*facts, fact)
                case Forget(end):
                    lineage = decoded_terms(end.terms).lineage
                    others = (each for each in ended if decoded_terms(each.terms).lineage != lineage)
                    ended, facts = (*others, end), ()
        return MaskJournal(ended=ended, facts=facts)

    def write(self, journal: ProtocolJournal) -> None:
        """Make the content durable."""
        journal.write(b"".join(map(record_of, (*self.ended, *self.facts))))

    def is_of(self, terms: MaskTerms) -> bool:
        """Return whether the attempt under way has these terms."""
        return bool(self.facts) and isinstance(self.facts[0], KeysDrawn) and self.facts[0].terms == terms.encoded

    def given_up(self) -> "MaskJournal":
        """Return the content after the end of the attempt under way."""
        if not self.facts:
            return self
        keys = self.facts[0]
        if not isinstance(keys, KeysDrawn):
            raise Corrupted("secure aggregation: the journal has no keys", code="FN-1634")
        gave = b"\1" if any(isinstance(fact, SharesGiven) for fact in self.facts) else b"\0"
        return self.after((Forget(AttemptEnded(terms=keys.terms, gave_shares=gave)),))


class MaskingDevice:
    """The steps of a device under the options of a Plan."""

    def __init__(self, settings: MaskSettings) -> None:
        self._settings = settings
        # The fold over a journal verifies each signature again, so the last state is kept with its facts.
        self._last: tuple[tuple[Fact, ...], device.MaskState] | None = None
        # The attempt under way, so that it can be ended without its journal.
        self._terms: MaskTerms | None = None

    def advertise(self, context: ExchangeContext) -> Message:
        """Return message 1. Its keys are drawn once for each attempt."""
        terms = self._terms = self._settings.terms(context.basis)
        try:
            content = MaskJournal.read(context.journal)
            if not content.is_of(terms):
                content = content.given_up()
        except Corrupted:
            _end_unknown(context.journal, terms)
            raise
        if not content.facts:
            step = device.begin(_identity(context), terms, content.ended, context.device.entropy)
            self._carry_out(context, content, step)
        seed = b"" if context.basis.privacy is None else context.device.entropy(SEED_BYTES)
        return Message(payload=self._recorded(context, KeysDrawn).answer, secret=seed)

    def receive(self, context: ExchangeContext, answer: bytes) -> None:
        """Record what follows from a message of the coordinator."""
        content, state = self._state(context)
        self._carry_out(context, content, device.receive(state, answer, context.device.entropy))

    def seal(self, context: ExchangeContext) -> Message:
        """Return message 3."""
        return Message(payload=self._recorded(context, SharesSealed).answer)

    def confirm(self, context: ExchangeContext) -> Message:
        """Return message 6."""
        return Message(payload=self._recorded(context, SurvivorsNamed).answer)

    def give(self, context: ExchangeContext) -> Message:
        """Return message 8."""
        return Message(payload=self._recorded(context, SharesGiven).answer)

    def mask(self, context: ExchangeContext, update: EncodedUpdate) -> bytes:
        """Return the masked payload, whose digest is in the journal."""
        content, state = self._state(context)
        names = [statistic.name for statistic in context.basis.statistics]
        weight, tail = update.counts[names[0]], [update.counts.get(name, 0) for name in names]
        share, values = self._settings.share(context.basis), (update.values,)
        noised = values if share is None else share.noised(update.values, context.kept[ADVERTISING].message.secret)
        pieces = masked_payload(state.terms.layout, device.mask_keys(state), noised, weight, tail)
        payload = b"".join(pieces)
        self._carry_out(context, content, device.masked(state, hashlib.sha256(payload).digest()))
        return payload

    def end(self, journal: ProtocolJournal) -> None:
        """Forget the secrets of the attempt under way."""
        self._last, terms, self._terms = None, self._terms, None
        try:
            content = MaskJournal.read(journal)
            if content.facts:
                content.given_up().write(journal)
        except Corrupted:
            # Without the terms, the next attempt finds the damage, and gives up.
            if terms is not None:
                _end_unknown(journal, terms)

    def _state(self, context: ExchangeContext) -> tuple[MaskJournal, device.MaskState]:
        self._terms = self._settings.terms(context.basis)
        content = MaskJournal.read(context.journal)
        if not content.is_of(self._terms):
            raise Conflict(
                "secure aggregation: the journal of this device has no keys of this Round; give up the attempt",
                code="FN-1634",
            )
        if self._last is not None and self._last[0] == content.facts:
            return content, self._last[1]
        return content, device.resume(_identity(context), content.facts)[0]

    def _carry_out(self, context: ExchangeContext, content: MaskJournal, step: device.Step) -> None:
        state, effects = step
        after = content.after(effects)
        if after != content:
            after.write(context.journal)
        self._last = after.facts, state

    def _recorded(self, context: ExchangeContext, kind: type[Kind]) -> Kind:
        for fact in MaskJournal.read(context.journal).facts:
            if isinstance(fact, kind):
                return fact
        raise Conflict(
            f"secure aggregation: the journal of this device has no {kind.__name__}; give up the attempt",
            code="FN-1634",
        )


def _end_unknown(journal: ProtocolJournal, terms: MaskTerms) -> None:
    """End an attempt whose journal is damaged. What this device did in its Round is lost, so the Round is over for it.

    It takes part in the next one.
    """
    MaskJournal(ended=(AttemptEnded(terms=terms.encoded, gave_shares=b"\1"),)).write(journal)


def _identity(context: ExchangeContext) -> MaskIdentity:
    own = context.device
    return MaskIdentity(
        public=bytes.fromhex(own.public_key), sign=own.sign_in, floor=context.floor, certificate=own.certificate
    )


def _secagg(settings: MaskSettings) -> DeviceProtocol:
    side = MaskingDevice(settings)
    after = [DeviceStep(phase="training", accept=side.receive), DeviceStep(phase="unmasking", message=side.give)]
    if settings.is_active:
        after.insert(1, DeviceStep(phase="confirming", message=side.confirm, accept=side.receive))
    return DeviceProtocol(
        name=SECAGG_PROTOCOL,
        before=(
            DeviceStep(phase=ADVERTISING, message=side.advertise, accept=side.receive),
            DeviceStep(phase="sharing", message=side.seal, accept=side.receive),
        ),
        after=tuple(after),
        mask=side.mask,
        end=side.end,
        adds_noise=True,
    )


secagg: Final = RecordFactory(MaskSettings, _secagg)
"""The factory of the protocol."""
