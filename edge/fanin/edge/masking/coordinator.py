"""The coordinator of an attempt: a function of the terms, the recorded messages and the three frozen sets.

    Advertising -> Sharing -> Masking [-> Confirming] -> Unmasking -> correction

``check`` validates one message when it arrives, ``advance`` freezes a set from the recorded messages, and ``respond``
returns what a device receives in a phase. All are pure, and there is no secret before ``correction_of``. So a restarted
coordinator repeats its states from the record, and ``respond`` returns the same bytes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from fanin.edge.masking import messages
from fanin.edge.masking.agreement import CONFIRMATION_CONTEXT, check_order, is_signature, private_key, public_of
from fanin.edge.masking.keystream import MaskKey
from fanin.edge.masking.messages import Kind, ProofMessage, RosterEntry, SealedMessage, ShareOf, SurvivorsMessage
from fanin.edge.masking.parameters import parameters
from fanin.edge.masking.roster import (
    DeviceSet,
    RosterView,
    check_entry,
    commitment_of,
    pair_mask,
    roster_digest,
    self_mask,
    set_bytes,
    sharers_of,
    survivors_of,
)
from fanin.edge.masking.sharing import combine, combine_with_errors, share_value
from fanin.edge.masking.terms import MaskTerms
from fanin.protos.errors import Conflict, InvalidInput

WHAT: Final = "secure aggregation"
MAX_NAMED: Final = 10
"""Most devices that a text names."""
Recorded = Mapping[int, bytes]
"""The recorded messages of a phase, by index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advertising:
    """Devices advertise keys. ``authority`` certifies devices under the threat ``active``."""

    terms: MaskTerms
    authority: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """U1 is frozen: devices send sealed shares."""

    terms: MaskTerms
    roster: RosterView


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """U2 is frozen: devices send masked Updates. ``sealed`` has their shares by sender and receiver."""

    terms: MaskTerms
    roster: RosterView
    sharers: DeviceSet
    sealed: Mapping[int, Mapping[int, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirming:
    """U3 is frozen: survivors confirm it."""

    terms: MaskTerms
    roster: RosterView
    sharers: DeviceSet
    survivors: DeviceSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmasking:
    """Survivors give shares. ``proof`` has the confirmations; empty unless the threat is ``active``."""

    terms: MaskTerms
    roster: RosterView
    sharers: DeviceSet
    survivors: DeviceSet
    proof: Mapping[int, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What unmasks the sum over the survivors: masks to add, and devices whose shares were false."""

    keys: tuple[MaskKey, ...]
    false: tuple[int, ...]


Attempt = Advertising | Sharing | Masking | Confirming | Unmasking


def check_advertisement(attempt: Advertising, device: bytes, message: bytes) -> None:
    """Raise InvalidInput unless a message has keys that this device advertises.

    Args:
        attempt: The first phase.
        device: The Ed25519 key of the caller, as it signed the call.
        message: Message 1.
    """
    terms, what = attempt.terms, f"{WHAT}: device {device.hex()}"
    entry = messages.read_advertisement(terms.digest, message, terms.is_active)
    if entry.device != device:
        raise InvalidInput(f"{what}: got the entry of device {entry.device.hex()}, expected its own", code="FN-1632")
    check_entry(what, terms, entry, attempt.authority)
    check_order(what, entry.sealing)
    check_order(what, entry.masking)


def check(attempt: Attempt, index: int, message: bytes) -> None:
    """Raise InvalidInput unless a message is one that this device of the roster may send in this phase."""
    terms, what = attempt.terms, f"{WHAT}: device {index}"
    match attempt:
        case Advertising():
            raise InvalidInput(f"{what}: got a message of a device without an index", code="FN-1635")
        case Sharing():
            row = messages.read_sealed(terms.digest, message, Kind.SEALED_SHARES)
            if row.digest != attempt.roster.digest or tuple(row.sealed) != attempt.roster.graph.neighbors(index):
                raise InvalidInput(f"{what}: got shares for others than its neighbors", code="FN-1633")
        case Masking():
            raise InvalidInput(f"{what}: got a message while masked Updates are uploaded", code="FN-1635")
        case Confirming():
            digest, signature = messages.read_confirmation(terms.digest, message)
            device = attempt.roster.entries[index].device
            is_valid = digest == attempt.survivors.digest and index in attempt.survivors.indexes
            if not is_valid or not is_signature(device, signature, CONFIRMATION_CONTEXT, digest):
                raise InvalidInput(f"{what}: got a confirmation that is false, or of other survivors", code="FN-1640")
        case Unmasking():
            _check_shares(what, attempt, index, message)
        case _:
            assert_never(attempt)


def respond(attempt: Attempt, index: int) -> tuple[bytes, ...]:
    """Return the messages for a device in this phase."""
    digest = attempt.terms.digest
    match attempt:
        case Advertising():
            return ()
        case Sharing():
            return (messages.roster_bytes(digest, attempt.roster.message(index)),)
        case Masking():
            if index not in attempt.sharers.indexes:
                return ()
            neighbors = attempt.roster.graph.neighbors(index)
            rows = {peer: attempt.sealed[peer][index] for peer in neighbors if peer in attempt.sharers.indexes}
            row = SealedMessage(digest=attempt.roster.digest, sealed=rows, members=attempt.sharers.encoded)
            return (messages.delivery_bytes(digest, row),)
        case Confirming() | Unmasking():
            row_of_survivors = SurvivorsMessage(digest=attempt.sharers.digest, members=attempt.survivors.encoded)
            survivors = messages.survivors_bytes(digest, row_of_survivors)
            if isinstance(attempt, Confirming) or not attempt.proof:
                return (survivors,)
            proof = ProofMessage(digest=attempt.survivors.digest, signatures=attempt.proof)
            return survivors, messages.proof_bytes(digest, proof)
        case _:
            assert_never(attempt)


def freeze_roster(attempt: Advertising, recorded: Sequence[bytes]) -> Sharing:
    """Freeze U1 from the advertisements, which were checked.

    A device whose key an earlier one of the record has is left out: it copied the key, and would stop all others.

    Args:
        attempt: The first phase.
        recorded: Messages 1, in the order of the record.

    Raises:
        Conflict: Too few devices.
        InvalidPlan: No parameters suit this number of devices.
    """
    terms, known = attempt.terms, set[bytes]()
    entries: list[RosterEntry] = []
    for data in recorded:
        entry = messages.read_advertisement(terms.digest, data, terms.is_active)
        keys = {entry.device, entry.sealing, entry.masking, entry.commitment}
        if known.isdisjoint(keys):
            entries.append(entry)
            known |= keys
    entries.sort(key=lambda entry: entry.device)
    _check_enough("advertisements", len(entries), terms.min_survivors)
    if len(entries) > terms.max_devices:
        raise InvalidInput(f"{WHAT}: got {len(entries)} devices, expected {terms.max_devices} or fewer", code="FN-1633")
    chosen = parameters(len(entries), terms.assumptions)
    digest = roster_digest(terms, chosen, entries)
    numbered: Mapping[int, RosterEntry] = dict(enumerate(entries))
    roster = RosterView(num_devices=len(entries), parameters=chosen, digest=digest, entries=numbered)
    return Sharing(terms=terms, roster=roster)


def freeze_sharers(attempt: Sharing, recorded: Recorded) -> Masking:
    """Freeze U2 from the sealed shares, which were checked. A device with too few holders in U2 is left out.

    Raises:
        Conflict: Too few devices.
    """
    terms, roster = attempt.terms, attempt.roster
    members, previous = set(recorded), -1
    while len(members) != previous:
        previous = len(members)
        members = {index for index in members if len(_holders(roster, index, members)) >= roster.parameters.threshold}
    _check_enough("devices that sent shares to enough holders", len(members), terms.least_survivors(roster.num_devices))
    sealed = {
        index: messages.read_sealed(terms.digest, recorded[index], Kind.SEALED_SHARES).sealed for index in members
    }
    sharers = sharers_of(roster, set_bytes(roster, sorted(members)))
    return Masking(terms=terms, roster=roster, sharers=sharers, sealed=sealed)


def freeze_survivors(attempt: Masking, committed: Collection[int]) -> Confirming | Unmasking:
    """Freeze U3: the devices whose masked Update was committed. It never changes afterwards.

    Raises:
        Conflict: Too few devices, or a secret that U3 cannot reveal.
    """
    terms, roster, sharers = attempt.terms, attempt.roster, attempt.sharers
    _check_enough("masked Updates", len(committed), terms.least_survivors(roster.num_devices))
    survivors = survivors_of(roster.num_devices, sharers, set_bytes(roster, sorted(committed)))
    lacking = [
        index
        for index in _needed(roster, sharers, survivors)
        if len(_holders(roster, index, survivors.indexes)) < roster.parameters.threshold
    ]
    _check_none_lacks(lacking, roster.parameters.threshold)
    if terms.is_active:
        return Confirming(terms=terms, roster=roster, sharers=sharers, survivors=survivors)
    return Unmasking(terms=terms, roster=roster, sharers=sharers, survivors=survivors, proof={})


def freeze_confirmations(attempt: Confirming, recorded: Recorded) -> Unmasking:
    """Freeze the confirmations, which were checked. Raises Conflict if they are too few."""
    _check_enough("confirmations", len(recorded), attempt.roster.parameters.threshold)
    rows = {index: messages.read_confirmation(attempt.terms.digest, data)[1] for index, data in recorded.items()}
    return Unmasking(
        terms=attempt.terms,
        roster=attempt.roster,
        sharers=attempt.sharers,
        survivors=attempt.survivors,
        proof=rows,
    )


def correction_of(attempt: Unmasking, recorded: Recorded) -> Correction:
    """Return the masks that unmask the sum over the survivors, from the given shares, which were checked.

    Raises:
        Conflict: A secret has too few shares, or too many false ones. Further shares may still come.
    """
    roster, sharers, survivors = attempt.roster, attempt.sharers, attempt.survivors
    given: dict[int, dict[int, bytes]] = {index: {} for index in _needed(roster, sharers, survivors)}
    for holder, data in recorded.items():
        for owner, (_, share) in messages.read_shares(attempt.terms.digest, data).shares.items():
            if owner in given:
                given[owner][holder + 1] = share
    threshold = roster.parameters.threshold
    _check_none_lacks([owner for owner, shares in given.items() if len(shares) < threshold], threshold)
    keys: list[MaskKey] = []
    false: set[int] = set()
    for owner, shares in given.items():
        honest = {point: share for point, share in shares.items() if point - 1 not in false}
        secret, points = _revealed(attempt, owner, honest if len(honest) >= threshold else shares)
        false |= {point - 1 for point in points}
        keys += _corrections(attempt, owner, secret)
    return Correction(keys=tuple(keys), false=tuple(sorted(false)))


def _corrections(attempt: Unmasking, owner: int, secret: bytes) -> Iterator[MaskKey]:
    roster, sharers, survivors = attempt.roster, attempt.sharers, attempt.survivors
    if owner in survivors.indexes:
        yield MaskKey(self_mask(sharers, owner, secret).key, is_negative=True)
        return
    private = private_key(secret)
    for peer in roster.graph.neighbors(owner):
        if peer in survivors.indexes:
            # The dropped device would have added this mask with the sign that it has for it: the sum still needs it.
            yield pair_mask(roster, sharers, owner, peer, private)


def _revealed(attempt: Unmasking, owner: int, shares: Mapping[int, bytes]) -> tuple[bytes, tuple[int, ...]]:
    """Return the secret of an owner, and the points of false shares."""
    threshold = attempt.roster.parameters.threshold
    try:
        secret = combine(shares, threshold)
        if _is_true(attempt, owner, secret):
            return secret, ()
        secret, false = combine_with_errors(shares, threshold)
    except InvalidInput as exc:
        raise _false_shares(owner, len(shares)) from exc
    if not _is_true(attempt, owner, secret):
        raise _false_shares(owner, len(shares))
    return secret, false


def _false_shares(owner: int, count: int) -> Conflict:
    return Conflict(
        f"{WHAT}: {count} shares of device {owner} do not give its secret; too many are false, or it sent false ones",
        code="FN-1642",
    )


def _is_true(attempt: Unmasking, owner: int, secret: bytes) -> bool:
    """Return whether a secret is the one that its owner advertised."""
    entry = attempt.roster.entries[owner]
    if owner in attempt.survivors.indexes:
        return commitment_of(attempt.terms, entry.device, secret) == entry.commitment
    return public_of(secret) == entry.masking


def _check_shares(what: str, attempt: Unmasking, index: int, message: bytes) -> None:
    """Raise InvalidInput unless a device in U3 gives one share, of the right kind, of owners in U2 that it holds.

    It may lack shares of an owner whose sealed shares did not open.
    """
    row = messages.read_shares(attempt.terms.digest, message)
    neighbors = attempt.roster.graph.neighbors(index)
    owners = {peer for peer in neighbors if peer in attempt.sharers.indexes}
    if attempt.roster.graph.is_complete:
        owners.add(index)
    survivors = attempt.survivors
    kinds = {owner: ShareOf.SELF_MASK if owner in survivors.indexes else ShareOf.PAIR_MASKS for owner in owners}
    if row.digest != survivors.digest or index not in survivors.indexes:
        raise InvalidInput(f"{what}: got shares for other survivors, or from a device that is none", code="FN-1633")
    if any(kinds.get(owner) is not kind for owner, (kind, _) in row.shares.items()):
        raise InvalidInput(f"{what}: got shares of other owners, or of the other secret", code="FN-1633")
    for _, share in row.shares.values():
        share_value(share)


def _needed(roster: RosterView, sharers: DeviceSet, survivors: DeviceSet) -> Iterator[int]:
    """Yield the devices whose secret is needed: survivors, and dropped ones with a neighbor among these."""
    for index in sharers.members:
        if index in survivors.indexes or not survivors.indexes.isdisjoint(roster.graph.neighbors(index)):
            yield index


def _holders(roster: RosterView, index: int, members: Collection[int]) -> list[int]:
    return [holder for holder in roster.graph.holders(index) if holder in members]


def _check_enough(what: str, received: int, expected: int) -> None:
    if received < expected:
        raise Conflict(f"{WHAT}: got {received} {what}, expected at least {expected}", code="FN-1638")


def _check_none_lacks(lacking: Collection[int], threshold: int) -> None:
    if lacking:
        named = ", ".join(map(str, sorted(lacking)[:MAX_NAMED])) + (", .." if len(lacking) > MAX_NAMED else "")
        raise Conflict(
            f"{WHAT}: got fewer than {threshold} shares of the secrets of {len(lacking)} devices ({named}), which the "
            "sum needs; more devices dropped out than the Plan allows for",
            code="FN-1638",
        )
