"""Laws of secure aggregation: shares, rings, keystreams, graphs and encodings."""

import tracemalloc
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.masked import FixedEntropy, terms_of

from fanin.edge.masking import messages
from fanin.edge.masking.agreement import sealed
from fanin.edge.masking.graph import graph_of
from fanin.edge.masking.keystream import MaskKey, MaskStream, keystream, masked_payload, tail_offset
from fanin.edge.masking.parameters import Threat
from fanin.edge.masking.roster import opened_shares
from fanin.edge.masking.sharing import (
    PRIME,
    SHARE_BYTES,
    combine,
    combine_with_errors,
    evaluate,
    split,
    value_at_zero,
)
from fanin.edge.masking.terms import decoded_terms
from fanin.edge.rings import RING_BITS, Ring, RingVector
from fanin.protos.errors import InvalidInput

SECRETS: Final = st.binary(min_size=32, max_size=32)
KEYS: Final = SECRETS


def le(text: str) -> int:
    return int.from_bytes(bytes.fromhex(text), "little")


@pytest.mark.parametrize(
    ("prime", "secret", "coefficients", "shares"),
    [
        (
            2**252 + 27742317777372353535851937790883648493,
            le("7b1c33d3f5291d85de664833beb1ad469f7fb6025a0ec78b3a790c6e13a98304"),
            [le("178199860edd8c62f5212ee91eff1295d0d670ab4ed4506866bae57e7030b204")],
            [
                le("929dcc590407aae7d388761cddb0c0db6f5627aea8e217f4a033f2ec83d93509"),
                le("a91e66e012e4364ac9aaa405fcafd370402d9859f7b6685c07eed76bf409e80d"),
                le("d3cb090a075eb154e82fdb4b3cb507f110040905468bb9c46da8bdea643a9a02"),
            ],
        ),
        (
            0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551,
            0x8BA9BBA2E0FD8C4767154D35A0B7562244A4AAF6F36C8FB8735FA48B301BD8DE,
            [0x80F25E6C0709353E46BFBE882A11BDBB1F8097E46340EB8673B7E14556E6C3A4],
            [
                0x0C9C1A0FE806C184ADD50BBDCAC913DDA73E482DAF95DCB9F35DBB0D8A9F7731,
                0x8D8E787BEF0FF6C2F494CA45F4DAD198C6BEE01212D6C84067159C52E1863AD5,
                0x0E80D6E8F6192C003B5488CE1EEC8F5429587D48CF001541E713B2D53C09D928,
            ],
        ),
        (1613, 1234, [166, 94], [1494, 329, 965, 176, 1188, 775]),
    ],
    ids=["RFC 9591 Ed25519", "RFC 9591 P-256", "Wikipedia"],
)
def test_published_shares_over_other_primes(
    prime: int, secret: int, coefficients: list[int], shares: list[int]
) -> None:
    assert [evaluate([secret, *coefficients], point, prime) for point in range(1, len(shares) + 1)] == shares
    size = len(coefficients) + 1
    for first in range(len(shares) - size + 1):
        points = tuple(range(first + 1, first + 1 + size))
        assert value_at_zero(points, shares[first : first + size], prime) == secret


def is_probably_prime(number: int) -> bool:
    """Miller-Rabin with 20 bases."""
    if number % 2 == 0:
        return False
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 22):
        values = [pow(base, odd << step, number) for step in range(twos)]
        if values[0] != 1 and number - 1 not in values:
            return False
    return True


def test_the_prime_is_the_first_one_above_the_secrets() -> None:
    assert [number for number in range(1 << 256, PRIME + 1) if is_probably_prime(number)] == [PRIME]


@given(SECRETS, st.integers(1, 12), st.integers(0, 6), st.randoms())
def test_any_threshold_of_shares_gives_the_secret(secret: bytes, threshold: int, more: int, rng: object) -> None:
    points = list(range(1, threshold + more + 1))
    shares = dict(zip(points, split(secret, threshold, points, FixedEntropy(7)), strict=True))
    assert {len(share) for share in shares.values()} == {SHARE_BYTES}
    rng.shuffle(points)  # type: ignore[attr-defined]
    assert combine({point: shares[point] for point in points[:threshold]}, threshold) == secret


