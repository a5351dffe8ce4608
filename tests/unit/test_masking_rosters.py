"""False keys and rosters, different sets for different devices, false confirmations."""

from dataclasses import replace

import pytest
from support.masked import FixedEntropy, attempt_of, later, terms_of, update_of
from support.masked_attacks import advertised, masked, refused, shared, survivors_message

from fanin.commands.bench.harness.masked import MaskedAttempt, MaskedDevice
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.masking import agreement, coordinator, device, messages
from fanin.edge.masking.coordinator import Advertising, Confirming, Masking, Sharing
from fanin.edge.masking.messages import Kind, ProofMessage, RosterEntry
from fanin.edge.masking.parameters import Threat
from fanin.edge.masking.roster import (
    check_different,
    check_entry,
    roster_digest,
    set_bytes,
    share_key,
    sharers_of,
    survivors_of,
)
from fanin.protos.errors import Conflict, InvalidInput

LOW_ORDER = [
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]
"""The X25519 points of low order in their shortest forms (RFC 7748, section 6.1, and Curve25519's page on them)."""
SPARSE = {"adversarial": 0.05, "dropout": 0.2}


# Keys: of low order, twice, changed, not certified.


def entry_with(attempt: MaskedAttempt, **changes: bytes) -> RosterEntry:
    """Return an entry of a new device with changed keys, signed again."""
    key, authority = SigningKey(bytes(range(32))), SigningKey(FixedEntropy(len(attempt.devices))(32))
    public = bytes.fromhex(key.public)
    fields = {
        "sealing": agreement.public_of(b"a" * 32),
        "masking": agreement.public_of(b"b" * 32),
        "commitment": bytes(32),
        **changes,
    }
    data = b"".join((attempt.terms.digest, fields["sealing"], fields["masking"], fields["commitment"]))
    return RosterEntry(
        device=public,
        signature=key.sign(agreement.KEYS_CONTEXT, data),
        certificate=authority.sign(agreement.IDENTITY_CONTEXT, public) if attempt.terms.is_active else b"",
        **fields,
    )


@pytest.mark.parametrize("name", ["sealing", "masking"])
@pytest.mark.parametrize("point", [*LOW_ORDER, "ee" + "ff" * 30 + "7f", "ff" * 32], ids=lambda point: point[:6])
def test_a_point_of_low_order_is_refused(name: str, point: str) -> None:
    attempt = attempt_of(terms_of(4), 4)
    entry = entry_with(attempt, **{name: bytes.fromhex(point)})
    with refused("FN-1622"):
        coordinator.check_advertisement(first_phase(attempt), entry.device, advertisement(attempt, entry))


@pytest.mark.parametrize("name", ["sealing", "masking"])
def test_a_device_uses_no_point_of_low_order(name: str) -> None:
    """The coordinator lets a device of its own into the roster whose shared secrets everybody knows."""
    attempt = advertised(5, Threat.ACTIVE)
    foreign = entry_with(attempt, **{name: bytes.fromhex(LOW_ORDER[2])})
    each, own, entries, digest = roster_with(attempt, foreign)
    peers = {index: entry for index, entry in enumerate(entries) if index != own}
    roster = roster_bytes_of(attempt, own, index=own, peers=peers, digest=digest)
    if name == "sealing":
        with refused("FN-1622"):
            each.receive(roster)
        return
    (answer,) = each.receive(roster)
    # Its sealed shares are valid: only the masking key is of low order.
    row = messages.read_sealed(attempt.terms.digest, answer, Kind.SEALED_SHARES)
    view = each.state.roster
    assert view is not None
    secrets = {agreement.public_of(other.state.keys.sealing): other.state.keys.sealing for other in attempt.devices}
    secrets[foreign.sealing] = b"a" * 32
    sealed = {
        peer: agreement.sealed(
            share_key(view, peer, (peer, own), agreement.private_key(secrets[view.entries[peer].sealing])), bytes(66)
        )
        for peer in row.sealed
    }
    members = set_bytes(view, range(5))
    delivery = messages.SealedMessage(digest=digest, sealed=sealed, members=members)
    each.receive(messages.delivery_bytes(attempt.terms.digest, delivery))
    with refused("FN-1622"):
        device.mask_keys(each.state)


