"""Uploads whose pieces are stored within a Chunk: the same payload, and no byte of a wrong Chunk stays."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.values import assignment, update

from fanin.protos.chunks import CHUNK_BYTES, artifact_of
from fanin.protos.errors import InvalidUpdate
from fanin.protos.messages import Piece
from fanin.server.storage.disk import Durability
from fanin.server.storage.spool import FolderSpool

PAYLOAD = bytes(index * 7 % 251 for index in range(2 * CHUNK_BYTES + 1000))
HEADER = replace(update(assignment())[0], payload=artifact_of(PAYLOAD))


@pytest.fixture
def spool(tmp_path: Path) -> FolderSpool:
    """Return a spool in a folder."""
    return FolderSpool(tmp_path / "spool", tmp_path / "updates", Durability.PROCESS)


@pytest.mark.parametrize("piece_bytes", [1000, 300_000, CHUNK_BYTES + 1])
def test_pieces_that_are_stored_at_once_become_the_payload(spool: FolderSpool, piece_bytes: int) -> None:
    upload = spool.open(HEADER, "device")
    for start in range(0, len(PAYLOAD), piece_bytes):
        upload.add(Piece(offset=start, data=PAYLOAD[start : start + piece_bytes]))
        upload.store()
    assert upload.is_complete()
    spool.commit(upload, "device")
    upload.close()
    assert b"".join(spool.read(HEADER, "device")) == PAYLOAD


def test_a_wrong_chunk_that_is_partly_stored_is_removed(spool: FolderSpool, tmp_path: Path) -> None:
    upload = spool.open(HEADER, "device")
    upload.add(Piece(offset=0, data=b"?" + PAYLOAD[1:1000]))
    upload.store()
    upload.add(Piece(offset=1000, data=PAYLOAD[1000:CHUNK_BYTES]))
    with pytest.raises(InvalidUpdate, match="FN-0117"):
        upload.store()
    upload.close()
    assert (tmp_path / "spool" / f"{HEADER.assignment_id}.part").stat().st_size == 0
