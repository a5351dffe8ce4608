"""The state machine of a device: from its terms to the shares that unmask the sum.

    begin -> receive(roster) -> receive(delivery) -> masked(digest) -> receive(survivors) [-> receive(proof)] -> finish

Each function returns the next state and effects, and is pure: ``entropy`` is an argument. The state is a fold over the
journal, so ``resume`` repeats it. A message that is refused raises, and changes nothing. Security-relevant order:

1. The floor is checked before keys are drawn.
2. A fact is recorded before the reply that follows from it.
3. The second message of a phase is the same bytes, or a Conflict.
4. For each peer one kind of share is given, once, for one set of survivors.

Reference:
    Bonawitz et al. 2017, Practical Secure Aggregation, figure 4.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar, assert_never

from fanin.edge.masking import agreement, messages
from fanin.edge.masking.journal import (
    AttemptEnded,
    Fact,
    Forget,
    KeysDrawn,
    MaskEffect,
    PayloadMasked,
    Remember,
    Respond,
    SharesGiven,
    SharesOpened,
    SharesSealed,
    SurvivorsNamed,
)
from fanin.edge.masking.keystream import MaskKey
from fanin.edge.masking.messages import Kind, RosterEntry, ShareOf, SharesMessage, kind_of
from fanin.edge.masking.parameters import GraphParameters, is_secret
from fanin.edge.masking.roster import (
    DeliveredShares,
    DeviceSet,
    RosterView,
    check_different,
    check_entry,
    commitment_of,
    opened_shares,
    pair_mask,
    roster_digest,
    self_mask,
    share_key,
    sharers_of,
    signed_keys,
    survivors_of,
)
from fanin.edge.masking.sharing import Entropy, split
from fanin.edge.masking.terms import MaskIdentity, MaskTerms, check_later, decoded_terms
from fanin.protos.errors import Conflict, Corrupted, InvalidInput

WHAT: Final = "secure aggregation"
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskState:
    """The state of a device in an attempt.

    Attributes:
        identity: The device.
        terms: The terms.
        keys: Its secrets.
        roster: The roster as it sees it, once it received it.
        index: Its index in the roster.
        delivered: The shares that it holds.
        survivors: U3.
        sealed, opening, payload, naming, giving: The facts so far.
    """

    identity: MaskIdentity
    terms: MaskTerms
    keys: KeysDrawn
    roster: RosterView | None = None
    index: int = -1
    delivered: DeliveredShares | None = None
    survivors: DeviceSet | None = None
    sealed: SharesSealed | None = None
    opening: SharesOpened | None = None
    payload: PayloadMasked | None = None
    naming: SurvivorsNamed | None = None
    giving: SharesGiven | None = None


Step = tuple[MaskState, tuple[MaskEffect, ...]]


def begin(identity: MaskIdentity, terms: MaskTerms, ended: Iterable[AttemptEnded], entropy: Entropy) -> Step:
    """Draw the keys of an attempt and advertise them.

    Args:
        identity: The device.
        terms: The terms of the attempt.
        ended: Earlier attempts of this Run.
        entropy: Source of the secrets.

    Raises:
        InvalidPlan: The terms are less than the floor of the device.
        Conflict: The attempt is not later than an earlier one, or the device gave shares in this Round.
    """
    identity.floor.check(terms)
    for each in ended:
        check_later(terms, decoded_terms(each.terms), each.gave_shares == b"\1")
    sealing, masking, seed = (entropy(agreement.KEY_BYTES) for _ in range(3))
    device = identity.public
    unsigned = RosterEntry(
        device=device,
        sealing=agreement.public_of(sealing),
        masking=agreement.public_of(masking),
        commitment=commitment_of(terms, device, seed),
        signature=b"",
        certificate=identity.certificate if terms.is_active else b"",
    )
    entry = replace(unsigned, signature=identity.sign(agreement.KEYS_CONTEXT, signed_keys(terms, unsigned)))
    check_entry(f"{WHAT}: own entry", terms, entry, identity.floor.authority)
    answer = messages.framed(Kind.ADVERTISEMENT, terms.digest, entry.encoded())
    keys = KeysDrawn(terms=terms.encoded, sealing=sealing, masking=masking, seed=seed, answer=answer)
    return MaskState(identity=identity, terms=terms, keys=keys), (Remember(keys), Respond(answer))


def receive(state: MaskState, message: bytes, entropy: Entropy) -> Step:
    """Return the step after a message of the coordinator.

    Raises:
        InvalidInput: The message is malformed, false, of another attempt, or too early.
        Conflict: It differs from an earlier one of its phase, or the device is not among the survivors.
    """
    kind = kind_of(message)
    if kind is Kind.ROSTER:
        return _share(state, message, entropy)
    if kind is Kind.DELIVERY:
        return _open(state, message)
    if kind is Kind.SURVIVORS:
        return _name(state, message)
    if kind is Kind.PROOF:
        return _prove(state, message)
    raise InvalidInput(f"{WHAT}: got message {kind.value}, expected one for devices", code="FN-1635")


def mask_keys(state: MaskState) -> tuple[MaskKey, ...]:
    """Return the masks of the device's payload. Raises InvalidInput before the delivery."""
    roster, delivered = _in(state.roster, "a roster"), _in(state.delivered, "a delivery")
    peers = (peer for peer in roster.graph.neighbors(state.index) if peer in delivered.sharers.indexes)
    private = agreement.private_key(state.keys.masking)
    pairs = (pair_mask(roster, delivered.sharers, state.index, peer, private) for peer in peers)
    return (self_mask(delivered.sharers, state.index, state.keys.seed), *pairs)


