"""The exchanges of the Assignment under way on a device's disk, one file for each phase.

A message is durable before it is sent, and so is an answer before the next step. Files of other Assignments are removed
when an Assignment begins its exchanges. A file has the form::

    offset  size  field
    0       8     magic b"fanin-x1" (the digit is the format number)
    8       32    SHA-256 of the rest
    40      12    the sizes of payload, secret and answer, 4 bytes each, little-endian; 2^32 - 1: no answer yet
    52            payload, secret, answer
"""

import hashlib
import re
import struct
from pathlib import Path
from typing import Final

from fanin.clients.device.session.protocols import KeptExchange, Message
from fanin.clients.device.storage.files import own_files, replace
from fanin.protos.errors import Corrupted

MAGIC: Final = b"fanin-x1"
NO_ANSWER: Final = (1 << 32) - 1
_SIZES: Final = struct.Struct("<III")
_DIGEST: Final = len(MAGIC) + hashlib.sha256().digest_size
_NAME: Final = re.compile(r"[^.].*\.exchange(\.new)?", re.ASCII)


class ExchangeStore:
    """The exchanges in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, assignment_id: str, phase: str, kept: KeptExchange) -> None:
        """Store an exchange. It is durable before this returns. Raises StorageFull."""
        message, answer = kept.message, kept.answer
        sizes = _SIZES.pack(len(message.payload), len(message.secret), NO_ANSWER if answer is None else len(answer))
        content = sizes + message.payload + message.secret + (answer or b"")
        data = MAGIC + hashlib.sha256(content).digest() + content
        replace(self._path(assignment_id, phase), data, mode=0o600)

    def get(self, assignment_id: str, phase: str) -> KeptExchange | None:
        """Return an exchange, None without one.

        Raises:
            Corrupted: The file is damaged. The device gives the Assignment up, because it cannot repeat its message.
        """
        try:
            data = self._path(assignment_id, phase).read_bytes()
        except FileNotFoundError:
            return None
        content = data[_DIGEST:]
        digest = hashlib.sha256(content).digest()
        if data[: len(MAGIC)] != MAGIC or data[len(MAGIC) : _DIGEST] != digest or len(content) < _SIZES.size:
            raise Corrupted(f"exchange of the phase {phase}: damaged on this disk", code="FN-0837")
        payload_bytes, secret_bytes, answer_bytes = _SIZES.unpack_from(content)
        end = _SIZES.size + payload_bytes
        return KeptExchange(
            message=Message(payload=content[_SIZES.size : end], secret=content[end : end + secret_bytes]),
            answer=None if answer_bytes == NO_ANSWER else content[end + secret_bytes :],
        )

    def keep(self, assignment_id: str) -> None:
        """Remove the exchanges of all other Assignments; of all with an empty id."""
        for path in own_files(self._folder, _NAME):
            if not assignment_id or not path.name.startswith(f"{assignment_id}@"):
                path.unlink()

    def _path(self, assignment_id: str, phase: str) -> Path:
        # "@" is in no name.
        return self._folder / f"{assignment_id}@{phase}.exchange"
