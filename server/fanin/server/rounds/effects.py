"""A Round's effects, carried out: from committed payloads to a recorded Version.

Each method may be repeated after any failure and after a restart, and then ends in the same bits: the sum is a
cache that is rebuilt from the set, blobs are named by content, and the store changes in one transaction. Stored data
that does not verify raises Damaged.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.bundles.versions import sign_version
from fanin.edge.tensors import Float32s, TensorTable, decode_parameters
from fanin.protos import messages as m
from fanin.protos.chunks import Artifact, short
from fanin.protos.control import StartRun, VersionPublished
from fanin.protos.convert import header_to_proto
from fanin.protos.errors import Corrupted, FaninError, InvalidInput, NotFound
from fanin.protos.plans import Plan
from fanin.server.aggregation import fold as aggregation
from fanin.server.aggregation.folding import Lag, Outcome, OuterStep, contribution_of, lag_of
from fanin.server.observe.observer import Observer
from fanin.server.rounds.recent import Made, RecentRounds
from fanin.server.rounds.troubles import Damaged
from fanin.server.runs.stopping import evaluation_of, runtimes_of, train_loss_of
from fanin.server.storage.blobs import Blobs
from fanin.server.storage.commits import GroupCommit
from fanin.server.storage.lanes import Lane
from fanin.server.storage.spool import Spool
from fanin.server.storage.sqlite.commands import ControlStore
from fanin.server.storage.sqlite.devices import DeviceStore
from fanin.server.storage.sqlite.rounds import RoundRecord, RoundStore
from fanin.server.storage.sqlite.runs import RunStore

T = TypeVar("T")


async def whole(work: Awaitable[T]) -> T:
    """Work that a caller who hangs up cannot cut in two: a commit's row and its event go together.

    However often the caller is cancelled meanwhile, it is let go when the work has ended, and not before.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        # What the work raised, if it did, has nobody to go to: the caller is gone.
        task.exception()
        raise asyncio.CancelledError
    return task.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What the coordinator works with. The store is used from its lane only, one transaction at a time."""

    devices: DeviceStore
    runs: RunStore
    rounds: RoundStore
    commits: GroupCommit
    control: ControlStore
    blobs: Blobs
    spool: Spool
    store_lane: Lane
    disk_lane: Lane
    wall: Callable[[], float]
    observer: Observer


@dataclass(frozen=True, kw_only=True)
class Model:
    """The Bundle of a Run, as far as the coordinator needs it."""

    bundle: m.BundleRef
    manifest: Manifest
    run_key: SigningKey

    @property
    def table(self) -> TensorTable:
        """The layout of the parameters."""
        return self.manifest.table

    @cached_property
    def chunks(self) -> frozenset[str]:
        """The digests of all Chunks of the Bundle."""
        artifacts = (self.bundle.manifest, *self.manifest.artifacts.values())
        return frozenset(ref.sha256 for artifact in artifacts for ref in artifact.chunks)

    @cached_property
    def graph_formats(self) -> tuple[str, ...]:
        """The formats in which every graph that a device needs is there."""
        formats = [set(found.graphs) for found in self.manifest.signatures.values()]
        return tuple(sorted(set.intersection(*formats)))

    def download_bytes(self, graph_formats: Collection[str]) -> int:
        """What a device fetches at first: the graphs in its formats, and a Version's parameters."""
        signatures = self.manifest.signatures.values()
        names = {found.graphs[one] for found in signatures for one in graph_formats if one in found.graphs}
        return sum(self.manifest.artifacts[name].size_bytes for name in {*names, self.manifest.initial})


