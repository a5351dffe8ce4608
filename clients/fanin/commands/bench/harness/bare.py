"""The lower bound of a Round: the same bytes over bare gRPC streams, without other work.

TLS uses an authority like that of a coordinator. Both ends hash each transfer with SHA-256, and uploads are synced to
disk. In a round each client downloads the last upload of client 0, then uploads fresh random bytes. The round ends when
all uploads are on disk. There is no Assignment, Chunk, commit, fold or Version.

    python -m fanin.commands.bench.harness.bare serve FOLDER NUM_CLIENTS SIZE_BYTES NUM_ROUNDS
    python -m fanin.commands.bench.harness.bare send FOLDER INDEX SIZE_BYTES NUM_ROUNDS
"""

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import grpc
import numpy as np

from fanin.protos.errors import Conflict
from fanin.server.access.authority import local_identity

PIECE_BYTES: Final = 1 << 20
"""The fastest size between 64 KiB and 2 MiB; a quarter of gRPC's largest message."""
METHOD: Final = "/bare.Stream/"
TLS: Final = "bare-tls"
ADDRESS: Final = "bare-address"
TIMES: Final = "bare-times.json"
SERVER_OPTIONS: Final = (("grpc.so_reuseport", 0),)


@dataclass
class Exchange:
    """The server's state: the folder of the transfers, and the barrier at the end of each round."""

    folder: Path
    num_clients: int
    num_rounds: int
    done_s: list[float] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.num_clients, action=self._all_here)

    def down(self, _request: bytes, _context: grpc.ServicerContext) -> Iterator[bytes]:
        """Stream the current bytes; the last message is their digest."""
        digest = hashlib.sha256()
        with (self.folder / "bare-0").open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                yield piece
        yield digest.digest()

    def up(self, pieces: Iterator[bytes], _context: grpc.ServicerContext) -> bytes:
        """Receive an upload whose first message is the client's number. Return its digest at the end of the round."""
        path, digest = self.folder / f"bare-{int(next(pieces))}", hashlib.sha256()
        draft = path.with_suffix(".new")
        with draft.open("wb") as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        self.barrier.wait()
        return digest.digest()

    def _all_here(self) -> None:
        self.done_s.append(time.perf_counter())
        if len(self.done_s) == self.num_rounds:
            self.ended.set()


def serve(folder: Path, num_clients: int, size_bytes: int, num_rounds: int) -> None:
    """Serve the rounds, then write the end time of each."""
    identity = local_identity(folder / TLS, ("localhost", "127.0.0.1"), datetime.now(UTC))
    (folder / "bare-0").write_bytes(fresh(size_bytes))
    exchange = Exchange(folder, num_clients, num_rounds)
    server = grpc.server(ThreadPoolExecutor(2 * num_clients), options=SERVER_OPTIONS)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Down": grpc.unary_stream_rpc_method_handler(exchange.down),
        "Up": grpc.stream_unary_rpc_method_handler(exchange.up),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(METHOD.strip("/"), handlers),))
    credentials = grpc.ssl_server_credentials([(identity.key, identity.certificate)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    draft = folder / f"{ADDRESS}.new"
    draft.write_text(f"127.0.0.1:{port}", encoding="utf-8")
    draft.replace(folder / ADDRESS)
    exchange.ended.wait()
    # The grace period lets the last replies arrive.
    server.stop(5.0).wait()
    (folder / TIMES).write_text(json.dumps(exchange.done_s), encoding="utf-8")


def send(folder: Path, index: int, size_bytes: int, num_rounds: int) -> None:
    """Run one client: download and upload in each round. Raises Conflict for a wrong digest."""
    credentials = grpc.ssl_channel_credentials(root_certificates=(folder / TLS / "ca.pem").read_bytes())
    with grpc.secure_channel((folder / ADDRESS).read_text(encoding="utf-8"), credentials) as channel:
        down: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"{METHOD}Down")
        up: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(f"{METHOD}Up")
        for _ in range(num_rounds):
            digest, last = hashlib.sha256(), b""
            for piece in down(b""):
                digest.update(last)
                last = piece
            _check(digest.digest(), last)
            digest = hashlib.sha256()
            _check(up(_pieces(index, fresh(size_bytes), digest)), digest.digest())


def fresh(size_bytes: int) -> bytes:
    """Return random bytes."""
    return np.random.default_rng().bytes(size_bytes)


def _pieces(index: int, data: bytes, digest: "hashlib._Hash") -> Iterator[bytes]:
    yield str(index).encode()
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        digest.update(piece)
        yield piece


def _check(digest: bytes, expected: bytes) -> None:
    if digest != expected:
        raise Conflict(
            f"bare stream: digest mismatch (got {digest.hex()[:8]}.., expected {expected.hex()[:8]}..)", code="FN-1045"
        )


def main(argv: Sequence[str]) -> int:
    """Run the process."""
    role, folder, *numbers = argv
    first, size_bytes, num_rounds = map(int, numbers)
    {"serve": serve, "send": send}[role](Path(folder), first, size_bytes, num_rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
