"""Devices for stories: the production client, one Update at a time, and calls that no honest device makes."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from google.protobuf.message import Message

from fanin.clients.device.client import Client, ClientOptions, ClientParts
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.updates import make_update
from fanin.clients.transport import CallOptions, Connection, GrpcTransport
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import CALL_CONTEXT, SigningKey
from fanin.edge.codecs.fixed import CODECS
from fanin.edge.tensors import sha256_hex
from fanin.protos import calls
from fanin.protos import messages as m
from fanin.protos.wire import from_proto, to_proto
from fanin.simulation import SyntheticTrainer
from fanin.v1 import fleet_pb2 as pb

FLEET = "/fanin.v1.Fleet/"
CALL_S = 20.0
PIECE_BYTES = 256 << 10
R = TypeVar("R", bound=Message)


def sign(key: SigningKey, method: str, body: bytes, *, device_id: str = "", late_s: float = 0.0) -> CallOptions:
    """Return the metadata of a signed call. With another device's id or a past time, the call is a forgery."""
    call = calls.DeviceCall(
        method=f"{FLEET}{method}",
        device_id=device_id or calls.device_id_of(key.public),
        time_us=int((time.time() - late_s) * calls.MICROSECONDS),
        body_sha256=sha256_hex(body),
    )
    metadata = (
        (calls.DEVICE, call.device_id),
        (calls.TIME, str(call.time_us)),
        (calls.SIGNATURE, key.sign(CALL_CONTEXT, call.signed_bytes())),
    )
    return CallOptions(metadata=metadata, timeout_s=CALL_S)


class Witness(GrpcTransport):
    """The production transport, which records why its device gives up, and then stops the device.

    ``alter`` changes a received Assignment, as a hostile coordinator could.
    """

    def __init__(self, connection: Connection, key: SigningKey) -> None:
        super().__init__(connection, key)
        self.failures: list[str] = []
        self.alter: Callable[[m.Assignment], m.Assignment] = lambda assignment: assignment
        self.stop: Callable[[], None] = lambda: None

    def check_in(self, check_in: m.CheckIn) -> m.CheckInAnswer:
        """Check in. Return the answer with an altered Assignment."""
        answer = super().check_in(check_in)
        return m.Assigned(assignment=self.alter(answer.assignment)) if isinstance(answer, m.Assigned) else answer

    def report(self, report: m.Report) -> m.UploadReply:
        """Record the reason."""
        reply = super().report(report)
        self.failures.append(report.failure)
        self.stop()
        return reply


class Place(Protocol):
    """A coordinator in this process or in another."""

    @property
    def address(self) -> str:
        """The address of the coordinator."""
        ...

    @property
    def ca(self) -> bytes:
        """The certificate of its authority."""
        ...

    @property
    def device_token(self) -> str:
        """The token with which devices enroll."""
        ...


@dataclass
class Peer:
    """One device of a coordinator. Successive clients share its folder."""

    host: Place
    bundle: Bundle
    index: int
    folder: Path
    scale: float = 0.01
    key: SigningKey = field(init=False)
    cache: Cache = field(init=False)
    work: m.Assignment = field(init=False)

    def __post_init__(self) -> None:
        self.cache = Cache(self.folder)
        self.key = self.cache.key()

    @property
    def device_id(self) -> str:
        """The device's id."""
        return calls.device_id_of(self.key.public)

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Yield a new connection."""
        connection = Connection(self.host.address, self.host.ca)
        try:
            yield connection
        finally:
            connection.close()

    @contextmanager
    def transport(self) -> Iterator[GrpcTransport]:
        """Yield the production transport."""
        with self.connection() as connection:
            yield GrpcTransport(connection, self.key)

    def begin(self) -> None:
        """Enroll and check in. The Assignment becomes ``work``."""
        with self.transport() as transport:
            transport.enroll(self.host.device_token)
            capabilities = m.Capabilities(codecs=tuple(CODECS), runtimes=("synthetic 1",), graph_formats=("onnx",))
            answer = transport.check_in(m.CheckIn(protocol=m.PROTOCOL, capabilities=capabilities, wait_s=10.0))
            assert isinstance(answer, m.Assigned), answer
            self.work = answer.assignment
            # The coordinator records the deadline after this answer, and before the next one.
            transport.report(m.Report(assignment_id=self.work.assignment_id, failure=""))

    def update(self) -> tuple[m.UpdateHeader, bytes]:
        """Return a synthetic Update of this device for its ``work``."""
        table = self.bundle.manifest.table
        model = OpenedModel(bundle=self.bundle, parameters=np.zeros(table.num_values, np.float32))
        return make_update(
            self.work, table, self.trainer().train(model, self.work, lambda: True), m.Telemetry(runtime="synthetic 1")
        )

    def upload(self, header: m.UpdateHeader, payload: bytes) -> m.UploadReply:
        """Upload with the production transport. Return the last reply."""
        with self.transport() as transport:
            return transport.upload(header, lambda offset, size: payload[offset : offset + size])

    def send(self, header: m.UpdateHeader, parts: Sequence[m.Piece | m.UpdateHeader]) -> list[m.UploadReply]:
        """Send exactly these parts after the header and ignore the replies meanwhile. Return all replies."""
        first = upload_bytes(header)
        requests = iter([first, *(upload_bytes(part) for part in parts)])
        with self.connection() as connection:
            call = sign(self.key, "Upload", first)
            replies = connection.stream_stream(f"{FLEET}Upload", requests, pb.UploadReply.FromString, call)
            return [from_proto(m.UploadReply, reply) for reply in replies]

    def take_part(self, num_updates: int = 1) -> None:
        """Run the production client until ``num_updates`` Updates were accepted."""
        with self.transport() as transport:
            self.client(transport, num_updates).run()

    def give_up(self, alter: Callable[[m.Assignment], m.Assignment] | None = None) -> str:
        """Run the production client until it gives up an Assignment. Return the reason."""
        with self.connection() as connection:
            witness = Witness(connection, self.key)
            client = self.client(witness, 1)
            witness.stop = client.stop
            witness.alter = alter or witness.alter
            client.run()
            (failure,) = witness.failures
            return failure

    def client(self, transport: GrpcTransport, num_updates: int) -> Client:
        """Return the production client of this device."""
        parts = ClientParts(
            transport=transport,
            cache=self.cache,
            trainer=self.trainer(),
            trusted=(self.bundle.signed.public_key,),
            rng=random.Random(self.index),
        )
        return Client(parts, ClientOptions(token=self.host.device_token, max_updates=num_updates))

    def trainer(self) -> SyntheticTrainer:
        """Return the trainer that draws this device's Update."""
        return SyntheticTrainer(partition=self.index, num_examples=10 + self.index, scale=self.scale)


def upload_bytes(part: m.UpdateHeader | m.Piece) -> bytes:
    """Return a request of an upload as it is sent."""
    return to_proto(m.UploadRequest(part=part), pb.UploadRequest).SerializeToString()


def pieces(payload: bytes, start: int = 0, end: int | None = None) -> list[m.Piece]:
    """Cut a payload's bytes from ``start`` to ``end`` into pieces."""
    stop = len(payload) if end is None else end
    return [
        m.Piece(offset=at, data=payload[at : min(at + PIECE_BYTES, stop)]) for at in range(start, stop, PIECE_BYTES)
    ]
