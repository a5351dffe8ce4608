"""All Runs of a coordinator, for its operators: Bundles, Runs, Versions, commands and events.

``service`` maps each call of the Control service to one method of ``Runs``. The coordinator's device side (``fleet``)
reaches the Runs through their drivers (``driving``).
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from functools import partial

from fanin.protos.chunks import short
from fanin.protos.errors import Conflict, Corrupted, InvalidVersion, NotFound
from fanin.protos.messages import (
    FIRST_EPOCH,
    AcceptedDevices,
    Adopt,
    BundleRef,
    Command,
    ListedRuns,
    LoggedEvent,
    Principal,
    Reclaim,
    RunDescription,
    RunInfo,
    RunQuery,
    StartRun,
    Stop,
    Version,
    VersionEvaluation,
    VersionPublished,
    VersionWithBundle,
)
from fanin.protos.names import check_run_id
from fanin.protos.plans import Plan
from fanin.server.rounds.charging import check_budget
from fanin.server.rounds.setup import RunSetup
from fanin.server.rounds.troubles import RepeatedTroubles
from fanin.server.rounds.worker import Observer
from fanin.server.runs.admission import (
    check_bundle,
    check_outside,
    check_parameters,
    check_permission,
    check_start,
)
from fanin.server.runs.describe import damaged_description, damaged_info, describe, page_of_ids, run_info
from fanin.server.runs.driving.driver import RunDriver
from fanin.server.runs.driving.drivers import Drivers, unknown_run
from fanin.server.runs.driving.intake import Parked
from fanin.server.runs.driving.participants import check_tags_are_known
from fanin.server.runs.populations import Populations
from fanin.server.runs.publications import FOLLOW_S, Publications
from fanin.server.runs.recorded_setup import (
    Parts,
    check_parts,
    check_strategy,
    check_sum,
    recorded_bundle,
    run_key_of,
    setup_of,
    taken_id,
)
from fanin.server.runs.view import RunView, read_view
from fanin.server.storage.decisions import check_next
from fanin.server.storage.lanes import run_to_end
from fanin.server.storage.retention import check_has_devices, check_has_parameters
from fanin.server.storage.stores import Files, Stores


class Runs:
    """The Runs of one coordinator.

    Args:
        stores: The record.
        files: Blobs and spool.
        observer: Sees each effect of each Run.
        parts: The parts that Plans may name, in addition to the installed ones.

    Attributes:
        drivers: The drivers of the Runs.
        populations: The populations whose privacy budgets Runs share.
    """

    def __init__(self, stores: Stores, files: Files, observer: Observer, parts: Parts | None = None) -> None:
        self._stores, self._files, self._parts = stores, files, parts or Parts()
        self.drivers = Drivers(stores, files, observer, self._parts)
        self.populations = Populations(stores, files, self.drivers)

    @property
    def troubles(self) -> RepeatedTroubles:
        """Failures of work for the Runs, which operators read with them."""
        return self.drivers.troubles

    @property
    def parked(self) -> dict[str, Parked]:
        """The check-ins that wait for work, by device."""
        return self.drivers.parked

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each change of a Run that devices may wait for."""
        self.drivers.subscribe(listener)

    async def start(self) -> None:
        """Continue all Runs of the record."""
        await self.drivers.start()

    async def stop(self) -> None:
        """Stop all drivers."""
        await self.drivers.stop()

    def running(self) -> tuple[RunDriver, ...]:
        """Return the drivers of the Runs that open Rounds, oldest first."""
        return self.drivers.running()

    def publications(self) -> tuple[Publications, ...]:
        """Return the Versions of all Runs for devices. See ``Drivers``."""
        return self.drivers.publications()

    def find_publications(self, run_id: str) -> Publications | None:
        """Return the Versions of a Run for devices. See ``Drivers``."""
        return self.drivers.find_publications(run_id)

    def driver(self, run_id: str) -> RunDriver:
        """Return the driver of a Run. Raises NotFound or Conflict if it has none here. See ``Drivers``."""
        return self.drivers.driver(run_id)

    async def missing_chunks(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Return the digests of the Chunks that are not stored here, or are damaged."""
        return await self._files.run(self._files.blobs.missing, tuple(digests))

    async def put_chunk(self, sha256: str, data: bytes) -> None:
        """Store a Chunk. Raises InvalidInput if the digest is wrong, StorageFull."""
        await self._files.run(self._files.blobs.put, sha256, data)

    async def get_chunk(self, sha256: str, offset: int) -> bytes:
        """Return a Chunk from an offset on. Raises NotFound."""
        return await self._files.run(self._files.blobs.read, sha256, offset)

    async def check_plan(self, plan: Plan) -> None:
        """Raise InvalidPlan unless the parts that a Plan names are here and accept their options."""
        # Not on the event loop: the first use of another package's part imports that package.
        await self._files.run(check_parts, plan, self._parts)
        await check_tags_are_known(plan, self._stores.devices, self._stores.tokens)

    async def publish_bundle(self, bundle: BundleRef) -> str:
        """Verify a Bundle as a device would, and record it.

        Returns:
            The digest of the manifest.

        Raises:
            InvalidBundle: The Bundle fails verification.
            NotFound: A Chunk is missing.
            Corrupted: A Chunk is damaged.
            Conflict: The Bundle is recorded under the key of another publisher.
        """
        sha256 = bundle.manifest.sha256
        await self._files.run(check_bundle, bundle, self._files.blobs)
        await self._stores.runs.add_bundle(bundle)
        known = await self._stores.runs.bundle(sha256)
        if known is not None and known.public_key != bundle.public_key:
            raise Conflict(
                f"bundle {short(sha256)}: signed by {short(bundle.public_key)}, but it is published here by "
                f"{short(known.public_key)}; start runs with that key (--key), or export the bundle under another name",
                code="FN-0605",
            )
        return sha256

    async def prepare_run(self, run_id: str, epoch: int = FIRST_EPOCH) -> str:
        """Return the public key that will sign the Versions of an epoch of a Run. It is created if there is none.

        Raises:
            Conflict: The epoch is neither that of the Run nor the next one.
        """
        check_run_id(run_id)
        known = await self._stores.runs.run(run_id)
        if known is not None and epoch == known.start.delegation.epoch:
            # The command that started the Run may be repeated, also after its key was removed.
            return known.start.delegation.run_public_key
        return (await run_key_of(run_id, epoch, self._stores)).public

    async def start_run(self, start: StartRun, by: Principal | None = None) -> RunInfo:
        """Start a Run. Repeating the same command changes nothing.

        Args:
            start: The command.
            by: The principal that sent it. None for a caller within this process.

        Raises:
            InvalidInput: The command is invalid.
            NotFound: The Bundle or a Chunk is missing.
            Conflict: A Run with another Plan, Bundle or publisher has the id.
        """
        check_run_id(start.run_id)
        # Before the lock: reading a data set may take seconds.
        if await self._stores.runs.run(start.run_id) is None:
            await self.check_plan(start.plan)
            await self._parts.data.check(start, await recorded_bundle(start.version.bundle_sha256, self._stores))
        # Shielded from an operator's disconnection: a recorded Run must have a driver.
        await run_to_end(self._start_run(start, by))
        return await self.info(start.run_id)

    async def publish_version(self, version: Version, num_rounds: int, by: Principal | None = None) -> RunInfo:
        """Add a Version from outside the Run, of the principal ``by``, and open ``num_rounds`` Rounds from it.

        Raises:
            InvalidVersion: The signature or the parameters are invalid, or it has auxiliary tensors.
            Conflict: The Run is running, or the Version is not the next one.
            NotFound: The Run or a Chunk is missing.
        """
        driver = self.driver(version.run_id)
        check_outside(version, driver.setup.bundle)
        await self._check_parameters(version, driver.setup)
        await self.drivers.control(version.run_id).publish(version, num_rounds, by)
        return await self.info(version.run_id)

    async def reclaim(self, reclaim: Reclaim, by: Principal | None = None) -> RunInfo:
        """Begin the next epoch of a Run, in any of its states. Repeating the same request changes nothing.

        Raises:
            InvalidVersion: A signature is not the publisher's, or the Version has other parameters.
            NotFound: The Run or the Version with the same parameters is missing.
            Conflict: The epoch or the Version is not the next one.
        """
        version, runs = reclaim.version, self._stores.runs
        view = await self.view(version.run_id)
        if (view.record.reclaimed, view.newest) == (reclaim.delegation, version):
            return await self.info(view.run_id)
        check_next(version, view.newest, view.newest.epoch + 1)
        bundle = await recorded_bundle(view.bundle_sha256, self._stores)
        key = await run_key_of(view.run_id, version.epoch, self._stores)
        check_permission(reclaim.delegation, view.run_id, bundle, key.public)
        check_outside(version, bundle)
        source = await runs.version(view.run_id, reclaim.adopted_number)
        if source is None:
            raise NotFound(f"run {view.run_id}: has no version {reclaim.adopted_number}", code="FN-0611")
        if source.parameters != version.parameters:
            raise InvalidVersion(
                f"run {view.run_id}: got parameters {short(version.sha256)}, expected {short(source.sha256)} of "
                f"version {source.number}",
                code="FN-0607",
            )
        event = VersionPublished(
            number=version.number,
            version_sha256=version.sha256,
            parent=version.parent,
            adopted_run_id=view.run_id,
            adopted_number=source.number,
            rounds=reclaim.rounds,
            new_epoch=version.epoch,
            by=by,
        )
        change = partial(self._stores.control.reclaim, reclaim, event, self._stores.wall())
        await run_to_end(self.drivers.replace(view.run_id, change))
        return await self.info(view.run_id)

    async def command(self, command: Command) -> RunInfo:
        """Carry out an operator's command. A repeated command changes nothing more.

        A broken Run is continued first. If that fails again, the only command left is Stop.

        Raises:
            NotFound: There is no such Run or Version.
            Conflict: The Run's state does not allow the command.
        """
        run_id, stores, drivers = command.run_id, self._stores, self.drivers
        if drivers.is_broken(run_id):
            with suppress(Conflict):
                await run_to_end(drivers.take_back(run_id))
        if drivers.is_broken(run_id) and isinstance(command.what, Stop):
            await stores.control.stop(command, stores.wall(), is_stuck=True)
        else:
            await self._check_adopted(command)
            await drivers.control(run_id).command(command)
        return await self.info(run_id)

    async def _check_adopted(self, command: Command) -> None:
        """Raise InvalidVersion for a Version of another Run that is out of a range of the Plan's ``flower.roles``."""
        setup, adopt = self.driver(command.run_id).setup, command.what
        if not isinstance(adopt, Adopt) or not adopt.from_run_id or not setup.plan.flower.roles:
            return
        source = await self._stores.runs.version(adopt.from_run_id, adopt.number)
        if source is not None and source.bundle_sha256 == setup.bundle.manifest.sha256:
            await self._check_parameters(source, setup)

    async def view(self, run_id: str) -> RunView:
        """Return a Run as its record has it now, whether or not it is driven here. Raises NotFound."""
        view = await read_view(run_id, self._stores.runs)
        if view is None:
            raise unknown_run(run_id)
        return view

    async def info(self, run_id: str) -> RunInfo:
        """Return the summary of a Run, also of one whose record is damaged. Raises NotFound."""
        try:
            return await run_info(await self.view(run_id), self.drivers.live(run_id), self._stores)
        except Corrupted as exc:
            return await damaged_info(run_id, self.drivers.live(run_id), exc, self._stores)

    async def describe(self, run_id: str, num_rounds: int) -> RunDescription:
        """Return a Run with its last Rounds and, if it is driven here, the devices at work. Raises NotFound."""
        try:
            return await describe(await self.view(run_id), self.drivers.live(run_id), num_rounds, self._stores)
        except Corrupted:
            return damaged_description(await self.info(run_id), self._stores)

    async def run_ids(self) -> tuple[str, ...]:
        """Return the ids of all Runs, oldest first."""
        return await self._stores.runs.run_ids()

    async def listed(self, query: RunQuery | None = None) -> ListedRuns:
        """Return a page of the summaries of the Runs of a query. Raises NotFound if there is no Run ``after``."""
        page, num_runs = await page_of_ids(query or RunQuery(), self._stores)
        return ListedRuns(num_runs=num_runs, runs=tuple([await self.info(run_id) for run_id in page]))

    async def version(self, run_id: str, number: int | None) -> VersionWithBundle:
        """Return a Version with its Bundle; the newest one without a number. Raises NotFound."""
        view = await self.view(run_id)
        version = view.newest if number is None else await self._stores.runs.version(run_id, number)
        if version is None:
            raise NotFound(f"run {run_id}: has no version {number}", code="FN-0611")
        if number is not None:
            removed = await self._stores.retention.removed(run_id)
            check_has_parameters(run_id, number, removed.versions.get(number))
        return VersionWithBundle(version=version, bundle=await recorded_bundle(view.bundle_sha256, self._stores))

    async def watch(self, run_id: str, from_sequence: int) -> AsyncGenerator[LoggedEvent, None]:
        """Yield the events of a Run from a sequence number on, past and future, until the Run has ended.

        Raises:
            NotFound: There is no such Run.
        """
        sequence = from_sequence
        while True:
            driver = self.drivers.find(run_id)
            changed = None if driver is None else driver.course.changed
            # Before the events are read, so that none of the last ones is missed.
            has_ended = await self.has_ended(run_id)
            while page := await self.event_page(run_id, sequence):
                for entry in page:
                    sequence = entry.sequence + 1
                    yield entry
            if has_ended and (driver is None or driver.course.changed is changed):
                return
            await (asyncio.sleep(FOLLOW_S) if changed is None else changed.wait())

    async def event_page(self, run_id: str, from_sequence: int) -> tuple[LoggedEvent, ...]:
        """Return the next recorded events of a Run, oldest first; none if there are no more."""
        return await self._stores.runs.event_page(run_id, from_sequence)

    async def has_ended(self, run_id: str) -> bool:
        """Return whether a Run rests without a Round under way, so that no event follows. Raises NotFound."""
        driver = self.drivers.find(run_id)
        if driver is not None:
            return not driver.run.state.is_live and driver.is_idle
        view = await self.view(run_id)
        last = await self._stores.rounds.last(run_id)
        return not view.state.is_live and (last is None or last.mark.is_final)

    async def evaluations(self, run_id: str, from_version: int) -> tuple[VersionEvaluation, ...]:
        """Return a page of the evaluations of a Run's Versions on held-out data. Raises NotFound."""
        await self.view(run_id)
        return await self._stores.evaluations.evaluation_page(run_id, from_version)

    async def accepted_devices(self, run_id: str, round_number: int, from_index: int) -> AcceptedDevices:
        """Return a page of the devices whose Updates a Round accepted, in the order of acceptance. Raises NotFound."""
        await self.view(run_id)
        page = await self._stores.rounds.accepted_devices(run_id, round_number, from_index)
        if page is None:
            raise NotFound(f"run {run_id}: has no round {round_number}", code="FN-0611")
        check_has_devices(run_id, round_number, page, from_index)
        return page

    async def _start_run(self, start: StartRun, by: Principal | None) -> None:
        async with self.drivers.starting:
            await self._record(start, by)
            # A recorded Run may have no driver, if the disk was full in an earlier attempt.
            await self.drivers.take_up(start.run_id)

    async def _record(self, start: StartRun, by: Principal | None) -> None:
        """Record a Run, unless it is recorded. Raises Conflict."""
        run_id, runs = start.run_id, self._stores.runs
        known = await runs.run(run_id)
        if known is None:
            setup = await setup_of(start, start.delegation, self._stores, self._files, self._parts)
            check_start(start, setup)
            await self._check_parameters(start.version, setup)
            check_sum(start, setup)
            await self._files.run(check_strategy, start, setup, self._files.blobs)
            await check_budget(setup, self._stores, self._files)
            await runs.add_run(start, self._stores.wall(), by)
        elif known.start != start:
            raise taken_id(known.start, start)

    async def _check_parameters(self, version: Version, setup: RunSetup) -> None:
        await self._files.run(check_parameters, version.parameters, setup.table, self._files.blobs)
