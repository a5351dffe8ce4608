"""Updates on a device's disk, from the end of training until the coordinator has accepted them.

A stored Update consists of a payload and a header. The header is written last: an Update without one does not exist.
"""

import hashlib
import re
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from fanin.clients.device.storage.files import own_files, replace
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import UpdateHeader
from fanin.protos.wire import from_proto, to_proto
from fanin.v1 import fleet_pb2 as pb

_UPDATE_NAME: Final = re.compile(r"[^.].*\.(payload|header)(\.new)?", re.ASCII)


class UpdateStore:
    """The Updates in a folder, by the id of their Assignment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Assignments whose Update this process has written or verified.
        self._complete: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, header: UpdateHeader, payload: bytes) -> None:
        """Store an Update. Raises StorageFull.

        Both files are durable before this returns, so before the first byte is sent: a device that sent a part of a
        masked payload and lost the rest could not repeat it. Syncing 16 MB takes some 15 ms more on an SSD.
        """
        payload_path, header_path = self._paths(header.assignment_id)
        replace(payload_path, payload)
        replace(header_path, to_proto(header, pb.UpdateHeader).SerializeToString())
        self._complete.add(header.assignment_id)

    def header(self, assignment_id: str) -> UpdateHeader | None:
        """Return the header of an Assignment's Update; None if the Update is missing, incomplete or damaged."""
        payload_path, header_path = self._paths(assignment_id)
        if not header_path.exists():
            return None
        try:
            header = from_proto(UpdateHeader, pb.UpdateHeader.FromString(header_path.read_bytes()))
        except (DecodeError, InvalidInput):
            return None
        if not payload_path.exists() or payload_path.stat().st_size != header.payload.size_bytes:
            return None
        if assignment_id not in self._complete:
            with payload_path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != header.payload.sha256:
                    return None
            self._complete.add(assignment_id)
        return header

    def read(self, assignment_id: str, offset: int, size_bytes: int) -> bytes:
        """Return a slice of an Update's payload."""
        with self._paths(assignment_id)[0].open("rb") as file:
            file.seek(offset)
            return file.read(size_bytes)

    def clear(self) -> None:
        """Remove all Updates. A device works for one Round at a time, so it needs at most one."""
        self._complete.clear()
        for path in own_files(self._folder, _UPDATE_NAME):
            path.unlink()

    def _paths(self, assignment_id: str) -> tuple[Path, Path]:
        return self._folder / f"{assignment_id}.payload", self._folder / f"{assignment_id}.header"