def masked(state: MaskState, sha256: bytes) -> Step:
    """Record the digest of the masked payload, which is durable. Only then may the upload begin.

    Raises:
        Conflict: Another payload was masked before. The device must give up.
    """
    _in(state.delivered, "a delivery")
    fact = PayloadMasked(sha256=sha256)
    if state.payload is not None:
        if state.payload != fact:
            raise Conflict(
                f"{WHAT}: got the masked payload {sha256.hex()}, expected {state.payload.sha256.hex()}, which was "
                "recorded; a mask serves one payload, so give up the attempt",
                code="FN-1636",
            )
        return state, ()
    return replace(state, payload=fact), (Remember(fact),)


def finish(state: MaskState) -> tuple[MaskEffect, ...]:
    """Return the effects of an attempt's end: the Round ended, or the device gives up."""
    gave = b"\1" if state.giving is not None else b"\0"
    return (Forget(AttemptEnded(terms=state.terms.encoded, gave_shares=gave)),)


def resume(identity: MaskIdentity, facts: Sequence[Fact]) -> Step:
    """Return the state of a journal, and the last reply, which is repeated.

    Raises:
        Corrupted: The journal is not one that this device wrote. The device must give up.
    """
    if not facts or not isinstance(facts[0], KeysDrawn):
        raise Corrupted(f"{WHAT}: the journal has no keys; give up the attempt", code="FN-1634")
    try:
        state = MaskState(identity=identity, terms=decoded_terms(facts[0].terms), keys=facts[0])
        for fact in facts[1:]:
            state = _replayed(state, fact)
    except (InvalidInput, Conflict) as exc:
        raise Corrupted(f"{WHAT}: the journal contradicts itself; give up the attempt", code="FN-1634") from exc
    answer = getattr(facts[-1], "answer", b"")
    return state, (Respond(answer),) if answer else ()


def _replayed(state: MaskState, fact: Fact) -> MaskState:
    match fact:
        case SharesSealed():
            roster, index = _checked_roster(state, fact.received)
            return replace(state, roster=roster, index=index, sealed=fact)
        case SharesOpened():
            return replace(state, opening=fact, delivered=_checked_delivery(state, fact.received))
        case PayloadMasked():
            return replace(state, payload=fact)
        case SurvivorsNamed():
            return replace(state, naming=fact, survivors=_checked_survivors(state, fact.received))
        case SharesGiven():
            return replace(state, giving=fact)
        case KeysDrawn() | AttemptEnded():
            raise Corrupted(f"{WHAT}: the journal has two beginnings; give up the attempt", code="FN-1634")
        case _:
            assert_never(fact)


