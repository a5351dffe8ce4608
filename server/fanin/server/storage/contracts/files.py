"""The contracts of blobs and of a spool."""

from collections.abc import Callable

from fanin.edge.tensors import sha256_hex
from fanin.protos.chunks import CHUNK_BYTES, artifact_of
from fanin.protos.errors import Corrupted, FaninError, InvalidInput, InvalidUpdate, NotFound, Unavailable
from fanin.protos.messages import Piece, UpdateHeader
from fanin.server.storage.contracts.values import RUN, header_of
from fanin.server.storage.protocols.files import Blobs, Spool

_DATA = bytes(range(256)) * 4
_LONG = bytes(range(251)) * (2 * CHUNK_BYTES // 251 + 1)


def check_blobs(blobs: Blobs) -> None:
    """Check a store of Chunks.

    Args:
        blobs: An empty store.

    Raises:
        AssertionError: The store breaks the contract. The text says how.
    """
    digest, absent = sha256_hex(_DATA), sha256_hex(b"absent")
    _refuses(NotFound, lambda: blobs.read(digest), "read: of a chunk that is not stored")
    _refuses(InvalidInput, lambda: blobs.put(absent, _DATA), "put: with a wrong digest")
    _refuses(InvalidInput, lambda: blobs.missing(["../secret"]), "missing: of a name that is no digest")
    for _ in range(2):
        blobs.put(digest, _DATA)
    assert blobs.read(digest) == _DATA, "read: got other bytes than were put"
    assert blobs.read(digest, 1000) == _DATA[1000:], "read: got other bytes from an offset on"
    assert blobs.read(digest, 1000, 100) == _DATA[1000:1100], "read: got other bytes than the requested ones"
    assert blobs.read(digest, 1000, 2 * len(_DATA)) == _DATA[1000:], "read: got other bytes than up to the end"
    assert blobs.read(digest, len(_DATA)) == b"", "read: got bytes after the end"
    _refuses(InvalidInput, lambda: blobs.read(digest, len(_DATA) + 1), "read: from an offset beyond the end")
    assert blobs.missing([absent, digest, absent]) == (absent,), "missing: expected each missing digest once"
    artifact = blobs.put_pieces([_LONG[:5], b"", _LONG[5:-7], _LONG[-7:]])
    assert artifact == artifact_of(_LONG), "put_pieces: got other chunks than CHUNK_BYTES gives"
    assert b"".join(blobs.pieces("long", artifact)) == _LONG, "pieces: got other bytes than were put"
    assert blobs.read_artifact("long", artifact) == _LONG, "read_artifact: got other bytes than were put"
    _refuses(NotFound, lambda: blobs.read_artifact("absent", artifact_of(b"absent")), "read_artifact: of no chunks")
    blobs.renew([absent, digest])
    assert blobs.older_than(0.0) == set(), "older_than: returned a chunk that was stored just now"
    assert blobs.remove_older([absent, digest], 0.0) == 0, "remove_older: removed a chunk that was stored just now"
    blobs.sweep()
    assert blobs.missing([digest]) == (), "sweep: removed a chunk"


def check_spool(spool: Spool) -> None:
    """Check a spool.

    Args:
        spool: An empty spool.

    Raises:
        AssertionError: The spool breaks the contract. The text says how.
    """
    header = header_of(_LONG, "device")
    _check_resumption(spool, header)
    _check_payload(spool, header)
    other = header_of(_DATA, "device")
    wrong = spool.open(other, "device")
    wrong.add(Piece(offset=0, data=_LONG[: len(_DATA)]))
    _refuses(InvalidUpdate, wrong.store, "store: of a chunk with a wrong digest")
    wrong.close()
    spool.discard(other.assignment_id)
    spool.withdraw(header, "device")
    _refuses(Corrupted, lambda: list(spool.read(header, "device")), "read: of a payload that was withdrawn")
    _check_removal(spool)


def _check_resumption(spool: Spool, header: UpdateHeader) -> None:
    upload = spool.open(header, "device")
    assert upload.received_bytes == upload.resumed_bytes == 0, "open: a new upload does not start from 0"
    _refuses(InvalidUpdate, lambda: upload.add(Piece(offset=7, data=b"x")), "add: of a piece that leaves a gap")
    assert upload.add(Piece(offset=0, data=_LONG[:CHUNK_BYTES])), "add: did not report a complete chunk"
    upload.store()
    assert not upload.add(Piece(offset=CHUNK_BYTES, data=b"x")), "add: reported a chunk of which one byte is there"
    # The first byte of a Chunk may be stored or stay in memory. It counts as not received in either case.
    upload.store()
    assert not upload.is_complete(), "is_complete: of an upload with a missing chunk"
    upload.close()
    again = spool.open(header, "device")
    assert again.received_bytes == CHUNK_BYTES, f"open: resumed from {again.received_bytes}, expected {CHUNK_BYTES}"
    assert again.resumed_bytes == CHUNK_BYTES, "open: resumed_bytes is not the offset of the first piece"
    again.close()
    assert not again.is_complete(), "is_complete: of an upload with a missing chunk"
    other = header_of(_DATA, "device")
    fresh = spool.open(other, "device")
    assert fresh.received_bytes == 0, "open: another header resumed from the bytes of the first one"
    fresh.close()


def _check_payload(spool: Spool, header: UpdateHeader) -> None:
    _send(spool, header, "device")
    reopened = spool.open(header, "device")
    assert reopened.is_complete(), "open: a payload that was never recorded did not become an upload again"
    for _ in range(2):
        # A commit that was reported as an error is repeated.
        spool.commit(reopened, "device")
    reopened.close()
    assert b"".join(spool.read(header, "device")) == _LONG, "read: got other bytes than were sent"
    assert spool.read_part(header, "device", 5, 9) == _LONG[5:14], "read_part: got other bytes than were sent"
    assert spool.newest_round(RUN) == 1, f"newest_round: got {spool.newest_round(RUN)}, expected 1"
    replaced = spool.open(header_of(_DATA, "late"), "late")
    replaced.add(Piece(offset=0, data=_DATA))
    replaced.store()
    spool.open(header_of(_DATA * 2, "late"), "late").close()
    _refuses(Unavailable, lambda: spool.commit(replaced, "late"), "commit: of an upload that another one replaced")
    replaced.close()
    spool.discard(header_of(_DATA, "late").assignment_id)


def _check_removal(spool: Spool) -> None:
    kept, lost, later = header_of(_DATA, "kept"), header_of(_DATA, "lost"), header_of(_DATA, "later", made_for=2)
    for header, device in ((kept, "kept"), (lost, "lost"), (later, "later")):
        _send(spool, header, device)
    half = header_of(_LONG, "half")
    _send(spool, half, "half", end=CHUNK_BYTES)
    spool.clear_round(RUN, 1, {"kept": kept})
    assert b"".join(spool.read(kept, "kept")) == _DATA, "clear_round: removed a payload to keep"
    assert b"".join(spool.read(later, "later")) == _DATA, "clear_round: removed a payload of another round"
    _refuses(Corrupted, lambda: list(spool.read(lost, "lost")), "clear_round: left a payload that is not recorded")
    _send(spool, half, "half", end=CHUNK_BYTES)
    spool.sweep([(RUN, 1)])
    resumed = spool.open(half, "half")
    assert resumed.received_bytes == CHUNK_BYTES, "sweep: removed an upload for a round to keep"
    resumed.close()
    spool.sweep([(RUN, 2)])
    fresh = spool.open(half, "half")
    assert fresh.received_bytes == 0, "sweep: left an upload for a round that no longer counts"
    fresh.close()
    assert spool.newest_round("other") == 0, "newest_round: of a run without payloads is not 0"


def _send(spool: Spool, header: UpdateHeader, device: str, end: int | None = None) -> None:
    """Send a payload and make it durable; ``end`` stops an upload early."""
    data = _LONG if header.payload.size_bytes == len(_LONG) else _DATA
    upload = spool.open(header, device)
    for start in range(upload.received_bytes, len(data) if end is None else end, CHUNK_BYTES):
        upload.add(Piece(offset=start, data=data[start : start + CHUNK_BYTES]))
        upload.store()
    if end is None:
        assert upload.is_complete(), "is_complete: of an upload that is stored in full"
        spool.commit(upload, device)
    upload.close()


def _refuses(kind: type[FaninError], call: Callable[[], object], what: str) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"{what}: raised nothing, expected {kind.__name__}")