@given(SECRETS, SECRETS, st.integers(2, 8))
def test_fewer_shares_fit_every_secret(secret: bytes, other: bytes, threshold: int) -> None:
    """One share less than the threshold: for each secret there is one polynomial through it and these shares."""
    points = tuple(range(1, threshold))
    shares = split(secret, threshold, [*points, threshold], FixedEntropy(3))[:-1]
    values = [int.from_bytes(share, "little") for share in shares]
    # The share of the last point that would make `other` the secret: solve for it with the Lagrange weights.
    whole = (*points, threshold)
    without = value_at_zero(whole, [*values, 0], PRIME)
    weight = (value_at_zero(whole, [*values, 1], PRIME) - without) % PRIME
    last = (int.from_bytes(other, "little") - without) * pow(weight, -1, PRIME) % PRIME
    shares_of_other = {
        point: value.to_bytes(SHARE_BYTES, "little") for point, value in zip(whole, [*values, last], strict=True)
    }
    assert combine(shares_of_other, threshold) == other


@given(SECRETS, st.integers(1, 6), st.integers(0, 3), st.data())
def test_false_shares_are_found(secret: bytes, threshold: int, errors: int, data: st.DataObject) -> None:
    points = list(range(1, threshold + 2 * errors + 1))
    shares = dict(zip(points, split(secret, threshold, points, FixedEntropy(5)), strict=True))
    false = data.draw(st.lists(st.sampled_from(points), unique=True, min_size=errors, max_size=errors))
    for point in false:
        shares[point] = ((int.from_bytes(shares[point], "little") + point) % PRIME).to_bytes(SHARE_BYTES, "little")
    assert combine_with_errors(shares, threshold) == (secret, tuple(sorted(false)))


@pytest.mark.parametrize(
    ("shares", "threshold"),
    [
        ({1: bytes(33)}, 2),
        ({0: bytes(33), 1: bytes(33)}, 2),
        ({1: bytes(32), 2: bytes(33)}, 2),
        ({1: PRIME.to_bytes(33, "little"), 2: bytes(33)}, 2),
        ({1: b"\xff" * 33}, 1),
    ],
    ids=["few", "zero", "short", "prime", "large"],
)
def test_malformed_shares_are_refused(shares: dict[int, bytes], threshold: int) -> None:
    for function in (combine, combine_with_errors):
        with pytest.raises(InvalidInput) as caught:
            function(shares, threshold)
        assert caught.value.code == "FN-1620"


def test_a_point_twice_is_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        split(bytes(32), 2, [1, 1, 2], FixedEntropy(1))
    assert caught.value.code == "FN-1620"


@given(KEYS, st.integers(0, 5000), st.integers(0, 300))
def test_a_keystream_has_random_access(key: bytes, offset: int, size: int) -> None:
    assert keystream(key, offset, size) == keystream(key, 0, offset + size)[offset:]


