"""The operator's client: publish Bundles and Versions, start, command and watch Runs.

``control.proto`` specifies the guarantees of each call.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Final, Self, TypeVar

from google.protobuf.message import Message

from fanin.clients.arguments import check_number, check_text, check_type, clean_token
from fanin.clients.transfers import Transfers, chunk_messages, download, unshown
from fanin.clients.transport import CallOptions, Connection
from fanin.edge.bundles.bundle import Bundle, SignedManifest
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.versions import begin_epoch, check_version, sign_delegation, sign_version
from fanin.edge.tensors import Float32s, decode_parameters
from fanin.protos.calls import AUTHORIZATION, BEARER
from fanin.protos.chunks import Artifact, artifact_of, cut, short
from fanin.protos.errors import InvalidVersion, Unavailable, Untrusted
from fanin.protos.messages import (
    FIRST_EPOCH,
    UNSEEN,
    AcceptedDevices,
    BundleRef,
    Command,
    ListedRuns,
    LiveRound,
    LoggedEvent,
    Prune,
    Pruned,
    Reclaim,
    RunDescription,
    RunInfo,
    RunQuery,
    RunState,
    StartRun,
    Version,
    VersionEvaluation,
    VersionWithBundle,
    WatchReply,
)
from fanin.protos.names import MAX_NUMBER
from fanin.protos.plans import MAX_TIMES, Plan
from fanin.protos.wire import from_proto, to_proto
from fanin.v1 import control_pb2 as pb
from fanin.v1 import fleet_pb2, plan_pb2

ReplyT = TypeVar("ReplyT", bound=Message)
CONTROL = "/fanin.v1.Control/"
CALL_S = 120.0
"""Seconds until a call times out. Publishing a Bundle verifies all of it; the other calls take milliseconds."""
MAX_COMMAND_TRIES: Final = 5
MAX_WATCH_TRIES: Final = 20
STEADY_S: Final = 60.0
"""Seconds after which a watch counts as connected: a later failure does not count as a failed try."""
PAUSE_S: Final = 0.5  # Between two tries. A killed coordinator serves again within a few seconds.


class Operator:
    """An operator's client of one coordinator. Every method raises FaninError and nothing else.

    A wrong argument is an InvalidInput that names it, before anything is sent.

    with Operator.connect("127.0.0.1:7443", ca_certificate, token) as operator:
        for run in operator.runs():
            print(run.run_id, run.state.value, run.version)
    """

    def __init__(self, connection: Connection, token: str, transfers: Transfers = unshown) -> None:
        """Create a client over an open connection. Raises InvalidInput for a wrong argument.

        Args:
            connection: The connection.
            token: An operator's token; white space around it is removed.
        """
        self._transfers = transfers
        check_type("operator: connection", connection, Connection)
        self._connection = connection
        metadata = ((AUTHORIZATION, f"{BEARER}{clean_token('operator: token', token)}"),)
        self._call = CallOptions(metadata=metadata, timeout_s=CALL_S)
        self._endless = CallOptions(metadata=metadata)

    @classmethod
    @contextmanager
    def connect(cls, address: str, ca_certificate: bytes, token: str, transfers: Transfers = unshown) -> Iterator[Self]:
        """Connect to a coordinator; the connection closes when the context ends.

        Args:
            address: HOST:PORT.
            ca_certificate: The PEM certificate of the coordinator's authority, ``tls/ca.pem`` in its folder.
            token: An operator's token, ``tokens/operator.token`` in its folder. White space around it is removed.
            transfers: Shows the progress of uploads and downloads.

        Raises:
            InvalidInput: The address, the certificate or the token has another form.
        """
        check_text("connect: address", address)
        check_type("connect: ca_certificate", ca_certificate, bytes)
        with closing(Connection(address, ca_certificate)) as connection:
            yield cls(connection, token, transfers)

    def check_plan(self, plan: Plan) -> None:
        """Raise InvalidPlan unless the coordinator has the parts that a Plan names, with these options.

        ``start_run`` checks them too, when the Bundle is published already.
        """
        check_type("check_plan: plan", plan, Plan)
        self._unary("CheckPlan", pb.CheckPlanRequest(plan=to_proto(plan, plan_pb2.Plan)), pb.CheckPlanReply)

    def publish_bundle(self, bundle: Bundle) -> str:
        """Upload the Chunks of a Bundle that the coordinator lacks, then register it. Returns the Bundle's digest."""
        check_type("publish_bundle: bundle", bundle, Bundle)
        pieces = dict(_chunks(bundle.signed.data))
        for name in bundle.manifest.artifacts:
            pieces |= dict(_chunks(bundle.artifact(name)))
        self._put(pieces)
        request = pb.PublishBundleRequest(bundle=to_proto(ref_of(bundle.signed), fleet_pb2.BundleRef))
        reply = self._unary("PublishBundle", request, pb.PublishBundleReply)
        return reply.bundle_sha256

    def start_run(
        self, run_id: str, plan: Plan, bundle: Bundle, publisher: SigningKey, parameters: Artifact | None = None
    ) -> RunInfo:
        """Start a Run of a published Bundle from its initial parameters, or from others that the coordinator has.

        The Bundle's publisher signs Version 0 and the delegation to the coordinator's key for this Run.
        """
        check_text("start_run: run_id", run_id)
        check_type("start_run: plan", plan, Plan)
        check_type("start_run: bundle", bundle, Bundle)
        check_type("start_run: publisher", publisher, SigningKey)
        new_key = self._prepare(run_id, FIRST_EPOCH)
        start = StartRun(
            run_id=run_id,
            plan=plan,
            version=sign_version(
                publisher,
                parent=None,
                run_id=run_id,
                bundle_sha256=bundle.sha256,
                parameters=parameters or bundle.manifest.artifacts[bundle.manifest.initial],
            ),
            delegation=sign_delegation(publisher, run_id=run_id, bundle_sha256=bundle.sha256, run_public_key=new_key),
        )
        request = to_proto(start, pb.StartRunRequest)
        return from_proto(RunInfo, self._unary("StartRun", request, pb.RunInfo))

    def publish_version(self, version: Version, data: bytes, num_rounds: int) -> RunInfo:
        """Upload canonical parameter bytes, publish the Version that names them, and run ``num_rounds`` Rounds."""
        check_type("publish_version: version", version, Version)
        check_type("publish_version: data", data, bytes)
        check_number("publish_version: num_rounds", num_rounds, MAX_TIMES)
        self._put(dict(_chunks(data)))
        request = pb.PublishVersionRequest(version=to_proto(version, fleet_pb2.Version), rounds=num_rounds)
        return from_proto(RunInfo, self._unary("PublishVersion", request, pb.RunInfo))

    def reclaim(self, run_id: str, publisher: SigningKey, number: int | None = None, num_rounds: int = 0) -> RunInfo:
        """Begin the next epoch of a Run: devices then refuse every Version of the run keys before it.

        The publisher signs the parameters of a Version of the Run again, and delegates to a new run key.

        Args:
            run_id: The Run, in any state.
            publisher: The key that signed its Bundle.
            number: The Version from whose parameters the Run continues; None for the newest one of the record.
            num_rounds: Rounds to run from it; 0 for those that were left.

        Raises:
            NotFound: There is no such Run or Version.
            InvalidVersion: The Version does not verify, or another key signed the Bundle.
            Conflict: The record changed meanwhile; call again.
        """
        check_text("reclaim: run_id", run_id)
        check_type("reclaim: publisher", publisher, SigningKey)
        if number is not None:
            check_number("reclaim: number", number, MAX_NUMBER)
        check_number("reclaim: num_rounds", num_rounds, MAX_TIMES)
        newest, source = self.version(run_id), self.version(run_id, number)
        bundle_sha256 = source.bundle.manifest.sha256
        if source.bundle.public_key != publisher.public:
            raise InvalidVersion(
                f"run {run_id}: got the key {short(publisher.public)}, expected {short(source.bundle.public_key)}, "
                "which signed the run's bundle; pass it with --key",
                code="FN-1015",
            )
        # The publisher signs these parameters again, so it must not take them from a stranger.
        check_version(
            source.version, run_id=run_id, bundle_sha256=bundle_sha256, publisher=publisher.public, seen=UNSEEN
        )
        following = sign_version(
            publisher,
            parent=newest.version,
            run_id=run_id,
            bundle_sha256=bundle_sha256,
            parameters=source.version.parameters,
        )
        version = begin_epoch(publisher, following)
        delegation = sign_delegation(
            publisher,
            run_id=run_id,
            epoch=version.epoch,
            bundle_sha256=bundle_sha256,
            run_public_key=self._prepare(run_id, version.epoch),
        )
        reclaim = Reclaim(
            delegation=delegation, version=version, adopted_number=source.version.number, rounds=num_rounds
        )
        request = to_proto(reclaim, pb.ReclaimRunRequest).SerializeToString()
        return self._repeated(f"{CONTROL}ReclaimRun", request)

    def _unary(self, method: str, request: Message, reply: type[ReplyT]) -> ReplyT:
        return self._connection.unary(f"{CONTROL}{method}", request.SerializeToString(), reply.FromString, self._call)

    def _prepare(self, run_id: str, epoch: int) -> str:
        """Return the public key with which the coordinator signs the Versions of an epoch of a Run."""
        request = pb.PrepareRunRequest(run_id=run_id, epoch=epoch)
        reply = self._unary("PrepareRun", request, pb.PrepareRunReply)
        return reply.run_public_key.hex()

    def command(self, command: Command) -> RunInfo:
        """Pause, resume or stop a Run, or make another Version its newest.

        The call is repeated after a broken connection. The command's id ensures that it takes effect only once.

        Raises:
            Conflict: The Run's state does not allow the command.
            NotFound: There is no such Run or Version.
        """
        check_type("command: command", command, Command)
        return self._repeated(f"{CONTROL}Command", to_proto(command, pb.CommandRequest).SerializeToString())

    def _repeated(self, method: str, request: bytes) -> RunInfo:
        """Make a call that changes a Run once, and repeat it after a broken connection."""
        for num_tries in range(1, MAX_COMMAND_TRIES + 1):
            try:
                reply = self._connection.unary(method, request, pb.RunInfo.FromString, self._call)
                return from_proto(RunInfo, reply)
            except Unavailable as exc:
                if isinstance(exc, Untrusted) or num_tries == MAX_COMMAND_TRIES:
                    raise
            time.sleep(PAUSE_S)
        raise AssertionError("the last try returns or raises")

    def runs(self, states: Sequence[RunState] = (), last: int = 0) -> tuple[RunInfo, ...]:
        """Return Runs, oldest first.

        Args:
            states: Only Runs in these states; empty: in any.
            last: The number of the newest Runs to return; 0: all.
        """
        check_number("runs: last", last, MAX_TIMES)
        infos: list[RunInfo] = []
        query = RunQuery(states=tuple(states), newest_first=last > 0, limit=last)
        while True:
            request = to_proto(query, pb.ListRunsRequest)
            page = from_proto(ListedRuns, self._unary("ListRuns", request, pb.ListRunsReply))
            infos += page.runs
            if len(page.runs) >= page.num_runs or not page.runs or len(infos) == last:
                return tuple(reversed(infos) if last else infos)
            query = replace(query, after=infos[-1].run_id, limit=last - len(infos) if last else 0)

    def run(self, run_id: str) -> RunInfo:
        """Return one Run. Raises NotFound."""
        check_text("run: run_id", run_id)
        return from_proto(RunInfo, self._unary("GetRun", pb.GetRunRequest(run_id=run_id), pb.RunInfo))

    def describe(self, run_id: str, num_rounds: int = 10) -> RunDescription:
        """Return one Run with its active devices and its last Rounds, newest first. Raises NotFound."""
        check_text("describe: run_id", run_id)
        check_number("describe: num_rounds", num_rounds, MAX_TIMES)
        request = pb.DescribeRunRequest(run_id=run_id, rounds=num_rounds)
        return from_proto(RunDescription, self._unary("DescribeRun", request, pb.RunDescription))

    def prune(self, request: Prune) -> Pruned:
        """Remove what the retention of a Run does not keep, or return what would go. Raises NotFound, InvalidPlan."""
        check_type("prune: request", request, Prune)
        return from_proto(Pruned, self._unary("Prune", to_proto(request, pb.PruneRequest), pb.PruneReply))

    def accepted_devices(self, run_id: str, round_number: int) -> Iterator[str]:
        """Yield the devices whose Updates a Round accepted, in order of acceptance. Raises NotFound."""
        check_text("accepted_devices: run_id", run_id)
        check_number("accepted_devices: round_number", round_number, MAX_TIMES)
        return self._accepted_devices(run_id, round_number)

    def _accepted_devices(self, run_id: str, round_number: int) -> Iterator[str]:
        index = 0
        while True:
            request = pb.AcceptedDevicesRequest(run_id=run_id, round=round_number, from_index=index)
            reply = self._unary("AcceptedDevices", request, pb.AcceptedDevicesReply)
            page = from_proto(AcceptedDevices, reply)
            yield from page.device_ids
            index += len(page.device_ids)
            if index >= page.num_accepted or not page.device_ids:
                return

    def evaluations(self, run_id: str) -> Iterator[VersionEvaluation]:
        """Yield the evaluations of a Run's Versions on held-out data, oldest Version first. Raises NotFound."""
        check_text("evaluations: run_id", run_id)
        return self._evaluations(run_id)

    def _evaluations(self, run_id: str) -> Iterator[VersionEvaluation]:
        from_version = 0
        while True:
            request = pb.EvaluationsRequest(run_id=run_id, from_version=from_version)
            reply = self._unary("Evaluations", request, pb.EvaluationsReply)
            for evaluation in reply.evaluations:
                yield from_proto(VersionEvaluation, evaluation)
            if not reply.evaluations:
                return
            from_version = reply.evaluations[-1].version + 1

    def version(self, run_id: str, number: int | None = None) -> VersionWithBundle:
        """Return a Version with its Bundle, by default the newest. Raises NotFound."""
        check_text("version: run_id", run_id)
        if number is not None:
            check_number("version: number", number, MAX_NUMBER)
        request = pb.GetVersionRequest(run_id=run_id, number=number)
        return from_proto(VersionWithBundle, self._unary("GetVersion", request, pb.GetVersionReply))

    def parameters(self, version: Version) -> Float32s:
        """Download a Version's parameters (num_values,) and verify them against its digest."""
        return decode_parameters(self.parameter_bytes(version))[1]

    def parameter_bytes(self, version: Version) -> bytes:
        """Download a Version's canonical bytes and verify them. Raises NotFound, InvalidInput."""
        check_type("parameters: version", version, Version)
        return download(version, self.chunk, self._transfers)

    def watch(self, run_id: str, from_sequence: int = 0) -> Iterator[LoggedEvent]:
        """Yield the events of a Run, past and future, until it ends; reconnect after a broken connection.

        Args:
            run_id: The Run.
            from_sequence: Sequence number of the first event.
        """
        check_text("watch: run_id", run_id)
        check_number("watch: from_sequence", from_sequence, MAX_NUMBER)
        messages = self._stream(pb.WatchRequest(run_id=run_id, from_sequence=from_sequence))
        return (each for each in messages if isinstance(each, LoggedEvent))

    def watch_live(self, run_id: str) -> Iterator[LoggedEvent | LiveRound]:
        """Yield the events of a Run as ``watch`` does, and its Round under way: at first, and after each change."""
        check_text("watch_live: run_id", run_id)
        return self._stream(pb.WatchRequest(run_id=run_id, live=True))

    def _stream(self, request: pb.WatchRequest) -> Iterator[LoggedEvent | LiveRound]:
        has_begun, num_tries = False, 0
        while True:
            began_s = time.monotonic()
            try:
                for reply in self._connection.unary_stream(
                    f"{CONTROL}Watch", request.SerializeToString(), pb.WatchReply.FromString, self._endless
                ):
                    has_begun, num_tries = True, 0
                    message = from_proto(WatchReply, reply).what
                    if isinstance(message, LoggedEvent):
                        request.from_sequence = message.sequence + 1
                    yield message
                return
            except Unavailable as exc:
                if time.monotonic() - began_s > STEADY_S:
                    # The connection worked, without an event: the coordinator ends each connection after some hours.
                    has_begun, num_tries = True, 0
                num_tries += 1
                # Before the first event the address may be wrong, so that error is raised at once.
                if not has_begun or isinstance(exc, Untrusted) or num_tries >= MAX_WATCH_TRIES:
                    raise
            time.sleep(PAUSE_S)

    def chunk(self, sha256: str) -> bytes:
        """Download a Chunk; the caller verifies its digest. Raises NotFound."""
        check_text("chunk: sha256", sha256)
        request = fleet_pb2.DownloadRequest(sha256=sha256).SerializeToString()
        parse = fleet_pb2.DownloadPiece.FromString
        stream = self._connection.unary_stream(f"{CONTROL}GetChunk", request, parse, self._call)
        return b"".join(piece.data for piece in stream)

    def _put(self, pieces: Mapping[str, bytes]) -> None:
        request = pb.MissingChunksRequest(sha256=pieces)
        missing = {name: pieces[name] for name in self._unary("MissingChunks", request, pb.MissingChunksReply).sha256}
        if missing:
            with self._transfers("uploading", sum(map(len, missing.values()))) as advance:
                messages = chunk_messages(missing, advance)
                self._connection.stream_unary(f"{CONTROL}PutChunks", messages, pb.PutChunksReply.FromString, self._call)


def ref_of(signed: SignedManifest) -> BundleRef:
    """Return the reference to a Bundle on the wire."""
    return BundleRef(manifest=artifact_of(signed.data), public_key=signed.public_key, signature=signed.signature)


def _chunks(data: bytes) -> Iterable[tuple[str, bytes]]:
    return ((ref.sha256, piece) for ref, piece in cut(data))
