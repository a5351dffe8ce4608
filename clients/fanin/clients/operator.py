"""The operator's side of a coordinator: publish, start, look on. ``control.proto`` says what each call promises."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from fanin.clients.transport import CallOptions, Line
from fanin.edge.bundles.bundle import Bundle, SignedManifest
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.versions import sign_delegation, sign_version
from fanin.edge.tensors import Float32s, decode_parameters, encode_parameters
from fanin.protos import convert as c
from fanin.protos import convert_control as cr
from fanin.protos.calls import AUTHORIZATION, BEARER
from fanin.protos.chunks import artifact_of, assemble, cut
from fanin.protos.control import Command, LoggedEvent, RunDescription, RunInfo, StartRun, VersionWithBundle
from fanin.protos.errors import Unavailable, Untrusted
from fanin.protos.messages import BundleRef, Version
from fanin.protos.plans import Plan
from fanin.v1 import control_pb2 as pb
from fanin.v1 import fleet_pb2

CONTROL = "/fanin.v1.Control/"
CALL_S = 120.0
"""Publishing a Bundle verifies all of it; everything else takes milliseconds."""
MAX_COMMAND_TRIES: Final = 5
MAX_WATCH_TRIES: Final = 20
STEADY_S: Final = 60.0
"""A watch that lasted so long was connected: it does not count among the tries."""
PAUSE_S: Final = 0.5
"""20 pauses of half a second: a coordinator that was killed serves again within a few."""


class Operator:
    """Control over one coordinator. Every method raises FaninError and nothing else."""

    def __init__(self, line: Line, token: str) -> None:
        self._line = line
        metadata = ((AUTHORIZATION, f"{BEARER}{token}"),)
        credential = "an operator's token that was made there (--token-file)"
        self._call = CallOptions(metadata=metadata, timeout_s=CALL_S, credential=credential)
        self._endless = CallOptions(metadata=metadata, credential=credential)

    def publish_bundle(self, bundle: Bundle) -> str:
        """Send what the coordinator lacks of a Bundle and make it known; its digest."""
        pieces = dict(_chunks(bundle.signed.data))
        for name in bundle.manifest.artifacts:
            pieces |= dict(_chunks(bundle.artifact(name)))
        self._put(pieces)
        request = pb.PublishBundleRequest(bundle=c.bundle_to_proto(ref_of(bundle.signed)))
        reply = self._line.unary(
            f"{CONTROL}PublishBundle", request.SerializeToString(), pb.PublishBundleReply.FromString, self._call
        )
        return reply.bundle_sha256

    def start_run(self, run_id: str, plan: Plan, bundle: Bundle, publisher: SigningKey) -> RunInfo:
        """Start a Run of a published Bundle from its initial parameters; the Bundle's publisher signs both the
        Version and the delegation to the coordinator's key for this Run."""
        request = pb.PrepareRunRequest(run_id=run_id).SerializeToString()
        prepared = self._line.unary(f"{CONTROL}PrepareRun", request, pb.PrepareRunReply.FromString, self._call)
        start = StartRun(
            run_id=run_id,
            plan=plan,
            version=sign_version(
                publisher,
                parent=None,
                run_id=run_id,
                bundle_sha256=bundle.sha256,
                parameters=bundle.manifest.artifacts[bundle.manifest.initial],
            ),
            delegation=sign_delegation(
                publisher,
                run_id=run_id,
                bundle_sha256=bundle.sha256,
                run_public_key=prepared.run_public_key.hex(),
            ),
        )
        started = cr.start_run_to_proto(start).SerializeToString()
        return cr.run_info_from_proto(
            self._line.unary(f"{CONTROL}StartRun", started, pb.RunInfo.FromString, self._call)
        )

    def publish_version(self, version: Version, data: bytes, num_rounds: int) -> RunInfo:
        """Send canonical parameter bytes and publish the Version that names them; run some Rounds from it."""
        self._put(dict(_chunks(data)))
        request = pb.PublishVersionRequest(version=c.version_to_proto(version), rounds=num_rounds)
        return cr.run_info_from_proto(
            self._line.unary(f"{CONTROL}PublishVersion", request.SerializeToString(), pb.RunInfo.FromString, self._call)
        )

    def command(self, command: Command) -> RunInfo:
        """Pause, resume or stop a Run, or make another Version its newest. A line that breaks is tried again: the
        command's id lets it be carried out only once. Raises Conflict, NotFound."""
        request = cr.command_to_proto(command).SerializeToString()
        for num_tries in range(1, MAX_COMMAND_TRIES + 1):
            try:
                reply = self._line.unary(f"{CONTROL}Command", request, pb.RunInfo.FromString, self._call)
                return cr.run_info_from_proto(reply)
            except Unavailable as exc:
                if isinstance(exc, Untrusted) or num_tries == MAX_COMMAND_TRIES:
                    raise
            time.sleep(PAUSE_S)
        raise AssertionError("the last try returns or raises")

    def runs(self) -> tuple[RunInfo, ...]:
        """All Runs."""
        request = pb.ListRunsRequest().SerializeToString()
        reply = self._line.unary(f"{CONTROL}ListRuns", request, pb.ListRunsReply.FromString, self._call)
        return tuple(cr.run_info_from_proto(run) for run in reply.runs)

    def run(self, run_id: str) -> RunInfo:
        """One Run. Raises NotFound."""
        request = pb.GetRunRequest(run_id=run_id).SerializeToString()
        return cr.run_info_from_proto(self._line.unary(f"{CONTROL}GetRun", request, pb.RunInfo.FromString, self._call))

    def describe(self, run_id: str, num_rounds: int = 10) -> RunDescription:
        """One Run with its last Rounds, newest first, and who is at work in it. Raises NotFound."""
        request = pb.DescribeRunRequest(run_id=run_id, rounds=num_rounds).SerializeToString()
        return cr.description_from_proto(
            self._line.unary(f"{CONTROL}DescribeRun", request, pb.RunDescription.FromString, self._call)
        )

    def accepted_devices(self, run_id: str, round_number: int) -> Iterator[str]:
        """The devices whose Updates a Round accepted, in the order of acceptance. Raises NotFound."""
        index = 0
        while True:
            request = pb.AcceptedDevicesRequest(run_id=run_id, round=round_number, from_index=index)
            reply = self._line.unary(
                f"{CONTROL}AcceptedDevices",
                request.SerializeToString(),
                pb.AcceptedDevicesReply.FromString,
                self._call,
            )
            page = cr.accepted_devices_from_proto(reply)
            yield from page.device_ids
            index += len(page.device_ids)
            if index >= page.num_accepted or not page.device_ids:
                return

    def version(self, run_id: str, number: int | None = None) -> VersionWithBundle:
        """A Version with its Bundle, by default the newest. Raises NotFound."""
        request = pb.GetVersionRequest(run_id=run_id, number=number).SerializeToString()
        return cr.version_with_bundle_from_proto(
            self._line.unary(f"{CONTROL}GetVersion", request, pb.GetVersionReply.FromString, self._call)
        )

    def parameters(self, version: Version) -> Float32s:
        """A Version's parameters (num_values,), verified against its digest."""
        return decode_parameters(self.parameter_bytes(version))[1]

    def parameter_bytes(self, version: Version) -> bytes:
        """A Version's canonical bytes, verified against its digest. Raises NotFound, InvalidInput."""
        return assemble(f"version {version.number} of run {version.run_id}", version.parameters, self.chunk)

    def watch(self, run_id: str, from_sequence: int = 0) -> Iterator[LoggedEvent]:
        """What happened and happens in a Run, until it has ended; a line that breaks is taken up again."""
        has_begun, num_tries = False, 0
        while True:
            request = pb.WatchRequest(run_id=run_id, from_sequence=from_sequence).SerializeToString()
            began_s = time.monotonic()
            try:
                for event in self._line.unary_stream(f"{CONTROL}Watch", request, pb.Event.FromString, self._endless):
                    has_begun, num_tries, from_sequence = True, 0, event.sequence + 1
                    yield cr.event_from_proto(event)
                return
            except Unavailable as exc:
                if time.monotonic() - began_s > STEADY_S:
                    # It worked, though nothing happened: the coordinator ends each connection after some hours.
                    has_begun, num_tries = True, 0
                num_tries += 1
                # Where nothing has come yet, the address may be wrong: that is told at once.
                if not has_begun or isinstance(exc, Untrusted) or num_tries >= MAX_WATCH_TRIES:
                    raise
            time.sleep(PAUSE_S)

    def chunk(self, sha256: str) -> bytes:
        """A Chunk's bytes; the caller verifies them. Raises NotFound."""
        request = fleet_pb2.DownloadRequest(sha256=sha256).SerializeToString()
        parse = fleet_pb2.DownloadPiece.FromString
        stream = self._line.unary_stream(f"{CONTROL}GetChunk", request, parse, self._call)
        return b"".join(piece.data for piece in stream)

    def _put(self, pieces: Mapping[str, bytes]) -> None:
        asked = pb.MissingChunksRequest(sha256=pieces).SerializeToString()
        missing = self._line.unary(
            f"{CONTROL}MissingChunks", asked, pb.MissingChunksReply.FromString, self._call
        ).sha256
        if missing:
            requests = (pb.ChunkData(sha256=name, data=pieces[name]).SerializeToString() for name in missing)
            self._line.stream_unary(f"{CONTROL}PutChunks", requests, pb.PutChunksReply.FromString, self._call)


def ref_of(signed: SignedManifest) -> BundleRef:
    """How a Bundle is named on the wire."""
    return BundleRef(manifest=artifact_of(signed.data), public_key=signed.public_key, signature=signed.signature)


def next_version(parent: Version, flat: Float32s, bundle: Bundle, publisher: SigningKey) -> tuple[Version, bytes]:
    """The Version after ``parent`` with these parameters (num_values,), signed by the publisher, and its bytes."""
    data = encode_parameters(bundle.manifest.table, flat)
    version = sign_version(
        publisher,
        parent=parent,
        run_id=parent.run_id,
        bundle_sha256=bundle.sha256,
        parameters=artifact_of(data),
    )
    return version, data


def _chunks(data: bytes) -> Iterable[tuple[str, bytes]]:
    return ((ref.sha256, piece) for ref, piece in cut(data))