def test_keys_that_were_changed_or_signed_for_other_terms_are_refused() -> None:
    attempt = attempt_of(terms_of(4), 4)
    entry = entry_with(attempt)
    check_entry("entry", attempt.terms, entry, attempt.authority)
    for name in ("sealing", "masking", "commitment"):
        with refused("FN-1632"):
            changed = replace(entry, **{name: agreement.public_of(b"c" * 32)})
            check_entry("entry", attempt.terms, changed, attempt.authority)
    with refused("FN-1632"):
        check_entry("entry", later(attempt.terms, attempts=1), entry, attempt.authority)
    with refused("FN-1631"):
        same = entry_with(attempt, sealing=entry.masking)
        check_entry("entry", attempt.terms, same, attempt.authority)


def test_an_invented_device_has_no_certificate() -> None:
    attempt = attempt_of(terms_of(4, Threat.ACTIVE), 4)
    entry = entry_with(attempt)
    check_entry("entry", attempt.terms, entry, attempt.authority)
    own = SigningKey(b"coordinator's own key, 32 bytes!")
    forged = replace(entry, certificate=own.sign(agreement.IDENTITY_CONTEXT, entry.device))
    for wrong in (forged, replace(entry, certificate=bytes(64))):
        with refused("FN-1632"):
            check_entry("entry", attempt.terms, wrong, attempt.authority)


def first_phase(attempt: MaskedAttempt) -> Advertising:
    assert isinstance(attempt.phase, Advertising)
    return attempt.phase


def advertisement(attempt: MaskedAttempt, entry: RosterEntry) -> bytes:
    return messages.framed(Kind.ADVERTISEMENT, attempt.terms.digest, entry.encoded())


def test_the_advertisement_of_another_device_is_refused() -> None:
    attempt = attempt_of(terms_of(4), 4)
    message = attempt.devices[0].begin(attempt.terms)
    coordinator.check_advertisement(first_phase(attempt), attempt.devices[0].identity.public, message)
    with refused("FN-1632"):
        coordinator.check_advertisement(first_phase(attempt), attempt.devices[1].identity.public, message)


@pytest.mark.parametrize("name", ["sealing", "masking", "commitment"])
def test_a_device_with_the_key_of_another_is_left_out(name: str) -> None:
    """Only the copy is left out, so it cannot stop the others. A device refuses a roster with both."""
    attempt = attempt_of(terms_of(5), 5)
    honest = [each.begin(attempt.terms) for each in attempt.devices]
    entries = [messages.read_advertisement(attempt.terms.digest, message, False) for message in honest]
    copy = entry_with(attempt, **{name: getattr(entries[0], name)})
    check_entry("copy", attempt.terms, copy, attempt.authority)
    roster = coordinator.freeze_roster(first_phase(attempt), [*honest, advertisement(attempt, copy)]).roster
    assert list(roster.entries.values()) == sorted(entries, key=lambda entry: entry.device)
    with refused("FN-1631"):
        check_different("roster", [*entries, copy])


def test_a_device_that_takes_part_twice_counts_once() -> None:
    attempt = attempt_of(terms_of(5), 5)
    honest = [each.begin(attempt.terms) for each in attempt.devices]
    roster = coordinator.freeze_roster(first_phase(attempt), [*honest, attempt.devices[0].begin(attempt.terms)]).roster
    assert roster.num_devices == 5
    with refused("FN-1638", Conflict):
        coordinator.freeze_roster(first_phase(attempt), [honest[0]] * 5)


# Rosters that differ between devices.


