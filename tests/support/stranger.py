"""An independent implementation of a device, based only on the .proto files and the code that protoc generates.

From fanin it imports only ``fanin.v1``. Each function implements a paragraph of ``fleet.proto``.
"""

import hashlib
import json
import queue
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fanin.v1 import fleet_pb2 as pb
from fanin.v1 import fleet_pb2_grpc

PROTOCOL = 1
FORMAT = 1
CHUNK_BYTES = 1 << 20
PIECE_BYTES = 256 << 10
Values = npt.NDArray[np.float32]
Metadata = tuple[tuple[str, str | bytes], ...]


def verify(public_key: bytes, signature: bytes, context: str, data: bytes) -> None:
    """Raise an error unless this key signed these bytes with this context."""
    Ed25519PublicKey.from_public_bytes(public_key).verify(signature, context.encode() + b"\n" + data)


def compact(row: list[object]) -> bytes:
    """Return JSON without spaces."""
    return json.dumps(row, separators=(",", ":")).encode()


@dataclass(frozen=True, kw_only=True)
class Block:
    """One tensor: its name, and its values in the flat vector."""

    name: str
    first: int
    last: int


@dataclass(kw_only=True)
class Model:
    """The downloaded and verified parameters."""

    blocks: list[Block]
    values: Values


