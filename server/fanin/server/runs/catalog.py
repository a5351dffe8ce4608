"""The coordinator towards operators: Bundles, Runs, Versions and what happens in them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from functools import partial

import numpy as np

from fanin.edge.bundles.bundle import MAX_MANIFEST_BYTES, Bundle, SignedManifest
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.bundles.versions import check_delegation, check_version
from fanin.edge.runtimes.graphs import PROXIMAL_WEIGHT, control_ports
from fanin.edge.tensors import TensorTable, decode_parameters
from fanin.protos.chunks import Artifact, assemble, short
from fanin.protos.control import (
    AcceptedDevices,
    Command,
    LoggedEvent,
    RunDescription,
    RunInfo,
    RunState,
    StartRun,
    Stop,
    VersionWithBundle,
)
from fanin.protos.errors import (
    Conflict,
    Corrupted,
    FaninError,
    InvalidBundle,
    InvalidInput,
    InvalidPlan,
    InvalidVersion,
    NotFound,
)
from fanin.protos.messages import BundleRef, Version
from fanin.protos.names import check_run_id
from fanin.server.rounds.effects import Model, Tools, whole
from fanin.server.rounds.troubles import reason_of
from fanin.server.runs.commands import RunControl, run_info
from fanin.server.runs.describe import describe
from fanin.server.runs.driver import RunDriver
from fanin.server.storage.sqlite.runs import RunRecord

LOG = logging.getLogger("fanin.server.runs.catalog")


class Runs:
    """All Runs of a coordinator: what the Control service does."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._drivers: dict[str, RunDriver] = {}
        self._controls: dict[str, RunControl] = {}
        # By id, why a Run could not be taken up.
        self._broken: dict[str, str] = {}
        self._starting = asyncio.Lock()
        self.on_change: Callable[[], None] = _nothing

    async def start(self) -> None:
        """Take up all Runs of the store."""
        tools = self._tools
        # Before any driver writes.
        await tools.disk_lane(tools.blobs.sweep)
        for record in await tools.store_lane(tools.runs.runs):
            # One damaged Run must not keep the others from being served.
            with suppress(Conflict):
                await self._drive(record)
        recent = [one for driver in self._drivers.values() for one in driver.recent_rounds]
        for run_id in self._broken:
            # Its devices go on with their uploads when it is taken up.
            kept = await tools.store_lane(partial(tools.rounds.last, run_id))
            recent += [] if kept is None else [(run_id, kept.round)]
        await tools.disk_lane(lambda: tools.spool.sweep(recent))

    async def stop(self) -> None:
        """Stop all drivers."""
        for driver in tuple(self._drivers.values()):
            await driver.stop()

    def running(self) -> tuple[RunDriver, ...]:
        """The Runs that open Rounds, oldest first."""
        return tuple(driver for driver in self._drivers.values() if driver.run.state is RunState.RUNNING)

    def drivers(self) -> tuple[RunDriver, ...]:
        """All Runs, oldest first."""
        return tuple(self._drivers.values())

    def find(self, run_id: str) -> RunDriver | None:
        """The driver of a Run, None if there is none."""
        return self._drivers.get(run_id)

    def driver(self, run_id: str) -> RunDriver:
        """The driver of a Run. Raises NotFound, Conflict for a Run that could not be taken up."""
        driver = self._drivers.get(run_id)
        if run_id in self._broken:
            raise Conflict(self._broken[run_id])
        if driver is None:
            raise NotFound(f"run {run_id[:64]!r}: there is none of this id here")
        return driver

    async def missing_chunks(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Those Chunks that are not stored here, or are damaged."""
        tools, asked = self._tools, tuple(digests)
        return await tools.disk_lane(lambda: tools.blobs.missing(asked))

    async def put_chunk(self, sha256: str, data: bytes) -> None:
        """Store a Chunk. Raises InvalidInput, StorageFull."""
        await self._tools.disk_lane(lambda: self._tools.blobs.put(sha256, data))

    async def get_chunk(self, sha256: str, offset: int) -> bytes:
        """A Chunk from an offset on. Raises NotFound."""
        return await self._tools.disk_lane(lambda: self._tools.blobs.read(sha256, offset))

    async def publish_bundle(self, bundle: BundleRef) -> str:
        """Make a Bundle known, verified as a device would.

        Raises InvalidBundle, NotFound for missing Chunks, Corrupted for damaged ones, Conflict if it is known under
        another publisher's key.
        """
        tools, sha256 = self._tools, bundle.manifest.sha256
        await tools.disk_lane(lambda: self._verify_bundle(bundle))
        await tools.store_lane(lambda: tools.runs.add_bundle(bundle))
        known = await tools.store_lane(lambda: tools.runs.bundle(sha256))
        if known is not None and known.public_key != bundle.public_key:
            raise Conflict(
                f"bundle {short(sha256)}: signed by {short(bundle.public_key)}, but it is published here by "
                f"{short(known.public_key)}; start runs with that key, or export the bundle again"
            )
        return sha256

    async def prepare_run(self, run_id: str) -> str:
        """The public key that will sign a Run's Versions."""
        check_run_id(run_id)
        return (await self._run_key(run_id)).public

    async def start_run(self, start: StartRun) -> RunInfo:
        """Start a Run. Raises InvalidInput, NotFound, Conflict for an id that another Run has."""
        check_run_id(start.run_id)
        # Whole: an operator who hangs up must not leave a Run that is recorded but not driven.
        await whole(self._start_run(start))
        return await self.info(start.run_id)

    async def _start_run(self, start: StartRun) -> None:
        async with self._starting:
            record = await self._record(start)
            # LoggedEvent but not driven: an earlier try ended on a full disk in between.
            if start.run_id not in self._drivers:
                await self._drive(record)
                self.on_change()

    async def publish_version(self, version: Version, num_rounds: int) -> RunInfo:
        """Add a Version from outside and run some Rounds from it. Raises InvalidVersion, Conflict, NotFound."""
        driver = self.driver(version.run_id)
        self._verify_version(version, driver.model)
        await self._check_parameters(version.parameters, driver.model.table)
        await self._controls[version.run_id].publish(version, num_rounds)
        return await self.info(version.run_id)

    async def command(self, command: Command) -> RunInfo:
        """Carry out an operator's command, once. Raises NotFound, Conflict.

        A Run that could not be taken up is tried again first. If that fails too it can still be stopped.
        """
        run_id, tools = command.run_id, self._tools
        if run_id in self._broken:
            with suppress(Conflict):
                await whole(self._take_up(run_id))
        if run_id in self._broken and isinstance(command.what, Stop):
            await tools.store_lane(lambda: tools.control.stop(command, tools.wall(), is_stuck=True))
        else:
            self.driver(run_id)
            await self._controls[run_id].command(command)
        return await self.info(run_id)

    async def info(self, run_id: str) -> RunInfo:
        """Where a Run stands, also one that could not be taken up. Raises NotFound."""
        if run_id in self._broken:
            record = await self._tools.store_lane(lambda: self._tools.runs.run(run_id))
            assert record is not None, "only a recorded run is taken up"
            return await run_info(record, self._broken[run_id], self._tools)
        self.driver(run_id)
        return await self._controls[run_id].info()

    async def describe(self, run_id: str, num_rounds: int) -> RunDescription:
        """A Run with its last Rounds and who is at work. Raises NotFound."""
        return await describe(self.driver(run_id), await self.info(run_id), num_rounds, self._tools)

    async def infos(self) -> tuple[RunInfo, ...]:
        """Where all Runs stand."""
        return tuple([await self.info(run_id) for run_id in (*self._controls, *self._broken)])

    async def version(self, run_id: str, number: int | None) -> VersionWithBundle:
        """A Version with its Bundle. Raises NotFound."""
        driver = self.driver(run_id)
        found = await self._tools.store_lane(lambda: self._tools.runs.version(run_id, number))
        if found is None:
            raise NotFound(f"run {run_id}: has no version {number}")
        return VersionWithBundle(version=found, bundle=driver.model.bundle)

    async def watch(self, run_id: str, from_sequence: int) -> AsyncGenerator[LoggedEvent, None]:
        """What happened in a Run from a sequence number on, then what happens, until it has ended. Raises NotFound."""
        driver = self.driver(run_id)
        sequence = from_sequence
        while True:
            changed = driver.course.changed
            while page := await self._event_page(run_id, sequence):
                for recorded in page:
                    sequence = recorded.sequence + 1
                    yield recorded
            if not driver.run.state.is_live and driver.is_idle and driver.course.changed is changed:
                return
            await changed.wait()

    async def accepted_devices(self, run_id: str, round_number: int, from_index: int) -> AcceptedDevices:
        """A page of the devices whose Updates a Round accepted, in the order of acceptance. Raises NotFound."""
        self.driver(run_id)
        tools = self._tools
        page = await tools.store_lane(lambda: tools.runs.accepted_devices(run_id, round_number, from_index))
        if page is None:
            raise NotFound(f"run {run_id}: has no round {round_number}")
        return page

    async def _event_page(self, run_id: str, from_sequence: int) -> tuple[LoggedEvent, ...]:
        tools = self._tools
        return await tools.store_lane(lambda: tools.runs.event_page(run_id, from_sequence))

    async def _record(self, start: StartRun) -> RunRecord:
        """The record of a Run, added if this is the first time that it is asked for. Raises Conflict."""
        tools = self._tools
        known = await tools.store_lane(lambda: tools.runs.run(start.run_id))
        if known is None:
            await self._check_first(start, await self._model(start))
            await tools.store_lane(lambda: tools.runs.add_run(start, tools.wall()))
            known = await tools.store_lane(lambda: tools.runs.run(start.run_id))
            assert known is not None, "the run was just added"
        elif known.start != start:
            raise Conflict(f"run {start.run_id}: the id is taken by another run; choose another")
        return known

    async def _take_up(self, run_id: str) -> None:
        async with self._starting:
            record = await self._tools.store_lane(lambda: self._tools.runs.run(run_id))
            if record is not None and run_id in self._broken:
                await self._drive(record)
                self.on_change()

    async def _drive(self, record: RunRecord) -> None:
        """Take up a Run. Raises Conflict, and notes why, if that is impossible now."""
        run_id = record.start.run_id
        try:
            driver = RunDriver(record, await self._model(record.start), self._tools, lambda: self.on_change())
            try:
                await driver.start()
            except BaseException:
                await driver.stop()
                raise
        except Exception as exc:  # Whatever it is: devices and operators are told, without what is in it.
            self._broken[run_id] = f"run {run_id}: cannot be taken up: {reason_of(exc)}"
            LOG.error("run %s: cannot be taken up: %s", run_id, exc, exc_info=not isinstance(exc, FaninError))
            raise Conflict(self._broken[run_id]) from exc
        self._drivers[run_id] = driver
        self._controls[run_id] = RunControl(driver, self._tools)
        self._broken.pop(run_id, None)

    async def _model(self, start: StartRun) -> Model:
        tools, sha256 = self._tools, start.version.bundle_sha256
        bundle = await tools.store_lane(lambda: tools.runs.bundle(sha256))
        if bundle is None:
            raise NotFound(f"bundle {short(sha256)}: not published here; publish it before starting a run")
        try:
            manifest = (await tools.disk_lane(lambda: self._open(bundle))).manifest
        except InvalidInput as exc:
            # It was verified when it was published.
            raise Corrupted(f"bundle {short(sha256)}: its record does not verify ({exc}); restore a backup") from exc
        return Model(bundle=bundle, manifest=manifest, run_key=await self._run_key(start.run_id))

    async def _run_key(self, run_id: str) -> SigningKey:
        fresh = SigningKey.generate().private_bytes()
        return SigningKey(await self._tools.store_lane(lambda: self._tools.runs.run_key(run_id, fresh)))

    async def _check_first(self, start: StartRun, model: Model) -> None:
        if start.version.number != 0:
            raise InvalidVersion(f"run {start.run_id}: got version {start.version.number} to start from, expected 0")
        self._verify_version(start.version, model)
        delegation = start.delegation
        if (
            delegation.run_id != start.run_id
            or delegation.bundle_sha256 != model.bundle.manifest.sha256
            or delegation.run_public_key != model.run_key.public
        ):
            raise InvalidVersion(
                f"run {start.run_id}: the delegation is for run {delegation.run_id}, bundle "
                f"{short(delegation.bundle_sha256)} and key {short(delegation.run_public_key)}, expected this run, "
                f"bundle {short(model.bundle.manifest.sha256)} and key {short(model.run_key.public)}"
            )
        check_delegation(delegation, model.bundle.public_key)
        _check_plan(start, model.manifest)
        await self._check_parameters(start.version.parameters, model.table)

    def _verify_version(self, version: Version, model: Model) -> None:
        bundle = model.bundle
        check_version(
            version,
            run_id=version.run_id,
            bundle_sha256=bundle.manifest.sha256,
            publisher=bundle.public_key,
            seen=-1,
        )

    async def _check_parameters(self, artifact: Artifact, table: TensorTable) -> None:
        tools = self._tools
        try:
            # Not blobs.read_artifact: Chunks that do not make this whole are its caller's mistake, not our damage.
            data = await tools.disk_lane(lambda: assemble("parameters", artifact, tools.blobs.read))
            found, flat = decode_parameters(data)
        except InvalidInput as exc:
            raise InvalidVersion(str(exc)) from exc
        if found != table:
            raise InvalidVersion("parameters: names or shapes differ from the bundle's")
        if not np.isfinite(flat).all():
            raise InvalidVersion("parameters: got NaN or infinity, expected finite values; the training diverged")

    def _open(self, bundle: BundleRef) -> Bundle:
        """A Bundle, verified. Raises InvalidBundle, NotFound for a missing Chunk, Corrupted for a damaged one."""
        if bundle.manifest.size_bytes > MAX_MANIFEST_BYTES:
            raise InvalidBundle(
                f"bundle: got a manifest of {bundle.manifest.size_bytes} bytes, expected at most {MAX_MANIFEST_BYTES}"
            )
        read = self._tools.blobs.read
        try:
            # Not blobs.read_artifact: Chunks that do not make this whole are its caller's mistake, not our damage.
            data = assemble("manifest", bundle.manifest, read)
        except InvalidInput as exc:
            raise InvalidBundle(f"bundle: {exc}") from exc
        signed = SignedManifest(data=data, public_key=bundle.public_key, signature=bundle.signature)
        return Bundle.open(signed, trusted=(bundle.public_key,), read=read)

    def _verify_bundle(self, ref: BundleRef) -> None:
        bundle = self._open(ref)
        for name in bundle.manifest.artifacts:
            bundle.artifact(name)
        bundle.initial_parameters()


def _check_plan(start: StartRun, manifest: Manifest) -> None:
    """Raise InvalidPlan for what a Plan wants and the Bundle's graphs were not made for."""
    training, given = start.plan.training, {port.name for port in manifest.signatures["train"].inputs}
    if training.proximal_weight > 0.0 and PROXIMAL_WEIGHT not in given:
        raise InvalidPlan(
            f"run {start.run_id}: got proximal_weight {training.proximal_weight:g}, but the bundle's train graph has "
            "no such input; export the App with Recipe(proximal=True)"
        )
    if controls := control_ports(manifest.table, manifest.signatures["train"].inputs):
        raise InvalidPlan(
            f"run {start.run_id}: the bundle's train graph has the input {controls[0]!r}, expected none of that kind: "
            "no device sets SCAFFOLD's control variates, so it would train without them; export the App again"
        )
    if training.batch_size not in (0, manifest.batch_size):
        raise InvalidPlan(
            f"run {start.run_id}: got [training] batch_size {training.batch_size}, but the bundle's graphs are for "
            f"{manifest.batch_size}; export the App with App(batch_size={training.batch_size}), or leave it out"
        )


def _nothing() -> None:
    """Until a coordinator listens."""
