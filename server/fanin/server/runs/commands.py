"""What operators command a Run to do, carried out: first durably, then told to the machine.

A coordinator that is killed in between finds the Run as the record has it. Commands to one Run are carried out one
after the other; the machine goes on meanwhile, and takes what it is told in every phase of a Round.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import assert_never

from fanin.edge.bundles.versions import sign_version
from fanin.protos.control import Adopt, Command, Pause, Resume, RunInfo, Stop, VersionPublished
from fanin.protos.errors import Conflict, NotFound
from fanin.protos.messages import Version
from fanin.server.rounds.effects import Tools, whole
from fanin.server.runs.driver import RunDriver
from fanin.server.storage.sqlite.commands import Newest
from fanin.server.storage.sqlite.runs import RunRecord


async def run_info(run: RunRecord, trouble: str, tools: Tools) -> RunInfo:
    """Where a Run stands by its record, and what it waits for."""
    run_id = run.start.run_id
    newest = await tools.store_lane(lambda: tools.runs.version(run_id))
    assert newest is not None, "a run has at least version 0"
    return RunInfo(
        run_id=run_id,
        state=run.state,
        plan=run.start.plan,
        bundle_sha256=run.start.version.bundle_sha256,
        version=newest.number,
        version_sha256=newest.sha256,
        num_rounds=await tools.store_lane(lambda: tools.rounds.num_published(run_id)),
        reason="; ".join(text for text in (run.reason, trouble) if text),
    )


class RunControl:
    """The commands to one Run."""

    def __init__(self, driver: RunDriver, tools: Tools) -> None:
        self._driver = driver
        self._tools = tools
        self._one_at_a_time = asyncio.Lock()

    async def command(self, command: Command) -> None:
        """Carry out a command, once. Raises Conflict, NotFound."""
        await self._undisturbed(self._command(command))

    async def publish(self, version: Version, num_rounds: int) -> None:
        """Add a Version that was made elsewhere, and run ``num_rounds`` Rounds from it. Raises Conflict."""
        await self._undisturbed(self._publish(version, num_rounds))

    async def _undisturbed(self, work: Awaitable[None]) -> None:
        async def in_turn() -> None:
            async with self._one_at_a_time:
                await work

        # Whole: an operator who hangs up must not leave a record of which the machine was never told.
        await whole(in_turn())

    async def info(self) -> RunInfo:
        """Where the Run stands."""
        return await run_info(self._driver.run, self._driver.trouble, self._tools)

    async def _command(self, command: Command) -> None:
        tools = self._tools
        match command.what:
            case Pause():
                await tools.store_lane(lambda: tools.control.pause(command, tools.wall()))
            case Resume() as resume:
                await tools.store_lane(lambda: tools.control.resume(command, resume.rounds, tools.wall()))
            case Stop():
                is_stuck = self._driver.is_stuck
                await tools.store_lane(lambda: tools.control.stop(command, tools.wall(), is_stuck=is_stuck))
            case Adopt() as adopt:
                await self._adopt(command, adopt)
            case other:
                assert_never(other)
        # Also if it was carried out before: whoever did may have failed before the machine was told.
        await self._driver.look()

    async def _publish(self, version: Version, num_rounds: int) -> None:
        tools = self._tools
        known = await tools.store_lane(lambda: tools.runs.version(version.run_id, version.number))
        if version == known:
            await self._check_repeated(version, num_rounds)
            await self._driver.look()
            return
        newest = await self._newest()
        if version.number != newest.number + 1 or version.parent != newest.number:
            raise Conflict(
                f"run {version.run_id}: got version {version.number} made from {version.parent}, "
                f"expected {newest.number + 1} made from {newest.number}"
            )
        event = VersionPublished(
            number=version.number, version_sha256=version.sha256, parent=version.parent, rounds=num_rounds
        )
        await self._add(Newest(version=version, event=event))
        await self._driver.look()

    async def _check_repeated(self, version: Version, num_rounds: int) -> None:
        """Raise Conflict if a Version was published with another number of Rounds."""
        tools, run_id = self._tools, version.run_id
        for recorded in await tools.store_lane(lambda: list(tools.runs.events(run_id))):
            event = recorded.event
            if not isinstance(event, VersionPublished) or event.number != version.number:
                continue
            if event.rounds != num_rounds:
                raise Conflict(
                    f"run {run_id}: got version {version.number} again with {num_rounds} rounds, but it was published "
                    f"with {event.rounds}; resume the run to give it other rounds"
                )

    async def _adopt(self, command: Command, adopt: Adopt) -> None:
        tools, driver = self._tools, self._driver
        if await tools.store_lane(lambda: tools.control.is_done(command)):
            return
        from_run = adopt.from_run_id or command.run_id
        source = await tools.store_lane(lambda: tools.runs.version(from_run, adopt.number))
        if source is None:
            raise NotFound(f"run {from_run}: has no version {adopt.number}")
        ours = driver.model.bundle.manifest.sha256
        if source.bundle_sha256 != ours:
            raise Conflict(
                f"run {command.run_id}: version {adopt.number} of run {from_run} is of bundle "
                f"{source.bundle_sha256[:16]}, expected {ours[:16]}; only versions of one bundle can be adopted"
            )
        signed = sign_version(
            driver.model.run_key,
            parent=await self._newest(),
            run_id=command.run_id,
            bundle_sha256=ours,
            parameters=source.parameters,
        )
        version = replace(signed, delegation=driver.run.start.delegation)
        event = VersionPublished(
            number=version.number,
            version_sha256=version.sha256,
            parent=version.parent,
            adopted_run_id=from_run,
            adopted_number=adopt.number,
            rounds=adopt.rounds,
        )
        await self._add(Newest(version=version, event=event), command)

    async def _add(self, newest: Newest, command: Command | None = None) -> None:
        tools, run_id = self._tools, self._driver.run_id
        await tools.store_lane(lambda: tools.control.publish(run_id, newest, tools.wall(), command))

    async def _newest(self) -> Version:
        tools, run_id = self._tools, self._driver.run_id
        newest = await tools.store_lane(lambda: tools.runs.version(run_id))
        assert newest is not None, "a run has at least version 0"
        return newest