@given(st.sampled_from(RING_BITS), st.lists(st.integers(0, 40), max_size=6), st.lists(KEYS, max_size=3), st.booleans())
def test_a_mask_does_not_depend_on_the_cuts(
    bits: int, sizes: Sequence[int], keys: Sequence[bytes], is_negative: bool
) -> None:
    layout = RingVector(ring=Ring(bits=bits), num_values=sum(sizes), num_tail=2)
    masks = [MaskKey(key, is_negative) for key in keys]
    values = np.arange(layout.num_values, dtype=np.int64) - 5
    cuts = np.cumsum(sizes)[:-1].tolist()
    whole = b"".join(masked_payload(layout, masks, [values], 3, [1, -1]))
    assert b"".join(masked_payload(layout, masks, np.split(values, cuts), 3, [1, -1])) == whole
    assert len(whole) == layout.size_bytes
    # The opposite signs remove the masks, from the last piece to the first.
    words, tail = (
        layout.ring.unpacked(memoryview(whole)[: layout.num_values * bits // 8]).copy(),
        bytearray(whole)[-16:],
    )
    removal = MaskStream(layout, [MaskKey(key, not is_negative) for key in keys])
    for start, piece in reversed(list(zip([0, *cuts], np.split(words, cuts), strict=True))):
        removal.add(piece, start)
    last = np.frombuffer(tail, "<u8").copy()
    removal.add_tail(last)
    expected = layout.ring.words_of(values, 3)
    assert np.array_equal(layout.ring.signed(words), layout.ring.signed(expected))
    assert last.astype(np.int64).tolist() == [1, -1]


def test_an_update_is_masked_in_the_memory_of_a_piece() -> None:
    """64 pieces of 256 KiB: the peak is that of a few, whatever the number of masks."""
    size = 1 << 18
    layout = RingVector(ring=Ring(bits=8), num_values=64 * size, num_tail=1)
    keys = [MaskKey(bytes([number]) * 32) for number in range(5)]
    tracemalloc.start()
    pieces = (np.zeros(size, np.int8) for _ in range(64))
    total = sum(len(piece) for piece in masked_payload(layout, keys, pieces, 1, [1]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == layout.size_bytes
    assert peak < 8 * size


@given(st.sampled_from(RING_BITS), KEYS)
def test_words_of_a_mask_are_bytes_of_the_keystream(bits: int, key: bytes) -> None:
    layout = RingVector(ring=Ring(bits=bits), num_values=37, num_tail=1)
    payload = b"".join(masked_payload(layout, [MaskKey(key)], [np.zeros(37, np.int8)], 1, [0]))
    size, value_bytes = layout.ring.word_bytes, bits // 8
    stream = keystream(key, 0, tail_offset(layout) + 8)
    words = b"".join(stream[index * size :][:value_bytes] for index in range(37))
    assert payload == words + stream[-8:]


@given(st.integers(2, 60), st.integers(1, 70), SECRETS)
def test_a_graph_is_regular_and_symmetric(num_devices: int, half: int, roster_digest: bytes) -> None:
    graph = graph_of(num_devices, 2 * half, roster_digest)
    neighbors = [graph.neighbors(index) for index in range(num_devices)]
    assert {len(row) for row in neighbors} == {min(2 * half, num_devices - 1)}
    for index, row in enumerate(neighbors):
        assert index not in row and len(set(row)) == len(row) and list(row) == sorted(row)
        assert all(index in neighbors[peer] for peer in row)
        assert set(graph.holders(index)) == {*row, *([index] if graph.is_complete else [])}


def test_the_circle_is_permuted_at_random() -> None:
    circles = {graph_of(40, 4, bytes([number]) * 32).neighbors(0) for number in range(30)}
    assert len(circles) > 25


@given(st.integers(0, 70), st.data())
def test_a_bitmap_has_one_form(num_devices: int, data: st.DataObject) -> None:
    members = sorted(data.draw(st.sets(st.integers(0, num_devices - 1)))) if num_devices else []
    encoded = messages.bitmap(num_devices, members)
    assert list(messages.members_of(encoded, num_devices)) == members
    if num_devices % 8:
        with pytest.raises(InvalidInput):
            messages.members_of(encoded[:-1] + bytes([encoded[-1] | 0x80]), num_devices)


@given(st.integers(3, 1000), st.sampled_from(Threat), st.floats(0, 0.5))
def test_terms_are_their_bytes(num_devices: int, threat: Threat, adversarial: float) -> None:
    terms = terms_of(num_devices, threat, adversarial=adversarial)
    assert decoded_terms(terms.encoded) == terms
    for damaged in (terms.encoded[:-1], terms.encoded + b"x", b"\2" + terms.encoded[1:], b""):
        with pytest.raises(InvalidInput) as caught:
            decoded_terms(damaged)
        assert caught.value.code == "FN-1625"


@given(st.binary(max_size=200))
def test_bytes_of_a_peer_raise_only_our_errors(data: bytes) -> None:
    digest = bytes(32)
    for head in (b"", *(bytes((kind,)) + digest for kind in messages.Kind)):
        for read in (
            lambda part: messages.read_advertisement(digest, part, True),
            lambda part: messages.read_roster(digest, part, False),
            lambda part: messages.read_sealed(digest, part, messages.Kind.SEALED_SHARES),
            lambda part: messages.read_sealed(digest, part, messages.Kind.DELIVERY, 9),
            lambda part: messages.read_survivors(digest, part, 9),
            lambda part: messages.read_confirmation(digest, part),
            lambda part: messages.read_proof(digest, part),
            lambda part: messages.read_shares(digest, part),
        ):
            try:
                read(head + data)
            except InvalidInput as error:
                assert error.code in ("FN-1625", "FN-1629")


def test_a_message_has_one_form() -> None:
    """Bytes at its end, and indexes that do not rise, are refused."""
    digest = bytes(32)
    entry = messages.decoded_entry(bytes(range(192)))
    roster = messages.RosterMessage(
        num_devices=9, index=0, degree=2, threshold=2, digest=digest, peers={1: entry, 2: entry}
    )
    parts = {1: bytes(82), 2: bytes(82)}
    shares = messages.SharesMessage(
        digest=digest, shares={owner: (messages.ShareOf.SELF_MASK, bytes(33)) for owner in (1, 2)}
    )
    proof = messages.ProofMessage(digest=digest, signatures={1: bytes(64), 2: bytes(64)})
    survivors = messages.SurvivorsMessage(digest=digest, members=bytes(2))
    delivery = messages.SealedMessage(digest=digest, sealed=parts, members=bytes(2))
    rows: list[tuple[bytes, Callable[[bytes], object]]] = [
        (
            messages.framed(messages.Kind.ADVERTISEMENT, digest, entry.encoded()),
            lambda data: messages.read_advertisement(digest, data, False),
        ),
        (messages.roster_bytes(digest, roster), lambda data: messages.read_roster(digest, data, False)),
        (
            messages.sealed_bytes(digest, digest, parts),
            lambda data: messages.read_sealed(digest, data, messages.Kind.SEALED_SHARES),
        ),
        (
            messages.delivery_bytes(digest, delivery),
            lambda data: messages.read_sealed(digest, data, messages.Kind.DELIVERY, 9),
        ),
        (messages.survivors_bytes(digest, survivors), lambda data: messages.read_survivors(digest, data, 9)),
        (
            messages.confirmation_bytes(digest, digest, bytes(64)),
            lambda data: messages.read_confirmation(digest, data),
        ),
        (messages.proof_bytes(digest, proof), lambda data: messages.read_proof(digest, data)),
        (messages.shares_bytes(digest, shares), lambda data: messages.read_shares(digest, data)),
    ]
    for message, read in rows:
        read(message)
        swapped = message.replace(messages.u32(2) + messages.u32(1), messages.u32(2) + messages.u32(2))
        for wrong in (message + b"x", message[:-1], *([swapped] if swapped != message else [])):
            with pytest.raises(InvalidInput) as caught:
                read(wrong)
            assert caught.value.code == "FN-1625"
    # Five of the messages have a list.
    assert sum(messages.u32(2) + messages.u32(1) in message for message, _ in rows) == 5


@pytest.mark.parametrize("plaintext", [b"\xff" * 33 + bytes(33), bytes(33) + b"\xff" * 33, bytes(65), bytes(67), b""])
def test_a_plaintext_that_is_no_shares_is_as_one_that_does_not_open(plaintext: bytes) -> None:
    key = bytes(range(32))
    assert opened_shares(key, sealed(key, bytes(66))) == (bytes(33), bytes(33))
    assert opened_shares(key, sealed(key, plaintext)) is None
    assert opened_shares(bytes(32), sealed(key, bytes(66))) is None
