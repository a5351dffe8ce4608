"""Uploads that cannot be stored: the Round waits for space past its deadline, and names the cause."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.staleness import assignment, send, settle
from support.virtual import Place, bundle_in, open_place, place_over, plan, start

from fanin.commands.console.show import waits_text
from fanin.protos.errors import StorageFull
from fanin.protos.messages import RoundFailed, RunEvent, VersionPublished
from fanin.server.storage.disk import Durability
from fanin.server.storage.spool import FolderSpool, Upload
from fanin.simulation import run_virtual

NO_SPACE = "the coordinator cannot write: no space is left on the disk; free some"


def events(place: Place) -> list[RunEvent]:
    return [record.event for record in place.state.runs.events("run")]


class FullSpool(FolderSpool):
    """A spool without space while ``is_full`` is set."""

    is_full = False

    def commit(self, upload: Upload, device: str) -> None:
        """Raise StorageFull while ``is_full`` is set."""
        if self.is_full:
            raise StorageFull("spool: no space")
        super().commit(upload, device)


def test_a_run_whose_uploads_wait_for_space_reports_it_until_one_is_stored(tmp_path: Path) -> None:
    async def main() -> None:
        place, spool = place_of(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan())
        await settle()
        spool.is_full = True
        with pytest.raises(StorageFull):
            await send(place, "a")
        assert (await place.runs.info("run")).reason == f"uploads wait: {NO_SPACE}"
        spool.is_full = False
        await send(place, "a")
        assert (await place.runs.info("run")).reason == ""
        await place.runs.stop()

    run_virtual(main())


def place_of(folder: Path) -> tuple[Place, FullSpool]:
    """Return a coordinator, and its spool."""
    state = folder / "state"
    spool = FullSpool(state / "spool", state / "updates", Durability.PROCESS)
    place = open_place(folder)
    return place_over(replace(place.state, files=replace(place.state.files, spool=spool))), spool


def test_a_round_waits_for_space_past_its_deadline_and_names_the_disk(tmp_path: Path) -> None:
    async def main() -> None:
        place, spool = place_of(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(concurrency=2, buffer=2, quorum=2, deadline_s=10.0))
        await settle()
        work = {device: await assignment(place, device) for device in ("a", "b")}
        spool.is_full = True
        for _ in range(10):
            for device, assigned in work.items():
                with pytest.raises(StorageFull):
                    await send(place, device, assigned)
            await asyncio.sleep(60.0)
        description = await place.runs.describe("run", 1)
        assert description.run.reason == f"uploads wait: {NO_SPACE}"
        assert waits_text(description.live).endswith(f"; uploads wait: {NO_SPACE}")
        assert [warning.text for warning in description.warnings] == [f"uploads wait: {NO_SPACE}"]
        spool.is_full = False
        await asyncio.sleep(45.0)
        for device, assigned in work.items():
            await send(place, device, assigned)
        await settle()
        description = await place.runs.describe("run", 1)
        assert (description.run.reason, description.warnings) == ("", ())
        assert [type(event) for event in events(place) if isinstance(event, RoundFailed | VersionPublished)] == [
            VersionPublished
        ]
        await place.runs.stop()

    run_virtual(main())


def test_a_round_waits_a_day_at_most_for_space_and_then_fails_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        place, spool = place_of(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(concurrency=1, buffer=1, quorum=1, deadline_s=3600.0))
        await settle()
        spool.is_full = True
        work, began = await assignment(place, "a"), asyncio.get_running_loop().time()
        while not (failed := [event for event in events(place) if isinstance(event, RoundFailed)]):
            with pytest.raises(StorageFull):
                await send(place, "a", work)
            await asyncio.sleep(1000.0)
        assert 86_400.0 < asyncio.get_running_loop().time() - began < 93_700.0
        assert failed[0].reason.endswith(f"uploads wait: {NO_SPACE}")
        await place.runs.stop()

    run_virtual(main())
