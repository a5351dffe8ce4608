"""Random words of a block of values: the keystream of ChaCha20 (RFC 8439), addressed by block and candidate.

    key    = HKDF-SHA256(seed, salt = none, info = b"fanin.noise.v1 " + name of the distribution), 32 bytes
    nonce  = kind (1 byte) | candidate (3 bytes) | block (8 bytes), little-endian; the counter begins at 0

    kind 0: candidate 0; the words of all candidates of the block, two uint64 each, little-endian
    kind 1: more bits of the first word of one candidate, 8 bytes at a time, most significant word first
    kind 2: the same for its second word

So the words of a candidate depend on (seed, distribution, block, candidate) alone. A seed that serves two
distributions by accident gives them two keys. A seed must serve one vector: two vectors of one seed and one
distribution have the same noise, and their difference has none.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SEED_BYTES: Final = 32
DOMAIN: Final = b"fanin.noise.v1 "
WORDS_PER_CANDIDATE: Final = 2
MAX_CANDIDATES: Final = 1 << 24
"""Candidates of a block that the nonce can name: 256 times those that a block needs."""

UInt64s = npt.NDArray[np.uint64]
MoreBits = Callable[[int], int]
"""A function of n: the next n words of 64 bits as one integer, from the first word on."""


def key_of(seed: bytes, distribution: str) -> bytes:
    """Return the key of a distribution's stream.

    Raises:
        ValueError: The seed does not have 32 bytes.
    """
    if len(seed) != SEED_BYTES:
        raise ValueError(f"seed of noise: got {len(seed)} bytes, expected {SEED_BYTES} bytes of a CSPRNG")
    return HKDF(SHA256(), SEED_BYTES, salt=None, info=DOMAIN + distribution.encode()).derive(seed)


class BlockStream:
    """The random words of one block.

    Args:
        key: Result of ``key_of``.
        block: Number of the block, from 0 on.
    """

    def __init__(self, key: bytes, block: int) -> None:
        self._key = key
        self._block = block
        self._cipher = self._keystream(0, 0)
        self._num_candidates = 0

    def next_words(self, num_candidates: int) -> UInt64s:
        """Return the words of the next candidates, as (num_candidates, 2)."""
        self._num_candidates += num_candidates
        assert self._num_candidates <= MAX_CANDIDATES, "a block accepts at least one candidate in four"
        size = 8 * WORDS_PER_CANDIDATE * num_candidates
        words = np.frombuffer(self._cipher.update(bytes(size)), dtype="<u8")
        return words.astype(np.uint64, copy=False).reshape(num_candidates, WORDS_PER_CANDIDATE)

    def more_bits(self, word: int, candidate: int) -> MoreBits:
        """Return the bits that follow word 0 or 1 of a candidate."""

        def more(num_words: int) -> int:
            return int.from_bytes(self._keystream(1 + word, candidate).update(bytes(8 * num_words)), "big")

        return more

    def _keystream(self, kind: int, candidate: int) -> CipherContext:
        nonce = bytes([kind]) + candidate.to_bytes(3, "little") + self._block.to_bytes(8, "little")
        return Cipher(ChaCha20(self._key, bytes(4) + nonce), mode=None).encryptor()
