"""Replayed messages, false shares, and what masked bytes and shares reveal."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from support.masked import FixedEntropy, attempt_of, check_sum, later, terms_of, update_of
from support.masked_attacks import masked, refused, shared

from fanin.commands.bench.harness.masked import MaskedAttempt
from fanin.edge.masking import agreement, coordinator, device, messages
from fanin.edge.masking.coordinator import Advertising, Masking, Unmasking
from fanin.edge.masking.journal import AttemptEnded, PayloadMasked, read_journal
from fanin.edge.masking.keystream import MaskKey, MaskStream
from fanin.edge.masking.messages import Kind, ShareOf, SharesMessage
from fanin.edge.masking.parameters import MILLION, GraphParameters, Threat
from fanin.edge.masking.roster import pair_mask
from fanin.edge.masking.sharing import combine, split
from fanin.edge.rings import Ring, RingVector
from fanin.protos.errors import Conflict, FaninError, InvalidInput

# Replayed and foreign messages.

CHI_SQUARE = 378.0
"""A chi-square of 255 degrees of freedom is above this with a probability of 1e-6."""


@pytest.mark.parametrize("kind", Kind)
def test_a_message_of_another_attempt_is_refused(kind: Kind) -> None:
    attempt = masked()
    other = later(attempt.terms, attempts=1).digest
    message = messages.framed(kind, other, bytes(300))
    before = attempt.devices[0].state
    with pytest.raises(FaninError) as caught:
        attempt.devices[0].receive(message)
    assert caught.value.code in ("FN-1629", "FN-1635", "FN-1630")
    assert attempt.devices[0].state == before
    with pytest.raises(InvalidInput) as caught:
        coordinator.check(attempt.phase, 0, message)
    assert caught.value.code in ("FN-1629", "FN-1625")


def test_a_changed_delivery_is_refused() -> None:
    attempt = shared(6, Threat.ACTIVE)
    assert isinstance(attempt.phase, Masking)
    (whole,) = coordinator.respond(attempt.phase, 0)
    row = messages.read_sealed(attempt.terms.digest, whole, Kind.DELIVERY, 6)
    changes: list[tuple[str, dict[str, object]]] = [
        ("FN-1633", {"sealed": {index: row.sealed[index] for index in (1, 2, 3)}}),
        ("FN-1633", {"digest": bytes(32)}),
        ("FN-1633", {"members": b"\x3e"}),
        ("FN-1625", {"members": b"\xff"}),
        ("FN-1638", {"members": b"\x07", "sealed": {index: row.sealed[index] for index in (1, 2)}}),
    ]
    for code, change in changes:
        with refused(code):
            changed = replace(row, **change)  # type: ignore[arg-type]
            attempt.devices[0].receive(messages.delivery_bytes(attempt.terms.digest, changed))
    attempt.devices[0].receive(whole)
    with refused("FN-1630", Conflict):
        attempt.devices[0].receive(whole[:-1] + bytes([whole[-1] ^ 1]))


def flipped(message: bytes, rng: np.random.Generator) -> bytes:
    """Return a message with one other bit."""
    place = int(rng.integers(8 * len(message)))
    data = bytearray(message)
    data[place // 8] ^= 1 << place % 8
    return bytes(data)


def test_a_changed_bit_is_refused() -> None:
    """Each bit of what both sides can verify counts: advertisement, complete roster, delivery, confirmation."""
    rng = np.random.default_rng(5)
    attempt = attempt_of(terms_of(5, Threat.ACTIVE), 5)
    first = attempt.phase
    assert isinstance(first, Advertising)
    own = attempt.devices[0]
    advertisement = own.begin(attempt.terms)
    for _ in range(100):
        with pytest.raises(FaninError):
            coordinator.check_advertisement(first, own.identity.public, flipped(advertisement, rng))
    sharing = attempt.advertise()
    for _ in range(100):
        with pytest.raises(FaninError):
            attempt.devices[0].receive(flipped(coordinator.respond(sharing, 0)[0], rng))
    masking = attempt.share()
    for _ in range(100):
        changed = flipped(coordinator.respond(masking, 0)[0], rng)
        try:
            after, _ = device.receive(attempt.devices[0].state, changed, attempt.devices[0].entropy)
        except FaninError:
            continue
        assert after.delivered is not None and len(after.delivered.unopened) == 1
    confirming = attempt.mask(update_of)
    (answer,) = attempt.devices[0].receive(coordinator.respond(confirming, 0)[0])
    for _ in range(100):
        with pytest.raises(FaninError):
            coordinator.check(confirming, 0, flipped(answer, rng))


@pytest.mark.parametrize("threat", [Threat.CURIOUS, Threat.ACTIVE])
def test_changed_bits_raise_only_our_errors(threat: Threat) -> None:
    """Shares, survivors and proofs have bits that nobody can verify yet: a change is refused, or another message."""
    rng = np.random.default_rng(6)
    attempt = masked(6, threat)
    each, journal = attempt.devices[0], list(attempt.devices[0].journal)
    messages_before = coordinator.respond(attempt.phase, 0)
    if threat is Threat.ACTIVE:
        attempt.confirm()
    answers = [each.receive(message)[-1] for message in coordinator.respond(attempt.phase, 0)]
    for _ in range(60):
        each.carry_out(device.resume(each.identity, read_journal(b"".join(journal))))
        with suppress(FaninError):
            each.receive(flipped(messages_before[0], rng))
        with suppress(FaninError):
            coordinator.check(attempt.phase, 0, flipped(answers[-1], rng))


@pytest.mark.parametrize("num_victims", [2, 3])
def test_sealed_shares_that_do_not_open_harm_only_their_sender(num_victims: int) -> None:
    """Device 0 seals garbage for some of 6 holders, threshold 4. If these are two, four others know its seed."""
    attempt = shared(6, Threat.ACTIVE)
    phase = attempt.phase
    assert isinstance(phase, Masking)
    rows = {**phase.sealed[0], **{receiver: bytes(82) for receiver in range(1, 1 + num_victims)}}
    attempt.phase = replace(phase, sealed={**phase.sealed, 0: rows})
    attempt.mask(update_of)
    for index, each in enumerate(attempt.devices):
        assert each.state.delivered is not None
        assert each.state.delivered.unopened == ((0,) if 1 <= index <= num_victims else ())
    attempt.confirm()
    if num_victims == 3:
        with refused("FN-1638", Conflict) as caught:
            attempt.unmask()
        assert "1 devices (0)" in str(caught.value)
        return
    attempt.unmask()
    check_sum(attempt, [update_of(index) for index in range(6)])


# What the shares reveal.


def test_a_late_update_stays_hidden() -> None:
    """Device 5 dropped out and its s was reconstructed. The coordinator knows all pair masks of its late Update."""
    attempt = shared(6, Threat.ACTIVE, dropout=0.2)
    phase = attempt.mask(update_of, {5})
    late = attempt.devices[5].masked(update_of(5))
    attempt.confirm()
    correction = attempt.unmask()
    check_sum(attempt, [update_of(index) for index in range(5)])
    layout, state = attempt.terms.layout, attempt.devices[5].state
    words = layout.ring.unpacked(memoryview(late)[: layout.num_values * layout.ring.value_bytes]).copy()
    secret = agreement.private_key(state.keys.masking)
    pairs = [pair_mask(phase.roster, phase.sharers, 5, peer, secret) for peer in range(5)]
    assert {mask.key for mask in pairs} <= {mask.key for mask in correction.keys}
    MaskStream(layout, [MaskKey(mask.key, not mask.is_negative) for mask in pairs]).add(words, 0)
    expected = np.concatenate(update_of(5).pieces)
    assert np.count_nonzero(layout.ring.signed(words) == expected) < 5
    # What is left is the self mask, whose key nobody revealed.
    own = device.mask_keys(state)[0]
    assert own.key not in {mask.key for mask in correction.keys}
    MaskStream(layout, [replace(own, is_negative=True)]).add(words, 0)
    assert np.array_equal(layout.ring.signed(words), expected)


def shares_of(attempt: MaskedAttempt) -> dict[int, SharesMessage]:
    phase = attempt.phase
    assert isinstance(phase, Unmasking)
    return {
        index: messages.read_shares(
            attempt.terms.digest, attempt.devices[index].receive(coordinator.respond(phase, index)[-1])[-1]
        )
        for index in phase.survivors.members
    }


def test_fewer_shares_than_the_threshold_give_another_secret() -> None:
    attempt = masked(6, Threat.ACTIVE)
    attempt.confirm()
    shares = {index + 1: row.shares[0][1] for index, row in shares_of(attempt).items()}
    seed = attempt.devices[0].state.keys.seed
    assert combine(shares, 4) == seed
    for few in (1, 2, 3):
        try:
            assert combine(dict(list(shares.items())[:few]), few) != seed
        except InvalidInput as error:
            assert error.code == "FN-1621"


@pytest.mark.parametrize("num_false", [1, 2, 3])
def test_false_shares_are_detected(num_false: int) -> None:
    """Twelve holders, threshold 7: up to two false ones are corrected and named, three are too many."""
    attempt = masked(12, Threat.ACTIVE)
    phase = attempt.confirm()
    assert phase.roster.parameters == GraphParameters(degree=11, threshold=7)
    rows = {}
    for index, row in shares_of(attempt).items():
        shares = dict(row.shares)
        if index < num_false:
            shares = {owner: (kind, bytes([index + 1]) * 32 + b"\0") for owner, (kind, _) in shares.items()}
        rows[index] = messages.shares_bytes(attempt.terms.digest, replace(row, shares=shares))
        coordinator.check(phase, index, rows[index])
    if num_false == 3:
        with refused("FN-1642", Conflict):
            coordinator.correction_of(phase, rows)
        return
    correction = coordinator.correction_of(phase, rows)
    assert correction.false == tuple(range(num_false))
    MaskStream(attempt.terms.layout, correction.keys).add(attempt.total, 0)
    expected = np.sum([np.concatenate(update_of(index).pieces) for index in range(12)], axis=0, dtype=np.int64)
    assert np.array_equal(attempt.terms.layout.ring.signed(attempt.total), expected)


def test_shares_of_another_secret_are_detected() -> None:
    """Device 0 sealed shares of another seed than the one that it committed to. They fit each other."""
    attempt = masked(6, Threat.ACTIVE)
    phase = attempt.confirm()
    lies = dict(zip(range(6), split(b"x" * 32, 4, range(1, 7), FixedEntropy(1)), strict=True))
    rows = {
        index: messages.shares_bytes(
            attempt.terms.digest,
            replace(row, shares={**row.shares, 0: (ShareOf.SELF_MASK, lies[index])}),
        )
        for index, row in shares_of(attempt).items()
    }
    with refused("FN-1642", Conflict) as caught:
        coordinator.correction_of(phase, rows)
    assert "device 0" in str(caught.value)


def test_malformed_shares_fail_their_device_alone() -> None:
    attempt = masked(6, Threat.CURIOUS, adversarial=0.3, dropout=0.4)
    rows = shares_of(attempt)
    phase = attempt.phase
    assert isinstance(phase, Unmasking)
    owner, (kind, share) = next(iter(rows[0].shares.items()))
    changes: list[tuple[str, dict[str, object]]] = [
        ("FN-1620", {"shares": {**rows[0].shares, owner: (kind, b"\xff" * 33)}}),
        ("FN-1633", {"shares": {**rows[0].shares, owner: (ShareOf.PAIR_MASKS, share)}}),
        ("FN-1633", {"shares": {**rows[0].shares, 0: (kind, share)}}),
        ("FN-1633", {"digest": bytes(32)}),
    ]
    for code, change in changes:
        with refused(code):
            row = replace(rows[0], **change)  # type: ignore[arg-type]
            coordinator.check(phase, 0, messages.shares_bytes(attempt.terms.digest, row))
    with refused("FN-1625"):
        data = messages.shares_bytes(attempt.terms.digest, rows[0])
        coordinator.check(phase, 0, data.replace(bytes((1,)) + share, bytes((3,)) + share))
    correct = {index: messages.shares_bytes(attempt.terms.digest, row) for index, row in rows.items() if index}
    coordinator.correction_of(phase, correct)


# Masked bytes.


@pytest.mark.parametrize("bits", [8, 16, 24, 32, 64])
def test_masked_bytes_are_uniform(bits: int) -> None:
    """Chi-square of the bytes of payloads of equal values, of their differences, and of two payloads together."""
    terms = terms_of(4)
    terms = replace(terms, layout=RingVector(ring=Ring(bits=bits), num_values=40_000, num_tail=2))
    attempt = attempt_of(terms, 4)
    attempt.advertise()
    attempt.share()
    piece = np.full(40_000, 127, np.int8)
    payloads = []
    assert isinstance(attempt.phase, Masking)
    for index in range(4):
        attempt.devices[index].receive(coordinator.respond(attempt.phase, index)[0])
        update = replace(update_of(index), pieces=(piece,))
        payloads.append(np.frombuffer(attempt.devices[index].masked(update)[:-16], np.uint8))
    for sample in (*payloads, np.diff(payloads[0]), payloads[0] - payloads[1], payloads[2] ^ payloads[3]):
        counts = np.bincount(sample, minlength=256)
        expected = sample.size / 256
        assert float(((counts - expected) ** 2 / expected).sum()) < CHI_SQUARE


def test_messages_do_not_depend_on_the_updates() -> None:
    """Two attempts with the same entropy and other values, weights and statistics differ in the masked bytes alone."""
    terms, journals, totals = terms_of(5, Threat.ACTIVE, max_weight=50), [], []
    for weight in (1, 50):
        attempt = attempt_of(terms, 5)
        updates = [update_of(index + weight, weight) for index in range(5)]
        attempt.advertise()
        attempt.share()
        attempt.mask(updates.__getitem__)
        attempt.confirm()
        attempt.unmask()
        check_sum(attempt, updates)
        facts = [read_journal(b"".join(each.journal)) for each in attempt.devices]
        totals.append([fact for row in facts for fact in row if isinstance(fact, PayloadMasked)])
        journals.append([fact for row in facts for fact in row if not isinstance(fact, PayloadMasked)])
    assert journals[0] == journals[1] and len(journals[0]) == 25
    assert not set(totals[0]) & set(totals[1])


def test_no_secret_is_in_the_text_of_a_state() -> None:
    attempt = masked()
    keys = attempt.devices[0].state.keys
    text = repr(attempt.devices[0].state) + repr(device.mask_keys(attempt.devices[0].state))
    for secret in (keys.seed, keys.sealing, keys.masking):
        assert repr(secret)[2:-1] not in text and secret.hex() not in text


def test_the_end_of_an_attempt_keeps_no_secret() -> None:
    attempt = masked()
    each = attempt.devices[0]
    keys = each.state.keys
    each.finish()
    assert each.journal == []
    kept = repr(each.ended)
    assert [type(one) for one in each.ended] == [AttemptEnded]
    assert all(repr(secret)[2:-1] not in kept for secret in (keys.seed, keys.sealing, keys.masking))


def test_adversarial_fractions_are_counted_down() -> None:
    """The documents say so: with 0.05 and fewer than 20 devices, no device is assumed adversarial."""
    assumptions = terms_of(19, adversarial=0.05).assumptions
    assert assumptions.adversarial_ppm == 50_000 == MILLION // 20
    assert [assumptions.num_adversarial(count) for count in (19, 20, 39, 40)] == [0, 1, 1, 2]