def roster_bytes_of(attempt: MaskedAttempt, place: int, **changes: object) -> bytes:
    """Return the roster of a device, changed by a coordinator that lies."""
    assert isinstance(attempt.phase, Sharing)
    row = replace(attempt.phase.roster.message(place), **changes)  # type: ignore[arg-type]
    return messages.roster_bytes(attempt.terms.digest, row)


def roster_with(attempt: MaskedAttempt, foreign: RosterEntry) -> tuple[MaskedDevice, int, list[RosterEntry], bytes]:
    """Return a device, its index, the entries and the digest of a roster whose first entry is replaced by another."""
    assert isinstance(attempt.phase, Sharing)
    known = list(attempt.phase.roster.entries.values())
    entries = sorted([*known[1:], foreign], key=lambda entry: entry.device)
    own = next(index for index, entry in enumerate(entries) if entry in known)
    each = next(each for each in attempt.devices if each.identity.public == entries[own].device)
    return each, own, entries, roster_digest(attempt.terms, attempt.phase.roster.parameters, entries)


def test_a_complete_roster_with_another_entry_is_refused() -> None:
    attempt = advertised(5, Threat.ACTIVE)
    each, own, entries, digest = roster_with(attempt, entry_with(attempt))
    peers = {index: entry for index, entry in enumerate(entries) if index != own}
    with refused("FN-1633"):
        each.receive(roster_bytes_of(attempt, own, index=own, peers=peers))
    # With the digest of these entries it is another roster: nobody else has the masks of its pairs.
    (answer,) = each.receive(roster_bytes_of(attempt, own, index=own, peers=peers, digest=digest))
    with refused("FN-1633"):
        coordinator.check(attempt.phase, own, answer)


def test_shares_from_another_sparse_roster_do_not_open() -> None:
    """The coordinator shows device 0 another digest. A neighbor in both graphs cannot open the shares of device 0."""
    attempt = advertised(40, **SPARSE)
    sharing = attempt.phase
    assert isinstance(sharing, Sharing)
    # Neighbors by another digest: the coordinator looks for one that shares a neighbor with the true graph.
    digests = (bytes([number]) * 32 for number in range(256))
    fakes = (replace(sharing.roster, digest=digest) for digest in digests)
    common = set(sharing.roster.graph.neighbors(0))
    fake, peer = next((fake, peer) for fake in fakes for peer in fake.graph.neighbors(0) if peer in common)
    (answer,) = attempt.devices[0].receive(messages.roster_bytes(attempt.terms.digest, fake.message(0)))
    with refused("FN-1633"):
        coordinator.check(sharing, 0, answer)
    sealed = messages.read_sealed(attempt.terms.digest, answer, Kind.SEALED_SHARES).sealed
    # All others share honestly. The coordinator puts the shares of device 0 into the delivery of their neighbor.
    masking = attempt.share({0})
    members = sorted({0, *masking.sharers.members})
    sharers = sharers_of(masking.roster, set_bytes(masking.roster, members))
    rows = {each: masking.sealed[each][peer] for each in masking.roster.graph.neighbors(peer) if each}
    row = messages.SealedMessage(
        digest=masking.roster.digest, sealed={0: sealed[peer], **rows}, members=sharers.encoded
    )
    attempt.devices[peer].receive(messages.delivery_bytes(attempt.terms.digest, row))
    delivered = attempt.devices[peer].state.delivered
    assert delivered is not None and delivered.unopened == (0,) and 0 not in delivered.shares


@pytest.mark.parametrize(
    "changes",
    [
        {"threshold": 2},
        {"threshold": 7},
        {"degree": 4},
        {"num_devices": 5},
        {"num_devices": 7},
        {"index": 5},
        {"index": 6},
        {"digest": bytes(32)},
        {"peers": {}},
    ],
    ids=str,
)
def test_a_changed_roster_is_refused(changes: dict[str, object]) -> None:
    attempt = advertised(6, Threat.ACTIVE)
    each = attempt.devices[0]
    before = each.state
    with pytest.raises(InvalidInput) as caught:
        each.receive(roster_bytes_of(attempt, 0, **changes))
    assert caught.value.code in ("FN-1633", "FN-1637", "FN-1632")
    assert each.state == before
    each.receive(roster_bytes_of(attempt, 0))


