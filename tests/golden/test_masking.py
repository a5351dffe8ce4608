"""The golden files of secure aggregation: the committed bytes, and a device written from the words of the document.

The class ``Words`` shares no code with ``fanin.edge.masking``. It reads the messages of an attempt and derives each
value with hashlib, hmac, struct and the primitives of ``cryptography``.
"""

import hashlib
import hmac
import json
import struct
from collections.abc import Iterator
from typing import Any, Final

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from golden import masking

from fanin.edge.masking import agreement
from fanin.edge.masking.keystream import keystream

HINT = "if this is meant, run `python tests/golden/masking.py` and say in CHANGELOG.md that the masks change"
P: Final = 2**256 + 297


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return masking.texts()


@pytest.mark.parametrize("name", ["shares.json", "masks.json", "active.json", "sparse.json"])
def test_the_files_are_what_the_code_computes(name: str, texts: dict[str, str]) -> None:
    assert (masking.FOLDER / name).read_text() == texts[name], HINT


def read(name: str) -> dict[str, Any]:
    rows: dict[str, Any] = json.loads((masking.FOLDER / name).read_text())
    return rows


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def hashed(label: str, *parts: bytes) -> bytes:
    return hashlib.sha256(label.encode() + b"\n" + b"".join(parts)).digest()


def hkdf(secret: bytes, label: str, *parts: bytes) -> bytes:
    """HKDF-SHA256 without salt, one block of output (RFC 5869, sections 2.2 and 2.3)."""
    extracted = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(extracted, label.encode() + b"\n" + b"".join(parts) + b"\1", "sha256")


def stream(key: bytes, size: int) -> bytes:
    return Cipher(AES(key), CTR(bytes(16))).encryptor().update(bytes(size))


def public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def exchange(private: bytes, other: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(other))


def verify(key: bytes, signature: bytes, context: str, data: bytes) -> None:
    Ed25519PublicKey.from_public_bytes(key).verify(signature, context.encode() + b"\n" + data)


