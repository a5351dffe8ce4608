"""The gRPC servicers: each call decodes its messages, calls the Coordinator or the Runs, and encodes the result.

No rule of a Round or a Run is here.
"""

import errno
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Final, cast

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fanin.protos.errors import Conflict
from fanin.protos.messages import (
    MAX_PAGE_BYTES,
    BundleRef,
    Command,
    ListedRuns,
    Prune,
    Reclaim,
    RunQuery,
    StartRun,
    Version,
    WatchReply,
    check_described_rounds,
)
from fanin.protos.names import MAX_NAME_CHARS
from fanin.protos.plans import Plan
from fanin.protos.texts import counted
from fanin.protos.wire import from_proto, to_proto
from fanin.server.access.authority import ServerIdentity
from fanin.server.access.connections import Connections
from fanin.server.access.interceptors import LOG, Rim, Waits, principal_of
from fanin.server.access.limited_log import MAX_LINES, LimitedLog
from fanin.server.access.rates import CallLimits, CallRates, Sources
from fanin.server.access.registry import Registry
from fanin.server.administration.audit import AuditLog
from fanin.server.administration.commands import carry_out
from fanin.server.administration.devices import Devices
from fanin.server.administration.servicer import AccessService, fitting
from fanin.server.administration.tokens import Tokens
from fanin.server.care.forecast import DiskWatch
from fanin.server.care.pruner import Pruner
from fanin.server.fleet.coordinator import Coordinator
from fanin.server.fleet.downloads import PIECE_BYTES
from fanin.server.fleet.servicer import FleetService
from fanin.server.runs.catalog import Runs
from fanin.server.runs.stream import LiveStream
from fanin.server.storage.stores import Stores
from fanin.server.telemetry.calls import CallInterceptor
from fanin.server.telemetry.instruments import Instruments
from fanin.v1 import access_pb2_grpc, control_pb2, control_pb2_grpc, fleet_pb2, fleet_pb2_grpc

FLEET_SERVICE: Final = "fanin.v1.Fleet"
CONTROL_SERVICE: Final = "fanin.v1.Control"
ACCESS_SERVICE: Final = "fanin.v1.Access"
LOOKAHEAD_BYTES: Final = 128 << 10
"""Half of a piece, for each upload under way. gRPC admits the rest of a piece when it is read."""
SERVER_OPTIONS: Final = (
    # Two coordinators on one port would each serve half of the devices.
    ("grpc.so_reuseport", 0),
    # Bytes of a stream that gRPC reads ahead. Otherwise it probes the bandwidth and holds some 8 MB of each upload in
    # memory.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
    # Clients ping an idle connection once a minute. By default gRPC accepts a ping every 5 minutes without data, and
    # closes a connection with more. That would end the Watch of a quiet Run and every other call on its connection.
    ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
)