def test_sealed_shares_for_others_than_the_neighbors_are_refused() -> None:
    attempt = advertised(40, **SPARSE)
    assert isinstance(attempt.phase, Sharing)
    digest = attempt.phase.roster.digest
    (answer,) = attempt.devices[0].receive(roster_bytes_of(attempt, 0))
    sealed = messages.read_sealed(attempt.terms.digest, answer, Kind.SEALED_SHARES).sealed
    peer, *rest = sealed
    foreign = next(index for index in range(1, 40) if index not in sealed)
    for rows in ({each: sealed[each] for each in rest}, {**sealed, foreign: sealed[peer]}, {}):
        with refused("FN-1633"):
            coordinator.check(attempt.phase, 0, messages.sealed_bytes(attempt.terms.digest, digest, rows))
    coordinator.check(attempt.phase, 0, answer)


def test_a_coordinator_between_two_devices_is_refused() -> None:
    """In a sparse roster, whose digest a device cannot compute, the coordinator puts its own key into an entry."""
    attempt = advertised(40, **SPARSE)
    assert isinstance(attempt.phase, Sharing)
    peers = attempt.phase.roster.message(0).peers
    first, second, *_ = sorted(peers)
    own = agreement.public_of(b"c" * 32)
    lies: list[tuple[str, dict[int, RosterEntry]]] = [
        ("FN-1632", {first: replace(peers[first], masking=own)}),
        ("FN-1632", {first: replace(peers[first], sealing=own)}),
        ("FN-1632", {first: replace(peers[first], commitment=bytes(32))}),
        ("FN-1631", {first: peers[second]}),
        ("FN-1633", {first: peers[second], second: peers[first]}),
    ]
    for code, change in lies:
        with refused(code):
            attempt.devices[0].receive(roster_bytes_of(attempt, 0, peers={**peers, **change}))
    attempt.devices[0].receive(roster_bytes_of(attempt, 0))


def test_a_coordinator_that_chooses_the_neighbors_is_refused() -> None:
    attempt = advertised(40, **SPARSE)
    assert isinstance(attempt.phase, Sharing)
    roster = attempt.phase.roster
    own = roster.graph.neighbors(0)
    others = [index for index in range(1, 40) if index not in own][: len(own)]
    with refused("FN-1633"):
        attempt.devices[0].receive(
            roster_bytes_of(attempt, 0, peers={index: roster.entries[index] for index in others})
        )


def test_parameters_of_a_sparse_roster_that_keep_no_secret_are_refused() -> None:
    attempt = advertised(40, adversarial=0.3, dropout=0.1)
    assert isinstance(attempt.phase, Sharing)
    threshold = attempt.phase.roster.parameters.threshold
    assert not attempt.phase.roster.graph.is_complete and threshold > 2
    with refused("FN-1637"):
        attempt.devices[0].receive(roster_bytes_of(attempt, 0, threshold=threshold - 1))
    attempt.devices[0].receive(roster_bytes_of(attempt, 0))


def test_a_second_roster_is_refused() -> None:
    attempt = advertised()
    each = attempt.devices[0]
    (answer,) = each.receive(roster_bytes_of(attempt, 0))
    assert each.receive(roster_bytes_of(attempt, 0)) == (answer,)
    with refused("FN-1630", Conflict):
        each.receive(roster_bytes_of(attempt, 0, digest=bytes(32)))