@dataclass
class Stranger:
    """One device with one connection."""

    address: str
    ca_certificate: bytes
    publisher: bytes
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    last_time_us: int = 0
    highest: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.public_key = self.key.public_key().public_bytes_raw()
        self.device_id = hashlib.sha256(self.public_key).hexdigest()[:32]
        credentials = grpc.ssl_channel_credentials(self.ca_certificate)
        self.channel = grpc.secure_channel(self.address, credentials)
        self.fleet = fleet_pb2_grpc.FleetStub(self.channel)

    def sign(self, method: str, body: bytes) -> Metadata:
        """Return the metadata of a call, with a unique time."""
        self.last_time_us = max(time.time_ns() // 1000, self.last_time_us + 1)
        digest = hashlib.sha256(body).hexdigest()
        lines = ("fanin device call v1", f"/fanin.v1.Fleet/{method}", self.device_id, str(self.last_time_us), digest)
        signature = self.key.sign("\n".join(lines).encode())
        return (
            ("fanin-device", self.device_id),
            ("fanin-time", str(self.last_time_us)),
            ("fanin-signature-bin", signature),
        )

    def enroll(self, token: str) -> str:
        """Enroll. Return the device's id at the coordinator."""
        request = pb.EnrollRequest(protocol=PROTOCOL, token=token, public_key=self.public_key)
        metadata = self.sign("Enroll", request.SerializeToString())
        return str(self.fleet.Enroll(request, metadata=metadata, timeout=30.0).device_id)

    def check_in(self, wait_s: float = 10.0) -> pb.CheckInReply:
        """Request work."""
        can = pb.Capabilities(codecs=["fixed32", "int16", "int8", "int4"], runtimes=["none 1"], graph_formats=["onnx"])
        request = pb.CheckInRequest(protocol=PROTOCOL, capabilities=can, wait_s=wait_s)
        metadata = self.sign("CheckIn", request.SerializeToString())
        return self.fleet.CheckIn(request, metadata=metadata, timeout=wait_s + 30.0)

    def report(self, assignment_id: str) -> pb.ReportReply:
        """Request the state of an Update."""
        request = pb.ReportRequest(assignment_id=assignment_id)
        return self.fleet.Report(request, metadata=self.sign("Report", request.SerializeToString()), timeout=30.0)

    def download(self, assignment_id: str, artifact: pb.Artifact) -> bytes:
        """Download and verify an Artifact: one call for all Chunks, with an empty piece between them."""
        names = [chunk.sha256 for chunk in artifact.chunks]
        request = pb.DownloadRequest(assignment_id=assignment_id, sha256=names[0], more_sha256=names[1:])
        metadata = self.sign("Download", request.SerializeToString())
        chunks = [b""]
        for piece in self.fleet.Download(request, metadata=metadata):
            if piece.data:
                chunks[-1] += piece.data
            else:
                chunks.append(b"")
        assert [hashlib.sha256(chunk).hexdigest() for chunk in chunks] == names
        data = b"".join(chunks)
        assert (len(data), hashlib.sha256(data).hexdigest()) == (artifact.size_bytes, artifact.sha256)
        return data

    def fetch(self, work: pb.Assignment) -> Model:
        """Download and verify the Bundle's manifest and the Version, in the order of the checklist."""
        bundle, version = work.bundle, work.version
        assert bundle.public_key == self.publisher
        manifest = self.download(work.assignment_id, bundle.manifest)
        verify(bundle.public_key, bundle.signature, "fanin bundle manifest v1", manifest)
        facts = json.loads(manifest)
        assert facts["format"] == 3
        assert (version.run_id, version.bundle_sha256) == (work.run_id, bundle.manifest.sha256)
        if version.public_key != self.publisher:
            delegation = version.delegation
            assert delegation.run_public_key == version.public_key
            assert (delegation.run_id, delegation.epoch) == (version.run_id, version.epoch)
            assert delegation.bundle_sha256 == version.bundle_sha256
            row: list[object] = [delegation.run_id, delegation.epoch, delegation.bundle_sha256]
            row.append(delegation.run_public_key.hex())
            verify(self.publisher, delegation.signature, "fanin run key delegation v2", compact(row))
        row = [version.run_id, version.epoch, version.number, version.parent, version.bundle_sha256]
        row.append(version.parameters.sha256)
        verify(version.public_key, version.signature, "fanin version v2", compact(row))
        # A device in use stores the highest pair.
        assert self.highest.get(version.run_id, (0, 0)) <= (version.epoch, version.number)
        self.highest[version.run_id] = (version.epoch, version.number)
        return read_parameters(self.download(work.assignment_id, version.parameters), facts["parameters"])

    def upload(self, header: pb.UpdateHeader, payload: bytes, break_at: int | None = None) -> pb.UploadReply:
        """Send an Update from the first reply's offset. With ``break_at``, hang up at this number of received bytes."""
        first = pb.UploadRequest(header=header)
        offsets: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        requests = _requests(first, payload[:break_at], offsets)
        call = self.fleet.Upload(requests, metadata=self.sign("Upload", first.SerializeToString()))
        reply = None
        for reply in call:
            offsets.put(reply.received_bytes)
            if break_at is not None and reply.received_bytes >= break_at:
                call.cancel()
                break
        offsets.put(None)
        assert reply is not None
        return reply

    def close(self) -> None:
        """Hang up."""
        self.channel.close()


def _requests(
    first: pb.UploadRequest, payload: bytes, offsets: queue.SimpleQueue[int | None]
) -> Iterator[pb.UploadRequest]:
    """Yield the header, then the pieces from the offset of the first reply, then wait for the end."""
    yield first
    at = offsets.get()
    while at is not None and at < len(payload):
        data = payload[at : at + PIECE_BYTES]
        yield pb.UploadRequest(piece=pb.Piece(offset=at, data=data))
        at += len(data)
    while at is not None:
        at = offsets.get()


def read_parameters(data: bytes, shapes: dict[str, list[int]]) -> Model:
    """Parse the layout and the values of a Version's parameters."""
    assert data[:8] == b"fanin-t2"
    (length,) = struct.unpack_from("<I", data, 8)
    assert (12 + length) % 64 == 0
    rows = json.loads(data[12 : 12 + length])
    assert dict(rows) == shapes and [name for name, _ in rows] == sorted(shapes)
    blocks, first = [], 0
    for name, shape in rows:
        last = first + int(np.prod(shape, dtype=np.int64))
        blocks.append(Block(name=name, first=first, last=last))
        first = last
    return Model(blocks=blocks, values=np.frombuffer(data, "<f4", offset=12 + length))


def encode(work: pb.Assignment, blocks: list[Block], change: Values) -> tuple[bytes, list[int], dict[str, int]]:
    """Return the payload of a change, its shifts, and the numbers of rounded and of saturated values."""
    bits = {"fixed32": 32, "int16": 16, "int8": 8, "int4": 4}[work.codec.name]
    limit, rng = 2 ** (bits - 1) - 1, np.random.default_rng()
    integers, shifts, counts = [np.empty(0, np.int32)], [], {"rounded": 0, "saturated": 0}
    for block, exponent in zip(blocks, work.grid.exponents, strict=True):
        values = change[block.first : block.last].astype(np.float64)
        largest, shift = float(np.abs(values).max(initial=0.0)), 0
        while shift < work.codec.max_shift and largest / 2.0 ** (exponent + shift) > limit:
            shift += 1
        scaled = values / 2.0 ** (exponent + shift)
        if work.codec.name == "fixed32":
            rounded = np.rint(scaled)
        else:
            below = np.floor(np.abs(scaled))
            rounded = np.copysign(below + (rng.random(scaled.size) < np.abs(scaled) - below), scaled)
        counts["rounded"] += int((rounded != scaled).sum())
        counts["saturated"] += int((np.abs(rounded) > limit).sum())
        integers.append(np.clip(rounded, -limit, limit).astype("<i4"))
        shifts.append(shift)
    values = np.concatenate(integers)
    if bits > 4:
        return values.astype(f"<i{bits // 8}").tobytes(), shifts, counts
    halves = np.append(values, np.zeros(values.size % 2, np.int32)) & 15
    return (halves[::2] + 16 * halves[1::2]).astype(np.uint8).tobytes(), shifts, counts


def artifact_of(data: bytes) -> pb.Artifact:
    """Cut the bytes into Chunks."""
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    refs = [pb.ChunkRef(sha256=hashlib.sha256(chunk).hexdigest(), size_bytes=len(chunk)) for chunk in chunks]
    return pb.Artifact(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data), chunks=refs)


def update_of(work: pb.Assignment, model: Model, change: Values, num_examples: int) -> tuple[pb.UpdateHeader, bytes]:
    """Return the Update for an Assignment."""
    payload, shifts, counts = encode(work, model.blocks, change)
    header = pb.UpdateHeader(
        format=FORMAT,
        assignment_id=work.assignment_id,
        run_id=work.run_id,
        round=work.round,
        version_sha256=work.version.parameters.sha256,
        codec=work.codec.name,
        shifts=shifts,
        payload=artifact_of(payload),
        statistics=pb.Statistics(counts={"examples": num_examples, **counts}),
        telemetry=pb.Telemetry(runtime="none 1"),
    )
    return header, payload