def members(bits: bytes) -> list[int]:
    return [index for index in range(8 * len(bits)) if bits[index // 8] >> index % 8 & 1]


def secret_of(shares: dict[int, bytes]) -> bytes:
    """Lagrange's formula at 0."""
    total = 0
    for point, share in shares.items():
        term = int.from_bytes(share, "little")
        for other in shares:
            if other != point:
                term = term * other * pow(other - point, -1, P) % P
        total += term
    return (total % P).to_bytes(32, "little")


class Words:
    """An attempt, read from its messages."""

    def __init__(self, name: str) -> None:
        self.rows = read(name)
        self.is_active = name == "active.json"
        self.terms = bytes.fromhex(self.rows["terms"])
        self.digest = hashed("fanin secagg terms v1", self.terms)
        size = 256 if self.is_active else 192
        self.entries = [self.body(text, 1) for text in self.rows["advertisements"]]
        assert {len(entry) for entry in self.entries} == {size}
        self.n = len(self.entries)
        degree, threshold = self.rows["degree"], self.rows["threshold"]
        self.roster = hashed(
            "fanin secagg roster v1", self.digest, u32(self.n), u32(degree), u32(threshold), *self.entries
        )

    def body(self, text: str, number: int) -> bytes:
        """Return what follows the header of a message."""
        data = bytes.fromhex(text)
        assert data[:33] == bytes([number]) + self.digest
        return data[33:]

    def key(self, index: int, place: int) -> bytes:
        """Return A (0), C (1), S (2) or the commitment (3) of a device."""
        return self.entries[index][32 * place :][:32]

    def rows_of(self, data: bytes, size: int) -> Iterator[tuple[int, bytes]]:
        (count,) = struct.unpack_from("<I", data)
        assert len(data) == 4 + count * (4 + size)
        for start in range(4, len(data), 4 + size):
            yield struct.unpack_from("<I", data, start)[0], data[start + 4 : start + 4 + size]

    def neighbors(self) -> list[list[int]]:
        degree = self.rows["degree"]
        if degree >= self.n - 1:
            return [[other for other in range(self.n) if other != index] for index in range(self.n)]
        words = stream(hashed("fanin secagg graph v1", self.roster), 8 * self.n)
        order = sorted(range(self.n), key=lambda index: (struct.unpack_from("<Q", words, 8 * index)[0], index))
        steps = [step for step in range(-degree // 2, degree // 2 + 1) if step]
        places = {index: place for place, index in enumerate(order)}
        return [sorted(order[(places[index] + step) % self.n] for step in steps) for index in range(self.n)]


@pytest.fixture(params=["active.json", "sparse.json"])
def words(request: pytest.FixtureRequest) -> Words:
    return Words(request.param)


def test_the_terms_have_the_documented_layout() -> None:
    terms = Words("active.json").terms
    head = struct.unpack_from("<6B", terms)
    assert head == (1, 3, 16, 40, 20, 3) and terms[6:9] == b"run"
    assert struct.unpack("<QIIIIIIQI32s32s", terms[9:]) == (
        *(3, 7, 1, 4, 3, 0, 250_000, 97, 2),
        bytes(range(32)),
        bytes(range(32, 64)),
    )


def test_an_advertisement_has_signed_keys_and_a_commitment(words: Words) -> None:
    keys = [entry[:32] for entry in words.entries]
    assert keys == sorted(keys)
    for index, secrets in enumerate(words.rows["secrets"]):
        entry = words.entries[index]
        device = words.key(index, 0)
        assert words.key(index, 1) == public(bytes.fromhex(secrets["sealing"]))
        assert words.key(index, 2) == public(bytes.fromhex(secrets["masking"]))
        seed = bytes.fromhex(secrets["seed"])
        assert words.key(index, 3) == hashed("fanin secagg commitment v1", words.digest, device, seed)
        verify(device, entry[128:192], "fanin secagg keys v1", words.digest + entry[32:128])
        if words.is_active:
            verify(bytes.fromhex(words.rows["authority"]), entry[192:], "fanin secagg identity v1", device)


def test_a_roster_has_the_neighbors(words: Words) -> None:
    neighbors = words.neighbors()
    assert neighbors == words.rows["neighbors"]
    for index, text in enumerate(words.rows["rosters"]):
        body = words.body(text, 2)
        degree, threshold = words.rows["degree"], words.rows["threshold"]
        assert struct.unpack_from("<4I", body) == (words.n, index, degree, threshold)
        assert body[16:48] == words.roster
        rows = dict(words.rows_of(body[48:], len(words.entries[0])))
        assert rows == {peer: words.entries[peer] for peer in neighbors[index]}


def test_sealed_shares_open_and_give_the_secrets(words: Words) -> None:
    secrets, held = words.rows["secrets"], {}
    for sender, text in enumerate(words.rows["sealed_shares"]):
        body = words.body(text, 3)
        assert body[:32] == words.roster
        for receiver, ciphertext in words.rows_of(body[32:], 82):
            shared = exchange(bytes.fromhex(secrets[receiver]["sealing"]), words.key(sender, 1))
            ends = u32(sender) + u32(receiver) + words.key(sender, 1) + words.key(receiver, 1)
            key = hkdf(shared, "fanin secagg share v1", words.roster, ends)
            assert key.hex() == words.rows["share_keys"][f"{sender}>{receiver}"]
            held[sender, receiver] = ChaCha20Poly1305(key).decrypt(bytes(12), ciphertext, None)
    for sender, own in enumerate(secrets):
        pairs = {receiver + 1: pair for (who, receiver), pair in held.items() if who == sender}
        few = dict(list(pairs.items())[: words.rows["threshold"]])
        assert secret_of({point: pair[:33] for point, pair in few.items()}).hex() == own["seed"]
        assert secret_of({point: pair[33:] for point, pair in few.items()}).hex() == own["masking"]


def mask_keys(words: Words, index: int) -> list[tuple[str, bool]]:
    """Return the self mask and the masks of the pairs, in rising order of the peers."""
    own = words.rows["secrets"][index]
    sharers = bytes.fromhex(words.rows["sharers_digest"])
    keys = [(hkdf(bytes.fromhex(own["seed"]), "fanin secagg self v1", sharers, u32(index)).hex(), False)]
    for peer in words.rows["neighbors"][index]:
        low, high = min(index, peer), max(index, peer)
        ends = u32(low) + u32(high) + words.key(low, 2) + words.key(high, 2)
        shared = exchange(bytes.fromhex(own["masking"]), words.key(peer, 2))
        keys.append((hkdf(shared, "fanin secagg mask v1", sharers, ends).hex(), index > peer))
    return keys


def test_mask_keys_follow_from_the_sharers(words: Words) -> None:
    for index, text in enumerate(words.rows["deliveries"]):
        body = words.body(text, 4)
        size = -(-words.n // 8)
        bits = body[32 : 32 + size]
        assert body[:32] == words.roster and members(bits) == list(range(words.n))
        assert hashed("fanin secagg sharers v1", words.roster, bits).hex() == words.rows["sharers_digest"]
        assert [peer for peer, _ in words.rows_of(body[32 + size :], 82)] == words.rows["neighbors"][index]
        assert [tuple(mask) for mask in words.rows["mask_keys"][index]] == mask_keys(words, index)


def masked(values: list[int], tail: list[int], keys: list[tuple[str, bool]], bits: int) -> bytes:
    """Return a payload, one value at a time."""
    word = next(size for size in (1, 2, 4, 8) if size >= bits // 8)
    start = -(-word * len(values) // 16) * 16
    streams = [(stream(bytes.fromhex(key), start + 8 * len(tail)), negative) for key, negative in keys]

    def at(offset: int, size: int) -> int:
        each = ((int.from_bytes(data[offset : offset + size], "little"), negative) for data, negative in streams)
        return sum(-word if negative else word for word, negative in each)

    parts = [
        ((value + at(word * place, word)) % 2**bits).to_bytes(bits // 8, "little") for place, value in enumerate(values)
    ]
    parts += [((value + at(start + 8 * place, 8)) % 2**64).to_bytes(8, "little") for place, value in enumerate(tail)]
    return b"".join(parts)


def test_payloads_are_masked_values(words: Words) -> None:
    for index in range(words.n):
        values, tail = words.rows["values"][index], words.rows["tails"][index]
        payload = masked(values, tail, mask_keys(words, index), 16)
        assert payload.hex() == words.rows["payloads"][index]


@pytest.mark.parametrize("ring", read("masks.json")["rings"], ids=lambda ring: str(ring["ring_bits"]))
def test_the_masks_of_each_ring(ring: dict[str, Any]) -> None:
    rows = read("masks.json")
    keys = [(rows["added"], False), (rows["subtracted"], True)]
    values = [value * rows["weight"] for value in rows["values"]]
    assert masked(values, rows["tail"], keys, ring["ring_bits"]).hex() == ring["payload"]


def test_survivors_are_confirmed_and_shares_unmask_the_sum(words: Words) -> None:
    body = words.body(words.rows["survivors"], 5)
    sharers = bytes.fromhex(words.rows["sharers_digest"])
    alive = members(body[32:])
    assert body[:32] == sharers and alive == list(range(words.n - 1))
    digest = hashed("fanin secagg survivors v1", sharers, body[32:])
    assert digest.hex() == words.rows["survivors_digest"]
    for index, text in enumerate(words.rows["confirmations"] if words.is_active else ()):
        confirmation = words.body(text, 6)
        assert confirmation[:32] == digest
        verify(words.key(index, 0), confirmation[32:], "fanin secagg confirmation v1", digest)
    if words.is_active:
        proof = words.body(words.rows["proof"], 7)
        assert proof[:32] == digest and [index for index, _ in words.rows_of(proof[32:], 64)] == alive
    given: dict[int, dict[int, bytes]] = {}
    for index, text in enumerate(words.rows["shares"]):
        shares = words.body(text, 8)
        assert shares[:32] == digest
        for owner, row in words.rows_of(shares[32:], 34):
            assert row[0] == (1 if owner in alive else 2)
            given.setdefault(owner, {})[index + 1] = row[1:]
    total = unmasked(words, given, alive)
    assert total == (words.rows["sum"], words.rows["tail_sum"])


def unmasked(words: Words, given: dict[int, dict[int, bytes]], alive: list[int]) -> tuple[list[int], list[int]]:
    """Return the sum of the payloads of the survivors, with the correction from the shares."""
    sharers = bytes.fromhex(words.rows["sharers_digest"])
    keys: list[tuple[str, bool]] = []
    for owner, rows in given.items():
        secret = secret_of(dict(list(rows.items())[: words.rows["threshold"]]))
        if owner in alive:
            keys.append((hkdf(secret, "fanin secagg self v1", sharers, u32(owner)).hex(), True))
            continue
        assert public(secret) == words.key(owner, 2)
        keys += [
            mask
            for peer, mask in zip(words.rows["neighbors"][owner], mask_keys(words, owner)[1:], strict=True)
            if peer in alive
        ]
    assert sorted(keys) == sorted((key, negative) for key, negative in words.rows["correction"])
    sums = [0] * len(words.rows["sum"]), [0] * len(words.rows["tail_sum"])
    for text in [words.rows["payloads"][index] for index in alive]:
        data = bytes.fromhex(text)
        for place in range(len(sums[0])):
            sums[0][place] += int.from_bytes(data[2 * place : 2 * place + 2], "little")
        for place in range(len(sums[1])):
            sums[1][place] += int.from_bytes(data[2 * len(sums[0]) + 8 * place :][:8], "little")
    payload = masked(sums[0], sums[1], keys, 16)
    split = 2 * len(sums[0])
    values = [int.from_bytes(payload[start : start + 2], "little", signed=True) for start in range(0, split, 2)]
    tail = [
        int.from_bytes(payload[start : start + 8], "little", signed=True) for start in range(split, len(payload), 8)
    ]
    return values, tail


def test_golden_shares_are_values_of_their_polynomial() -> None:
    rows = read("shares.json")
    coefficients = [int.from_bytes(bytes.fromhex(rows["secret"]), "little"), *map(int, rows["coefficients"])]
    assert int(rows["prime"]) == P
    for point, share in rows["shares"].items():
        value = sum(coefficient * int(point) ** power for power, coefficient in enumerate(coefficients)) % P
        assert value.to_bytes(33, "little").hex() == share


def test_published_vectors_of_the_primitives() -> None:
    """NIST SP 800-38A, F.5.5, and RFC 7748, section 6.1."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    plain = bytes.fromhex("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51")
    cipher = bytes.fromhex("601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5")
    counter = int("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", 16)
    words = keystream(key, 16 * counter, 32)
    assert bytes(one ^ other for one, other in zip(words, plain, strict=True)) == cipher
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = bytes.fromhex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
    shared = agreement.agreed("bob", agreement.private_key(alice), bob)
    assert shared.hex() == "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
