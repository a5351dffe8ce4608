"""The commands of operators to one Run: each changes the record first, and then the driver follows.

A coordinator that is killed in between continues the Run from the record, so no command is lost. Commands to one Run
are carried out one after the other. The round machine does not wait for them: it accepts their results in every phase.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import assert_never

from fanin.edge.bundles.versions import add_auxiliary, sign_version
from fanin.edge.ranges import RANGES
from fanin.protos.errors import Conflict, NotFound
from fanin.protos.messages import Adopt, Command, Pause, Principal, Resume, Stop, Version, VersionPublished
from fanin.server.rounds.charging import check_budget
from fanin.server.runs.driving.driver import RunDriver
from fanin.server.storage.decisions import check_next
from fanin.server.storage.lanes import run_to_end
from fanin.server.storage.records import Newest
from fanin.server.storage.stores import Files, Stores


class RunControl:
    """Carries out the commands to one Run."""

    def __init__(self, driver: RunDriver, stores: Stores, files: Files) -> None:
        self._driver = driver
        self._stores, self._files = stores, files
        self._lock = asyncio.Lock()

    async def command(self, command: Command) -> None:
        """Carry out a command. A repeated command changes nothing more.

        Raises:
            Conflict: The Run's state does not allow the command.
            NotFound: The Version to adopt is missing.
        """
        await self._serialized(self._command(command))

    async def publish(self, version: Version, num_rounds: int, by: Principal | None) -> None:
        """Add a Version from outside, of a principal, and open ``num_rounds`` Rounds from it.

        Raises:
            Conflict: The Run is running, or the Version is not the next one.
        """
        await self._serialized(self._publish(version, num_rounds, by))

    async def _serialized(self, work: Awaitable[None]) -> None:
        async def with_lock() -> None:
            async with self._lock:
                await work

        # Shielded from an operator's disconnection: the machine must follow the record.
        await run_to_end(with_lock())

    async def _command(self, command: Command) -> None:
        control, now_s = self._stores.control, self._stores.wall()
        match command.what:
            case Pause():
                await control.pause(command, now_s)
            case Resume(rounds=num_rounds):
                await self._check_release(command)
                await control.resume(command, num_rounds, now_s)
            case Stop():
                await control.stop(command, now_s, is_stuck=self._driver.is_stuck)
            case Adopt() as adopt:
                await self._adopt(command, adopt)
            case other:
                assert_never(other)
        # Also for a repeated command: the first try may have failed between the record and the machine.
        await self._driver.refresh()

    async def _check_release(self, command: Command) -> None:
        """Raise Conflict for a Run that would rest again at once, because its next Round may not be released."""
        stores = self._stores
        if not await stores.control.is_done(command) and await stores.rounds.unfinished(command.run_id) is None:
            await self._check_rounds(1)

    async def _check_rounds(self, num_rounds: int) -> None:
        """Raise Conflict for Rounds of which the first one may not be released. A Version without Rounds is none."""
        if num_rounds:
            await check_budget(self._driver.setup, self._stores, self._files)

    async def _publish(self, version: Version, num_rounds: int, by: Principal | None) -> None:
        runs = self._stores.runs
        if version == await runs.version(version.run_id, version.number):
            await self._check_repeated(version, num_rounds)
            await self._driver.refresh()
            return
        newest = await runs.newest_version(version.run_id)
        check_next(version, newest, newest.epoch)
        await self._check_rounds(num_rounds)
        event = VersionPublished(
            number=version.number, version_sha256=version.sha256, parent=version.parent, rounds=num_rounds, by=by
        )
        await self._add(Newest(version=version, event=event))
        await self._driver.refresh()

    async def _check_repeated(self, version: Version, num_rounds: int) -> None:
        """Raise Conflict if a Version was published with another number of Rounds."""
        run_id = version.run_id
        event = await self._stores.runs.publication(run_id, version.number)
        if event is not None and event.rounds != num_rounds:
            raise Conflict(
                f"run {run_id}: got version {version.number} again with {num_rounds} rounds, but it was published "
                f"with {event.rounds}; resume the run to give it other rounds",
                code="FN-0625",
            )

    async def _adopt(self, command: Command, adopt: Adopt) -> None:
        stores, driver = self._stores, self._driver
        if await stores.control.is_done(command):
            return
        from_run = adopt.from_run_id or command.run_id
        source = await stores.runs.version(from_run, adopt.number)
        if source is None:
            raise NotFound(f"run {from_run}: has no version {adopt.number}", code="FN-0611")
        ours = driver.setup.bundle.manifest.sha256
        if source.bundle_sha256 != ours:
            raise Conflict(
                f"run {command.run_id}: version {adopt.number} of run {from_run} is of bundle "
                f"{source.bundle_sha256[:16]}, expected {ours[:16]}; only versions of one bundle can be adopted",
                code="FN-0371",
            )
        await self._check_rounds(adopt.rounds)
        signed = sign_version(
            driver.setup.run_key,
            parent=await stores.runs.newest_version(driver.run_id),
            run_id=command.run_id,
            bundle_sha256=ours,
            parameters=source.parameters,
        )
        if RANGES in source.auxiliary:
            # Its int8 model stays the same. The tensors of stages begin again in a new lineage.
            signed = add_auxiliary(driver.setup.run_key, signed, {RANGES: source.auxiliary[RANGES]})
        version = replace(signed, delegation=driver.setup.delegation)
        event = VersionPublished(
            number=version.number,
            version_sha256=version.sha256,
            parent=version.parent,
            adopted_run_id=from_run,
            adopted_number=adopt.number,
            rounds=adopt.rounds,
            by=command.by,
        )
        await self._add(Newest(version=version, event=event), command)

    async def _add(self, newest: Newest, command: Command | None = None) -> None:
        await self._stores.control.publish(self._driver.run_id, newest, self._stores.wall(), command)