def _share(state: MaskState, message: bytes, entropy: Entropy) -> Step:
    if state.sealed is not None:
        return _again(state, state.sealed.received, message, state.sealed.answer)
    roster, index = _checked_roster(state, message)
    holders = roster.graph.holders(index)
    points = [holder + 1 for holder in holders]
    secrets = (state.keys.seed, state.keys.masking)
    split_secrets = [split(secret, roster.parameters.threshold, points, entropy) for secret in secrets]
    shares = dict(zip(holders, zip(*split_secrets, strict=True), strict=True))
    own = shares.pop(index, (b"", b""))
    private = agreement.private_key(state.keys.sealing)
    rows = {
        peer: agreement.sealed(share_key(roster, index, (index, peer), private), b"".join(pair))
        for peer, pair in shares.items()
    }
    answer = messages.sealed_bytes(state.terms.digest, roster.digest, rows)
    fact = SharesSealed(received=message, own_share=own[0], answer=answer)
    return replace(state, roster=roster, index=index, sealed=fact), (Remember(fact), Respond(answer))


def _checked_roster(state: MaskState, message: bytes) -> tuple[RosterView, int]:
    """Return the roster and the own index.

    1. n is at most that of the terms, and enough for a sum. 2. Parameters keep secrets. 3. The peers are the neighbors
    by the graph. 4. Entries are valid and different, in the order of their Ed25519 keys. 5. In a complete graph the
    digest is that of the entries.
    """
    terms = state.terms
    row = messages.read_roster(terms.digest, message, terms.is_active)
    if not terms.min_survivors <= row.num_devices <= terms.max_devices or row.index >= row.num_devices:
        raise InvalidInput(
            f"{WHAT}: got a roster of {row.num_devices} devices, expected {terms.min_survivors} to {terms.max_devices}",
            code="FN-1633",
        )
    chosen = GraphParameters(degree=row.degree, threshold=row.threshold)
    if not is_secret(row.num_devices, chosen, terms.assumptions):
        raise InvalidInput(
            f"{WHAT}: got the degree {row.degree} and the threshold {row.threshold} for {row.num_devices} devices, "
            "which do not keep secrets under the threat model of the terms",
            code="FN-1637",
        )
    own = messages.read_advertisement(terms.digest, state.keys.answer, terms.is_active)
    entries = {**row.peers, row.index: own}
    roster = RosterView(num_devices=row.num_devices, parameters=chosen, digest=row.digest, entries=entries)
    if tuple(sorted(row.peers)) != roster.graph.neighbors(row.index):
        raise InvalidInput(f"{WHAT}: the peers of the roster are not the neighbors of this device", code="FN-1633")
    ordered = [entries[index] for index in sorted(entries)]
    check_different(f"{WHAT}: roster", ordered)
    for peer, entry in row.peers.items():
        check_entry(f"{WHAT}: device {peer} of the roster", terms, entry, state.identity.floor.authority)
    is_ordered = ordered == sorted(ordered, key=lambda entry: entry.device)
    if not is_ordered or (roster.graph.is_complete and roster_digest(terms, chosen, ordered) != row.digest):
        raise InvalidInput(f"{WHAT}: the roster is not in the order of its keys, or has another digest", code="FN-1633")
    return roster, row.index


def _open(state: MaskState, message: bytes) -> Step:
    if state.opening is not None:
        return _again(state, state.opening.received, message, b"")
    delivered = _checked_delivery(state, message)
    fact = SharesOpened(received=message)
    return replace(state, opening=fact, delivered=delivered), (Remember(fact),)


def _checked_delivery(state: MaskState, message: bytes) -> DeliveredShares:
    """Return the shares of the neighbors in U2. The device is in it, and at least ``threshold`` of its holders are.

    Shares that do not open are left out: their sender must not stop this device.
    """
    roster, fact = _in(state.roster, "a roster"), _in(state.sealed, "a roster")
    row = messages.read_sealed(state.terms.digest, message, Kind.DELIVERY, roster.num_devices)
    sharers = sharers_of(roster, row.members)
    expected = [peer for peer in roster.graph.neighbors(state.index) if peer in sharers.indexes]
    if row.digest != roster.digest or state.index not in sharers.indexes or list(row.sealed) != expected:
        raise InvalidInput(
            f"{WHAT}: the delivery is of another roster, or not of the neighbors that sent shares", code="FN-1633"
        )
    num_holders = len(expected) + roster.graph.is_complete
    least = state.terms.least_survivors(roster.num_devices)
    if num_holders < roster.parameters.threshold or len(sharers.members) < least:
        raise InvalidInput(
            f"{WHAT}: got shares of {num_holders} holders and {len(sharers.members)} devices, expected at least "
            f"{roster.parameters.threshold} and {least}",
            code="FN-1638",
        )
    private = agreement.private_key(state.keys.sealing)
    keys = {peer: share_key(roster, state.index, (peer, state.index), private) for peer in row.sealed}
    shares = {peer: opened_shares(keys[peer], ciphertext) for peer, ciphertext in row.sealed.items()}
    held = {peer: pair for peer, pair in shares.items() if pair is not None}
    if roster.graph.is_complete:
        held[state.index] = fact.own_share, b""
    return DeliveredShares(sharers=sharers, shares=held, unopened=tuple(sorted(shares.keys() - held.keys())))