class RoundWork:
    """Carries out the effects of one Round; ``recent`` knows the Rounds that its Updates were made for."""

    def __init__(self, made: Made, recent: RecentRounds, start: StartRun, model: Model, tools: Tools) -> None:
        self.record = made.record
        self.base = made.base
        self._recent = recent
        self._start = start
        self._model = model
        self._tools = tools
        self._headers: dict[str, m.UpdateHeader] = {}
        self._resumed_bytes = 0
        self._sum = aggregation.begin(model.table)
        self._summed: set[str] = set()
        self._outcome: tuple[Outcome, Artifact] | None = None

    @property
    def plan(self) -> Plan:
        """The Run's Plan."""
        return self._start.plan

    def add_committed(self, device: str, header: m.UpdateHeader, resumed_bytes: int = 0) -> None:
        """Remember the header of a committed Update, and how much of it had come before its upload was cut."""
        self._headers[device] = header
        self._resumed_bytes += resumed_bytes

    async def accumulate(self, device: str) -> None:
        """Add one committed Update to the sum, right after its commit, while its bytes are in memory."""
        await self._tools.disk_lane(lambda: self._accumulate(device))

    async def close(self) -> RoundRecord:
        """Durably name the set, or the failure, if there is no quorum; the record as it is then."""
        tools, record, cohort = self._tools, self.record, self.plan.cohort
        closed = await tools.store_lane(
            lambda: tools.rounds.close(record.run_id, record.round, cohort=cohort, now_s=tools.wall())
        )
        for update in await tools.store_lane(lambda: tools.rounds.updates(record.run_id, record.round)):
            self.add_committed(update.device_id, update.header)
        return closed

    async def fold(self, accepted: tuple[str, ...]) -> None:
        """The outer step over exactly this set; the new parameters are stored as blobs."""
        self._outcome = await self._tools.disk_lane(lambda: self._fold(accepted))

    async def publish(self) -> RoundRecord:
        """Sign and record the Version; the record as it is then."""
        assert self._outcome is not None, "publish comes after fold"
        outcome, parameters = self._outcome
        record, tools = self.record, self._tools
        version = sign_version(
            self._model.run_key,
            parent=self.base,
            run_id=record.run_id,
            bundle_sha256=self._model.bundle.manifest.sha256,
            parameters=parameters,
        )
        version = replace(version, delegation=self._start.delegation)
        now_s = tools.wall()
        event = VersionPublished(
            number=version.number,
            version_sha256=version.sha256,
            parent=version.parent,
            round=record.round,
            round_s=now_s - record.opened_at_s,
            bytes_down=sum(header.telemetry.bytes_downloaded for header in self._headers.values()),
            bytes_up=sum(_wire_bytes(header) for header in self._headers.values()),
            bytes_down_resumed=sum(header.telemetry.bytes_resumed for header in self._headers.values()),
            bytes_up_resumed=self._resumed_bytes,
            num_saturated=outcome.counts.get(m.SATURATED, 0),
            num_rounded=outcome.counts.get(m.ROUNDED, 0),
            num_stale=sum(self._lag(header).staleness > 0 for header in self._headers.values()),
            train_loss=train_loss_of(outcome.counts),
            total_examples=outcome.counts.get(m.EXAMPLES, 0),
            evaluation=evaluation_of(outcome.counts, self._model.manifest.num_classes),
            runtimes=runtimes_of(header.telemetry.runtime for header in self._headers.values()),
        )
        return await tools.store_lane(
            lambda: tools.rounds.publish(version, event, next_grid=outcome.next_grid, now_s=now_s)
        )

    async def fail(self, reason: str) -> RoundRecord:
        """Record the failure of the Round, unless it has ended; the record as it is then."""
        tools, record = self._tools, self.record
        return await tools.store_lane(
            lambda: tools.rounds.fail(record.run_id, record.round, reason=reason, now_s=tools.wall())
        )

    def _accumulate(self, device: str) -> None:
        if device in self._summed:
            return
        header = self._headers[device]
        payload = self._tools.spool.read(header, device)
        try:
            update = contribution_of(header, payload, self.plan, self._lag(header))
            self._sum = aggregation.accept(self._sum, self._model.table, update)
        except BaseException as exc:
            # Half an Update may be in the sum: begin again, ``fold`` will add what is missing.
            self._sum, self._summed = aggregation.begin(self._model.table), set()
            if isinstance(exc, FaninError | ValueError):
                raise Damaged(f"the update of device {device} is damaged on the coordinator's disk") from exc
            raise
        self._summed.add(device)

    def _lag(self, header: m.UpdateHeader) -> Lag:
        made_for = self._recent.get(header.round)
        assert made_for is not None, "an update is accepted only for a round that is remembered"
        return lag_of(made_for.record, self.record)

    def _fold(self, accepted: tuple[str, ...]) -> tuple[Outcome, Artifact]:
        for device in accepted:
            self._accumulate(device)
        assert self._summed == set(accepted), f"sum over {self._summed}, expected {accepted}"
        blobs, table = self._tools.blobs, self._model.table
        # Piece by piece: beside the sum, a model of 2 GB costs no more than a small one.
        step = OuterStep(self._sum, table, self.record.grid, self.plan)
        try:
            parameters = blobs.put_pieces(encoded(table, step.pieces(parameter_pieces(blobs, self.base, table))))
        except (Corrupted, NotFound) as exc:
            raise Damaged(f"version {self.base.number} is damaged on the coordinator's disk") from exc
        return step.outcome(), parameters


def encoded(table: TensorTable, pieces: Iterable[Float32s]) -> Iterator[bytes]:
    """Canonical bytes, in pieces."""
    yield table.header()
    for piece in pieces:
        yield piece.astype("<f4", copy=False).tobytes()


def parameter_pieces(blobs: Blobs, version: m.Version, table: TensorTable) -> Iterator[Float32s]:
    """The parameters of a Version in consecutive pieces, verified. Raises NotFound, Corrupted."""
    what = f"version {version.number} of run {version.run_id}"
    header, held = table.header(), b""
    num_left = len(header)
    for chunk in blobs.pieces(what, version.parameters):
        held += chunk
        if num_left:
            if len(held) < num_left:
                continue
            if held[:num_left] != header:
                raise Corrupted(f"{what}: names or shapes differ from bundle {short(version.bundle_sha256)}")
            held, num_left = held[num_left:], 0
        whole = len(held) // 4 * 4
        yield np.frombuffer(held, "<f4", count=whole // 4)
        held = held[whole:]


def load_parameters(blobs: Blobs, version: m.Version, table: TensorTable) -> Float32s:
    """The parameters (num_values,) of a Version. Raises NotFound, Corrupted."""
    what = f"version {version.number} of run {version.run_id}"
    try:
        found, flat = decode_parameters(blobs.read_artifact(what, version.parameters))
    except InvalidInput as exc:
        raise Corrupted(f"{what}: {exc}") from exc
    if found != table:
        raise Corrupted(f"{what}: names or shapes differ from bundle {short(version.bundle_sha256)}")
    return flat


def _wire_bytes(header: m.UpdateHeader) -> int:
    return header.payload.size_bytes + header_to_proto(header).ByteSize()
