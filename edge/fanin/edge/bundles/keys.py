"""Ed25519 keys: signing, verifying, and key files.

Every signature covers a context line followed by the exact bytes. So a signature for one purpose is not valid for
another. A public key has 32 bytes and is named by its lower-case hexadecimal form.

Reference:
    RFC 8032.
"""

import os
from functools import lru_cache
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fanin.edge.files import storage_error, sync_folder
from fanin.protos.errors import InvalidInput

PUBLIC_KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64

BUNDLE_CONTEXT: Final = "fanin bundle manifest v1"
VERSION_CONTEXT: Final = "fanin version v2"
DELEGATION_CONTEXT: Final = "fanin run key delegation v2"
CALL_CONTEXT: Final = "fanin device call v1"
MESSAGE_CONTEXT: Final = "fanin round message v1"
KEPT_RESULTS: Final = 16
"""Results of the newest verifications that are kept. All devices of a simulation verify the same Version, which has
three signatures. Few are kept, because each one keeps its data."""


class SigningKey:
    """A private Ed25519 key that signs bytes within a context."""

    def __init__(self, private: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(private)
        self.public: str = self._key.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> "SigningKey":
        """Return a new key from the operating system's random source."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    def private_bytes(self) -> bytes:
        """Return the 32 secret bytes."""
        return self._key.private_bytes_raw()

    def sign(self, context: str, data: bytes) -> bytes:
        """Return the signature (64 bytes) over a context and data."""
        return self._key.sign(_framed(context, data))


@lru_cache(maxsize=KEPT_RESULTS)
def is_signed(public: str, signature: bytes, context: str, data: bytes) -> bool:
    """Return whether ``signature`` is by this public key (hex) over the context and the data.

    Malformed keys and signatures return False.
    """
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(signature, _framed(context, data))
    except (ValueError, InvalidSignature):
        return False
    return True


def load_or_create_key(path: Path) -> SigningKey:
    """Load a key from a file, or create both. Only the owner of the file may read it.

    Raises:
        InvalidInput: The file does not hold 64 hexadecimal characters.
        StorageFull: The file cannot be created.
    """
    try:
        data = path.read_bytes().strip()
    except FileNotFoundError:
        return _create_key(path)
    try:
        return SigningKey(bytes.fromhex(data.decode()))
    except ValueError as exc:
        raise InvalidInput(
            f"{path}: got {len(data)} characters, expected a key of 64 hexadecimal ones; restore it from a backup, or "
            "remove it: a new key is created, which is a new identity",
            code="FN-0377",
        ) from exc


def _create_key(path: Path) -> SigningKey:
    key = SigningKey.generate()
    path.parent.mkdir(parents=True, exist_ok=True)
    # The draft is linked into place, so a crash leaves no partial key. If two processes start together, one link
    # succeeds and both use its key.
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(key.private_bytes().hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
        sync_folder(path.parent)
    except FileExistsError:
        return load_or_create_key(path)
    except OSError as exc:
        raise storage_error(str(path), exc) from exc
    finally:
        draft.unlink(missing_ok=True)
    return key


def _framed(context: str, data: bytes) -> bytes:
    return context.encode() + b"\n" + data