class ControlService(control_pb2_grpc.ControlServicer):
    """``fanin.v1.Control`` over the Runs. Calls that change something are in the audit log."""

    def __init__(self, runs: Runs, stream: LiveStream, audit: AuditLog, pruner: Pruner, disk: DiskWatch) -> None:
        self._runs, self._stream, self._audit, self._pruner, self._disk = runs, stream, audit, pruner, disk

    async def MissingChunks(
        self, request: control_pb2.MissingChunksRequest, context: object
    ) -> control_pb2.MissingChunksReply:
        """See control.proto."""
        return control_pb2.MissingChunksReply(sha256=await self._runs.missing_chunks(request.sha256))

    async def PutChunks(
        self, request_iterator: AsyncIterator[control_pb2.ChunkData], context: object
    ) -> control_pb2.PutChunksReply:
        """See control.proto."""
        num_chunks = 0
        async for chunk in request_iterator:
            await self._runs.put_chunk(chunk.sha256, chunk.data)
            num_chunks += 1
        # Afterwards: a Chunk that nothing names has no effect, and is removed after a while.
        await self._audit.append(principal_of(context), "PutChunks", counted(num_chunks, "chunk"), "done")
        return control_pb2.PutChunksReply(num_chunks=num_chunks)

    async def GetChunk(
        self, request: fleet_pb2.DownloadRequest, context: object
    ) -> AsyncIterator[fleet_pb2.DownloadPiece]:
        """See control.proto."""
        data = await self._runs.get_chunk(request.sha256, request.offset)
        for start in range(0, len(data), PIECE_BYTES):
            yield fleet_pb2.DownloadPiece(data=data[start : start + PIECE_BYTES])

    async def CheckPlan(self, request: control_pb2.CheckPlanRequest, context: object) -> control_pb2.CheckPlanReply:
        """See control.proto."""
        await self._runs.check_plan(from_proto(Plan, request.plan))
        return control_pb2.CheckPlanReply()

    async def PublishBundle(
        self, request: control_pb2.PublishBundleRequest, context: object
    ) -> control_pb2.PublishBundleReply:
        """See control.proto."""
        bundle, by = from_proto(BundleRef, request.bundle), principal_of(context)
        async with self._audit.around(by, "PublishBundle", f"bundle {bundle.manifest.sha256}"):
            sha256 = await self._runs.publish_bundle(bundle)
        return control_pb2.PublishBundleReply(bundle_sha256=sha256)

    async def PrepareRun(self, request: control_pb2.PrepareRunRequest, context: object) -> control_pb2.PrepareRunReply:
        """See control.proto."""
        subject = f"run {request.run_id[:MAX_NAME_CHARS]!r}: epoch {request.epoch}"
        async with self._audit.around(principal_of(context), "PrepareRun", subject):
            public_key = await self._runs.prepare_run(request.run_id, request.epoch)
        return control_pb2.PrepareRunReply(run_public_key=bytes.fromhex(public_key))

    async def StartRun(self, request: control_pb2.StartRunRequest, context: object) -> control_pb2.RunInfo:
        """See control.proto."""
        start, by = from_proto(StartRun, request), principal_of(context)
        async with self._audit.around(by, "StartRun", f"run {start.run_id}"):
            return to_proto(await self._runs.start_run(start, by), control_pb2.RunInfo)

    async def PublishVersion(self, request: control_pb2.PublishVersionRequest, context: object) -> control_pb2.RunInfo:
        """See control.proto."""
        version = from_proto(Version, request.version)
        by, subject = principal_of(context), f"run {version.run_id}: version {version.number} {version.sha256}"
        async with self._audit.around(by, "PublishVersion", subject):
            return to_proto(await self._runs.publish_version(version, request.rounds, by), control_pb2.RunInfo)

    async def ReclaimRun(self, request: control_pb2.ReclaimRunRequest, context: object) -> control_pb2.RunInfo:
        """See control.proto."""
        reclaim, by = from_proto(Reclaim, request), principal_of(context)
        subject = f"run {reclaim.version.run_id}: epoch {reclaim.version.epoch}"
        async with self._audit.around(by, "ReclaimRun", subject):
            return to_proto(await self._runs.reclaim(reclaim, by), control_pb2.RunInfo)

    async def Command(self, request: control_pb2.CommandRequest, context: object) -> control_pb2.RunInfo:
        """See control.proto."""
        by = principal_of(context)
        command = replace(from_proto(Command, request), by=by)
        return to_proto(await carry_out(command, by, self._runs, self._audit), control_pb2.RunInfo)

    async def Prune(self, request: control_pb2.PruneRequest, context: object) -> control_pb2.PruneReply:
        """See control.proto."""
        prune, by = from_proto(Prune, request), principal_of(context)
        if not prune.apply:
            return to_proto(await self._pruner.prune(prune), control_pb2.PruneReply)
        async with self._audit.around(by, "Prune", f"run {prune.run_id}"):
            return to_proto(await self._pruner.prune(prune), control_pb2.PruneReply)

    async def ListRuns(self, request: control_pb2.ListRunsRequest, context: object) -> control_pb2.ListRunsReply:
        """See control.proto."""
        return page_of_runs(await self._runs.listed(from_proto(RunQuery, request)))

    async def GetRun(self, request: control_pb2.GetRunRequest, context: object) -> control_pb2.RunInfo:
        """See control.proto."""
        return to_proto(await self._runs.info(request.run_id), control_pb2.RunInfo)

    async def DescribeRun(self, request: control_pb2.DescribeRunRequest, context: object) -> control_pb2.RunDescription:
        """See control.proto."""
        check_described_rounds(request.rounds)
        description = await self._runs.describe(request.run_id, request.rounds)
        return to_proto(replace(description, disk=self._disk.report()), control_pb2.RunDescription)

    async def GetVersion(self, request: control_pb2.GetVersionRequest, context: object) -> control_pb2.GetVersionReply:
        """See control.proto."""
        number = request.number if request.HasField("number") else None
        return to_proto(await self._runs.version(request.run_id, number), control_pb2.GetVersionReply)

    async def AcceptedDevices(
        self, request: control_pb2.AcceptedDevicesRequest, context: object
    ) -> control_pb2.AcceptedDevicesReply:
        """See control.proto."""
        page = await self._runs.accepted_devices(request.run_id, request.round, request.from_index)
        return to_proto(page, control_pb2.AcceptedDevicesReply)

    async def Evaluations(
        self, request: control_pb2.EvaluationsRequest, context: object
    ) -> control_pb2.EvaluationsReply:
        """See control.proto."""
        page = await self._runs.evaluations(request.run_id, request.from_version)
        # The problem of an evaluation is the text of any error.
        rows = fitting((to_proto(each, control_pb2.VersionEvaluation) for each in page), MAX_PAGE_BYTES)
        return control_pb2.EvaluationsReply(evaluations=rows)

    async def Watch(self, request: control_pb2.WatchRequest, context: object) -> AsyncIterator[control_pb2.WatchReply]:
        """See control.proto."""
        messages = self._stream.watch(request.run_id, request.from_sequence, has_live=request.live)
        async with aclosing(messages):
            async for message in messages:
                yield to_proto(WatchReply(what=message), control_pb2.WatchReply)


