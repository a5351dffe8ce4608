"""Keys of an attempt: X25519 agreement, derivations, signatures, and shares sealed for one holder.

Each derivation has a label of its own, so a key for one purpose is none for another. The ``info`` of a mask key has the
digest of roster and sharers, which commits to Run, lineage, Round and attempt, and both public keys.

Reference:
    RFC 7748 (X25519), section 6.1 on the check for zero; RFC 5869 (HKDF); RFC 8439 (ChaCha20-Poly1305).
"""

import hashlib
from collections.abc import Callable
from typing import Final

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fanin.protos.errors import InvalidInput

Sign = Callable[[str, bytes], bytes]
"""Returns the Ed25519 signature over a context line and bytes: ``SigningKey.sign``."""

KEY_BYTES: Final = 32
DIGEST_BYTES: Final = 32
TAG_BYTES: Final = 16
NONCE: Final = bytes(12)
"""A share key seals one plaintext, so its nonce may be fixed."""

TERMS_LABEL: Final = "fanin secagg terms v1"
COMMITMENT_LABEL: Final = "fanin secagg commitment v1"
KEYS_CONTEXT: Final = "fanin secagg keys v1"
IDENTITY_CONTEXT: Final = "fanin secagg identity v1"
ROSTER_LABEL: Final = "fanin secagg roster v1"
GRAPH_LABEL: Final = "fanin secagg graph v1"
SHARE_LABEL: Final = "fanin secagg share v1"
SHARERS_LABEL: Final = "fanin secagg sharers v1"
MASK_LABEL: Final = "fanin secagg mask v1"
SELF_LABEL: Final = "fanin secagg self v1"
SURVIVORS_LABEL: Final = "fanin secagg survivors v1"
CONFIRMATION_CONTEXT: Final = "fanin secagg confirmation v1"

_FIELD: Final = (1 << 255) - 19
_PROBE: Final = X25519PrivateKey.from_private_bytes(bytes(KEY_BYTES))
"""Any private key gives zero with a point of low order: it is a multiple of 8, the largest such order."""


def digest(label: str, *parts: bytes) -> bytes:
    """Return SHA-256 of a label, LF and the parts."""
    return hashlib.sha256(b"".join((label.encode(), b"\n", *parts))).digest()


def derived(secret: bytes, label: str, *parts: bytes) -> bytes:
    """Return HKDF-SHA256 of a secret, 32 bytes, whose ``info`` is a label, LF and the parts."""
    info = b"".join((label.encode(), b"\n", *parts))
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


def is_signature(public: bytes, signature: bytes, context: str, data: bytes) -> bool:
    """Return whether a signature is by this Ed25519 key over a context line and data, as of ``SigningKey``."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, context.encode() + b"\n" + data)
    except (ValueError, InvalidSignature):
        return False
    return True


def public_of(private: bytes) -> bytes:
    """Return the public key of a private X25519 key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def check_form(what: str, public: bytes) -> None:
    """Raise InvalidInput unless an X25519 public key is in its shortest form. So different bytes are different keys."""
    if int.from_bytes(public, "little") >= _FIELD:
        raise InvalidInput(f"{what}: got an X25519 key that is not in its shortest form", code="FN-1622")


def check_order(what: str, public: bytes) -> None:
    """Raise InvalidInput if an X25519 public key is a point of low order. ``agreed`` refuses such a key, too."""
    agreed(what, _PROBE, public)


def private_key(private: bytes) -> X25519PrivateKey:
    """Return a private X25519 key, for several agreements."""
    return X25519PrivateKey.from_private_bytes(private)


def agreed(what: str, private: X25519PrivateKey, public: bytes) -> bytes:
    """Return the shared secret of two X25519 keys.

    Args:
        what: The peer, for the text of an error.
        private: Own private key.
        public: The peer's public key.

    Raises:
        InvalidInput: The public key is a point of low order.
    """
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as exc:
        raise InvalidInput(f"{what}: got an X25519 key that is a point of low order", code="FN-1622") from exc


def sealed(key: bytes, plaintext: bytes) -> bytes:
    """Return the plaintext, encrypted and authenticated. A key seals one plaintext."""
    return ChaCha20Poly1305(key).encrypt(NONCE, plaintext, None)


def opened(key: bytes, ciphertext: bytes) -> bytes | None:
    """Return the plaintext; None if the ciphertext was not sealed with this key."""
    try:
        return ChaCha20Poly1305(key).decrypt(NONCE, ciphertext, None)
    except InvalidTag:
        return None
