"""A device's folder: its lock, its key, its secret, and the stores in it. The package's docstring lists the files."""

import logging
import secrets
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from fanin.clients.device.policy.guard import PrivacyGuard
from fanin.clients.device.storage.chunks import ChunkStore
from fanin.clients.device.storage.exchanges import ExchangeStore
from fanin.clients.device.storage.files import replace
from fanin.clients.device.storage.journals import JournalStore
from fanin.clients.device.storage.records import Records
from fanin.clients.device.storage.states import StateStore
from fanin.clients.device.storage.trainings import TrainingStore
from fanin.clients.device.storage.updates import UpdateStore
from fanin.edge.bundles.keys import SigningKey, load_or_create_key
from fanin.edge.files import held
from fanin.protos.errors import InvalidInput

LOG = logging.getLogger("fanin.clients")
DEFAULT_MAX_BYTES: Final = 256 << 20
MAX_LOCAL_RUNS: Final = 64
"""Most recently used Runs whose personal parameters are kept. They are small, and only this device has them."""
SECRET_BYTES: Final = 32
PRIVATE: Final = 0o700
"""Permissions of a new folder."""
CERTIFICATE_BYTES: Final = 64


def hold_folder(folder: Path) -> AbstractContextManager[None]:
    """Reserve a device's folder for this process: two processes would remove each other's Updates.

    Raises:
        Conflict: Another process holds the folder.
    """
    # Its key, its data and what it trained are the owner's alone.
    return held(folder, "stop it, or give another --state", mode=PRIVATE)


class Cache:
    """A device's folder; one process at a time may use it (``hold_folder``).

    Args:
        folder: The folder; it is created if it is missing.
        max_bytes: Bytes of Chunks that are kept.

    Attributes:
        chunks: Downloaded Chunks.
        updates: Updates that the coordinator has not accepted yet.
        states: The states of stages.
        exchanges: The exchanges of the Assignment under way.
        journals: The journals of round protocols.
        locals: The personal parameters (``personal``).
        tuned: The models that this device has fine-tuned for itself.
        trainings: The unfinished training.
        records: The highest Version of each Run, and the served Publication.
        guard: The floor of this device's privacy, and its ledger.

    Raises:
        Corrupted: The record of the highest Versions is damaged.
    """

    def __init__(self, folder: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._folder = folder
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        self.chunks = ChunkStore(folder / "chunks", max_bytes)
        self.updates = UpdateStore(folder / "updates")
        self.states = StateStore(folder / "states")
        self.exchanges = ExchangeStore(folder / "exchanges")
        self.journals = JournalStore(folder / "journals")
        self.locals = StateStore(folder / "locals", MAX_LOCAL_RUNS)
        self.tuned = StateStore(folder / "tuned")
        self.trainings = TrainingStore(folder / "trainings")
        self.records = Records(folder)
        self.guard = PrivacyGuard(folder)

    @staticmethod
    def is_device(folder: Path) -> bool:
        """Return whether a folder belongs to a device."""
        return (folder / "device.key").is_file()

    def key(self) -> SigningKey:
        """Return the device's key, created on first use. Its public half is in ``device.pub``, for an authority."""
        key, public = load_or_create_key(self._folder / "device.key"), self._folder / "device.pub"
        if not public.exists():
            replace(public, f"{key.public}\n".encode())
        return key

    def certificate(self) -> bytes:
        """Return the certificate of the device's key by an authority; empty without one.

        Raises:
            InvalidInput: The file has another form.
        """
        path = self._folder / "device.certificate"
        try:
            certificate = bytes.fromhex(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return b""
        except ValueError:
            certificate = b""
        if len(certificate) != CERTIFICATE_BYTES:
            raise InvalidInput(
                f"{path}: got no certificate, expected {CERTIFICATE_BYTES} bytes in hexadecimal; let the authority "
                "certify the key of this device again: fanin device certify device.pub",
                code="FN-1645",
            )
        return certificate

    @property
    def secret(self) -> bytes:
        """The device's secret, 32 bytes. It is created, and durable, on first use.

        Without its secret, a device that took part before cannot repeat the draws of an unfinished training. It gets
        a new secret and logs a warning.
        """
        path = self._folder / "device.secret"
        try:
            secret = bytes.fromhex(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            secret = b""
        if len(secret) == SECRET_BYTES:
            return secret
        if path.exists() or self.records.has_versions:
            LOG.warning("%s: the secret of this device is lost; a new one is created, and its draws are others", path)
        secret = secrets.token_bytes(SECRET_BYTES)
        replace(path, f"{secret.hex()}\n".encode(), mode=0o600)
        return secret