def page_of_runs(page: ListedRuns) -> control_pb2.ListRunsReply:
    """Return the first Runs of a page that fit ``MAX_PAGE_BYTES``, at least one."""
    runs = fitting((to_proto(info, control_pb2.RunInfo) for info in page.runs), MAX_PAGE_BYTES)
    return control_pb2.ListRunsReply(num_runs=page.num_runs, runs=runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The objects behind the services of a server."""

    coordinator: Coordinator
    runs: Runs
    stream: LiveStream
    registry: Registry
    stores: Stores
    pruner: Pruner
    disk: DiskWatch
    waits: Waits = field(default_factory=Waits)
    connections: Connections = field(default_factory=Connections)
    calls: CallLimits = field(default_factory=CallLimits)
    sources: Sources = field(default_factory=lambda: Sources(time.monotonic, time.time))
    max_refused_lines: int = MAX_LINES
    instruments: Instruments = field(default_factory=lambda: Instruments(time.time))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A TLS server that has its port and serves no call before it is started.

    Besides Fleet, Control and Access it has gRPC's own health and reflection services. They need no credential, and
    reveal only whether it serves, and the protocol.
    """

    server: aio.Server
    port: int
    health: health.aio.HealthServicer

    async def start(self) -> None:
        """Start to serve."""
        await self.server.start()
        await self.report(is_serving=True)

    async def report(self, *, is_serving: bool) -> None:
        """Report by the health service whether the coordinator serves."""
        status = health_pb2.HealthCheckResponse
        for name in ("", FLEET_SERVICE, CONTROL_SERVICE, ACCESS_SERVICE):
            await self.health.set(name, status.SERVING if is_serving else status.NOT_SERVING)

    async def drain(self, grace_s: float) -> None:
        """Announce the end, accept no more calls, and let the calls under way end within ``grace_s`` seconds."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def bind_server(services: Services, identity: Callable[[], ServerIdentity], address: str) -> Bound:
    """Create a server and bind its port. Each new connection gets the certificate that ``identity`` returns then.

    Raises:
        Conflict: The address is taken.
    """
    refused = LimitedLog(LOG, services.max_refused_lines)
    rim, calls = (
        Rim(services.registry, services.waits, CallRates(services.calls, time.monotonic, services.sources), refused),
        CallInterceptor(services.instruments),
    )
    server = aio.server(
        interceptors=(calls, rim),
        options=(*SERVER_OPTIONS, *services.connections.options()),
    )
    fleet = FleetService(services.coordinator, services.registry, services.stores)
    fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)
    stores, registry, runs = services.stores, services.registry, services.runs
    control = ControlService(runs, services.stream, AuditLog(stores), services.pruner, services.disk)
    control_pb2_grpc.add_ControlServicer_to_server(control, server)
    devices = Devices(stores=stores, registry=registry, coordinator=services.coordinator, runs=runs)
    access = AccessService(Tokens(stores=stores, registry=registry), devices, stores.audit, runs.populations)
    access_pb2_grpc.add_AccessServicer_to_server(access, server)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = (FLEET_SERVICE, CONTROL_SERVICE, ACCESS_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    credentials = _credentials(identity)
    try:
        port = server.add_secure_port(address, credentials)
    except RuntimeError as exc:
        raise _not_ours(address, str(exc)) from exc
    return Bound(server=server, port=port, health=servicer)


def _credentials(identity: Callable[[], ServerIdentity]) -> grpc.ServerCredentials:
    """Return credentials that follow a certificate. gRPC asks for it at each handshake, in a thread of its own."""
    served = identity()

    def configuration(one: ServerIdentity) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(one.key, one.chain)])

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        current = identity()
        if current is served:
            # gRPC builds its TLS context again for each configuration: a client that only connects could keep it busy.
            return None
        served = current
        return configuration(current)

    # grpc's stubs lack that None keeps the configuration.
    ask = cast("Callable[[], grpc.ServerCertificateConfiguration]", changed)
    return grpc.dynamic_ssl_server_credentials(configuration(served), ask)


def check_free(address: str) -> None:
    """Raise Conflict if the address is taken. gRPC prints the reason only on standard error.

    A coordinator calls it before it opens or creates its folder.
    """
    host, _, port = address.rpartition(":")
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        for family, kind, protocol, _, where in addresses:
            with socket.socket(family, kind, protocol) as probe:
                # The port of a coordinator that has just ended counts as free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
    except OSError as exc:
        raise _not_ours(address, exc.strerror or str(exc), exc.errno) from exc


def _not_ours(address: str, reason: str, number: int | None = None) -> Conflict:
    remedy = "is another coordinator running? choose another --listen"
    if number == errno.EADDRNOTAVAIL:
        port = address.rpartition(":")[2]
        remedy = (
            f"this machine does not have the address: choose another --listen, such as 0.0.0.0:{port} for all addresses"
        )
    elif number == errno.EACCES:
        remedy = "this user may not listen on the port: choose another --listen, with a port from 1024 on"
    return Conflict(f"{address}: cannot be listened on ({reason}); {remedy}", code="FN-0691")