def _name(state: MaskState, message: bytes) -> Step:
    if state.naming is not None:
        after, effects = _again(state, state.naming.received, message, (state.giving or state.naming).answer)
        # A device that was killed between the two facts has not given shares yet.
        return (after, effects) if state.giving is not None or state.terms.is_active else _give(state)
    survivors = _checked_survivors(state, message)
    if not state.terms.is_active:
        naming = SurvivorsNamed(received=message, answer=b"")
        after, effects = _give(replace(state, naming=naming, survivors=survivors))
        return after, (Remember(naming), *effects)
    signature = state.identity.sign(agreement.CONFIRMATION_CONTEXT, survivors.digest)
    answer = messages.confirmation_bytes(state.terms.digest, survivors.digest, signature)
    naming = SurvivorsNamed(received=message, answer=answer)
    return replace(state, naming=naming, survivors=survivors), (Remember(naming), Respond(answer))


def _checked_survivors(state: MaskState, message: bytes) -> DeviceSet:
    roster, delivered = _in(state.roster, "a roster"), _in(state.delivered, "a delivery")
    _in(state.payload, "a masked payload")
    row = messages.read_survivors(state.terms.digest, message, roster.num_devices)
    survivors = survivors_of(roster.num_devices, delivered.sharers, row.members)
    if row.digest != delivered.sharers.digest:
        raise InvalidInput(f"{WHAT}: the survivors are of another set of sharers", code="FN-1633")
    least = state.terms.least_survivors(roster.num_devices)
    if len(survivors.members) < least:
        raise InvalidInput(f"{WHAT}: got {len(survivors.members)} survivors, expected at least {least}", code="FN-1638")
    if state.index not in survivors.indexes:
        raise Conflict(
            f"{WHAT}: this device is not among the survivors; its Update does not count, so give up the attempt",
            code="FN-1639",
        )
    return survivors


def _prove(state: MaskState, message: bytes) -> Step:
    """Give shares if ``threshold`` survivors confirmed the same set."""
    if state.giving is not None:
        return state, (Respond(state.giving.answer),)
    roster, survivors = _in(state.roster, "a roster"), _in(state.survivors, "survivors")
    row = messages.read_proof(state.terms.digest, message)
    threshold, count = roster.parameters.threshold, 0
    for index, signature in row.signatures.items():
        if count < threshold and index in survivors.indexes:
            device = roster.entries[index].device
            count += agreement.is_signature(device, signature, agreement.CONFIRMATION_CONTEXT, survivors.digest)
    if not state.terms.is_active or row.digest != survivors.digest or count < threshold:
        raise InvalidInput(
            f"{WHAT}: got {count} confirmations of these survivors, expected {threshold}",
            code="FN-1640",
        )
    return _give(state)


def _give(state: MaskState) -> Step:
    """Give one share of each owner: of b if it survived, else of s."""
    delivered, survivors = _in(state.delivered, "a delivery"), _in(state.survivors, "survivors")
    shares = {
        owner: (ShareOf.SELF_MASK, pair[0]) if owner in survivors.indexes else (ShareOf.PAIR_MASKS, pair[1])
        for owner, pair in delivered.shares.items()
    }
    answer = messages.shares_bytes(state.terms.digest, SharesMessage(digest=survivors.digest, shares=shares))
    fact = SharesGiven(answer=answer)
    return replace(state, giving=fact), (Remember(fact), Respond(answer))


def _again(state: MaskState, before: bytes, message: bytes, answer: bytes) -> Step:
    if message != before:
        raise Conflict(
            f"{WHAT}: got a second, different message {kind_of(message).value} of one attempt; give up the attempt",
            code="FN-1630",
        )
    return state, (Respond(answer),) if answer else ()


def _in(value: Part | None, what: str) -> Part:
    """Return a part of the state. Raises InvalidInput if the attempt has not come to it."""
    if value is None:
        raise InvalidInput(f"{WHAT}: got a message before {what}", code="FN-1635")
    return value