def test_different_sharers_give_no_sum_and_no_shares() -> None:
    """The coordinator tells devices 0 and 1 that device 5 sent no shares, and the others that it did."""
    attempt = shared(6, Threat.ACTIVE, dropout=0.2)
    assert isinstance(attempt.phase, Masking)
    honest = attempt.phase
    smaller = replace(honest, sharers=sharers_of(honest.roster, set_bytes(honest.roster, range(5))))
    for index in range(6):
        phase = smaller if index < 2 else honest
        attempt.devices[index].receive(coordinator.respond(phase, index)[0])
        attempt.add(attempt.devices[index].masked(update_of(index)))
    members = set_bytes(honest.roster, range(5))
    answers = {}
    for index in range(5):
        sharers = smaller.sharers if index < 2 else honest.sharers
        row = messages.SurvivorsMessage(digest=sharers.digest, members=members)
        (answers[index],) = attempt.devices[index].receive(messages.survivors_bytes(attempt.terms.digest, row))
    signatures = {index: messages.read_confirmation(attempt.terms.digest, data)[1] for index, data in answers.items()}
    for index in range(5):
        sharers = smaller.sharers if index < 2 else honest.sharers
        digest = survivors_of(6, sharers, members).digest
        proof = messages.proof_bytes(attempt.terms.digest, ProofMessage(digest=digest, signatures=signatures))
        with refused("FN-1640"):
            attempt.devices[index].receive(proof)


# The confirmation of the survivors.


def confirmed() -> tuple[MaskedAttempt, dict[int, bytes], bytes]:
    """Return an active attempt of 6 devices (threshold 4), the signatures of all, and the digest of the survivors."""
    attempt = masked(6, Threat.ACTIVE)
    phase = attempt.phase
    assert isinstance(phase, Confirming)
    for index in range(6):
        attempt.devices[index].receive(coordinator.respond(phase, index)[0])
    signatures = {}
    for index, each in enumerate(attempt.devices):
        assert each.state.naming is not None
        signatures[index] = messages.read_confirmation(attempt.terms.digest, each.state.naming.answer)[1]
    return attempt, signatures, phase.survivors.digest


@pytest.mark.parametrize("forge", ["few", "foreign", "other digest", "repeated"])
def test_shares_need_enough_confirmations(forge: str) -> None:
    attempt, signatures, digest = confirmed()
    few = dict(list(signatures.items())[:3])
    rows = {
        "few": (digest, few),
        "foreign": (digest, {**few, 3: bytes(64)}),
        "other digest": (bytes(32), signatures),
        "repeated": (digest, {**few, 3: few[0]}),
    }
    row = ProofMessage(digest=rows[forge][0], signatures=rows[forge][1])
    with refused("FN-1640"):
        attempt.devices[0].receive(messages.proof_bytes(attempt.terms.digest, row))
    whole = messages.proof_bytes(attempt.terms.digest, ProofMessage(digest=digest, signatures=signatures))
    answer = attempt.devices[0].receive(whole)
    assert answer and attempt.devices[0].receive(whole) == answer


def test_two_survivor_sets_never_both_get_enough_confirmations() -> None:
    """Six devices, threshold 4: the coordinator shows one set to three devices and another to the other three."""
    attempt = masked(6, Threat.ACTIVE, dropout=0.2)
    sets = [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]
    signatures: dict[int, bytes] = {}
    for index in range(5):
        (answer,) = attempt.devices[index].receive(survivors_message(attempt, sets[index % 2]))
        signatures[index] = messages.read_confirmation(attempt.terms.digest, answer)[1]
    phase = attempt.phase
    assert isinstance(phase, Confirming)
    for members in sets:
        digest = survivors_of(6, phase.sharers, set_bytes(phase.roster, members)).digest
        proof = messages.proof_bytes(attempt.terms.digest, ProofMessage(digest=digest, signatures=signatures))
        for each in attempt.devices[:5]:
            with refused("FN-1640"):
                each.receive(proof)


def test_a_confirmation_of_another_device_is_refused() -> None:
    attempt, signatures, digest = confirmed()
    for signature, index in ((signatures[1], 0), (bytes(64), 0)):
        with refused("FN-1640"):
            coordinator.check(
                attempt.phase, index, messages.confirmation_bytes(attempt.terms.digest, digest, signature)
            )
