"""Permanent errors, and operators who end a Run: every Round can fail, and states its reason.

The tests run the production coordinator on a virtual clock.
"""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.scenes import Scene, play, versions, wait_for_end
from support.staleness import send, settle
from support.virtual import Place, bundle_in, open_place, place_over, plan, start

from fanin.protos.chunks import Artifact
from fanin.protos.errors import Corrupted, StorageFull, Unavailable
from fanin.protos.messages import (
    Command,
    Resume,
    RoundClosed,
    RoundFailed,
    RoundOpened,
    RunEvent,
    RunInfo,
    RunRested,
    RunState,
    Stop,
    UpdateHeader,
)
from fanin.server.aggregation.verify import verify_run
from fanin.server.storage.blobs import FolderBlobs
from fanin.server.storage.disk import Durability
from fanin.server.storage.spool import FolderSpool
from fanin.simulation import run_virtual

ONE_DEVICE = plan(concurrency=1, buffer=1, quorum=1, max_rounds=1)
SEE_LOG = "the coordinator's log has the details"
NO_SPACE = "the coordinator cannot write: no space is left on the disk; free some"


def flip(path: Path) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def payloads(folder: Path) -> list[Path]:
    return sorted((folder / "state" / "updates").glob("run/*/*.payload"))


def events(place: Place) -> list[RunEvent]:
    return [record.event for record in place.state.runs.events("run")]


async def stop(place: Place, command_id: str = "stop") -> RunInfo:
    return await place.runs.command(Command(command_id=command_id, run_id="run", what=Stop()))


def place_with(place: Place, **changes: object) -> Place:
    """Return a coordinator over the same folder, with other blobs or another spool."""
    return place_over(replace(place.state, files=replace(place.state.files, **changes)))


def test_a_damaged_update_fails_its_round_and_the_next_one_publishes_the_version(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await settle()
        for device in ("a", "b"):
            await send(scene.place, device)
        # Another process must read the payloads again.
        await scene.hang_up()
        flip(payloads(tmp_path)[0])
        scene.num_devices = 4
        await scene.restart()
        await scene.until(RoundFailed)
        # The failure is recorded, so a restart does not reopen the Round.
        await scene.restart()
        await wait_for_end(scene)

    run_events = play(tmp_path, story, plan(max_rounds=1), devices=0)
    failure = RoundFailed(round=1, reason=f"the update of device a is damaged on the coordinator's disk; {SEE_LOG}")
    assert [event for event in run_events if isinstance(event, RoundFailed)] == [failure]
    assert [event.round for event in versions(run_events)] == [2]
    assert run_events[-1] == RunRested(state=RunState.FINISHED, reason="1 of 1 round done")


def test_a_closed_set_that_cannot_be_folded_fails_its_round(tmp_path: Path) -> None:
    run_plan = plan(quorum=2)

    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), run_plan)
        await settle()
        for device in ("a", "b"):
            await send(place, device)
        await place.runs.stop()
        # The state after a process is killed right after it closed the set.
        driver = await place.state.stores.take("run")
        await driver.writer.close(1, cohort=run_plan.cohort, now_s=2.0)
        payloads(tmp_path)[1].write_bytes(b"cut")
        restarted = open_place(tmp_path)
        await restarted.runs.start()
        await settle()
        assert [type(event) for event in events(restarted)] == [RoundOpened, RoundClosed, RoundFailed, RoundOpened]
        assert [verdict.problem for verdict in verify_run(restarted.state, "run")] == [""]
        assert (await restarted.runs.info("run")).reason == ""
        await restarted.runs.stop()

    run_virtual(main())


def test_a_run_whose_newest_version_is_damaged_fails_and_can_be_rolled_back(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        bundle = bundle_in(tmp_path)
        await start(place.runs, bundle, replace(ONE_DEVICE, stop=replace(ONE_DEVICE.stop, max_rounds=9)))
        await settle()
        digest = bundle.manifest.artifacts[bundle.manifest.initial].chunks[0].sha256
        flip(tmp_path / "state" / "blobs" / digest[:2] / digest)
        await send(place, "a")
        await settle()
        # The Round cannot be folded, and no Round can start from that Version.
        info = await place.runs.info("run")
        assert info.state is RunState.FAILED
        assert info.reason == f"version 0 is damaged on the coordinator's disk; {SEE_LOG}"
        assert str(tmp_path) not in str(events(place))
        # The operator puts the file back from a backup.
        flip(tmp_path / "state" / "blobs" / digest[:2] / digest)
        await place.runs.command(Command(command_id="resume", run_id="run", what=Resume(rounds=1)))
        await settle()
        await send(place, "a")
        await settle()
        assert (await place.runs.info("run")).version == 1
        await place.runs.stop()

    run_virtual(main())


class FailingBlobs(FolderBlobs):
    """Blobs that raise ``error``, if it is set, on every read and write of parameters."""

    error: Exception | None = None

    def put_pieces(self, pieces: Iterable[bytes]) -> Artifact:
        """Raise the error."""
        if self.error is not None:
            raise self.error
        return super().put_pieces(pieces)

    def pieces(self, what: str, artifact: Artifact) -> Iterator[bytes]:
        """Raise the error."""
        if self.error is not None:
            raise self.error
        return super().pieces(what, artifact)

    def read_artifact(self, what: str, artifact: Artifact) -> bytes:
        """Raise the error, except for manifests."""
        if self.error is not None and what != "manifest":
            raise self.error
        return super().read_artifact(what, artifact)


async def start_stuck_run(folder: Path, error: Exception) -> tuple[Place, FailingBlobs]:
    """Start a Run whose first Round cannot be folded."""
    blobs = FailingBlobs(folder / "odd", Durability.PROCESS)
    place = open_place(folder, blobs=blobs)
    await start(place.runs, bundle_in(folder), ONE_DEVICE)
    await settle()
    blobs.error = error
    await send(place, "a")
    await settle()
    return place, blobs


def test_a_fold_that_waits_for_space_reports_it_and_resumes(tmp_path: Path) -> None:
    async def main() -> None:
        place, blobs = await start_stuck_run(tmp_path, StorageFull(f"{tmp_path}: full"))
        # Half a day is less than the time limit of a fold that waits for space.
        await asyncio.sleep(43_200.0)
        reason = f"Fold is tried again: {NO_SPACE}"
        (summary,) = (await place.runs.listed()).runs
        assert (summary.state, summary.reason) == (RunState.RUNNING, reason)
        assert (await place.runs.describe("run", 1)).run.reason == reason
        blobs.error = None
        await asyncio.sleep(60.0)
        info = await place.runs.info("run")
        assert (info.state, info.version, info.reason) == (RunState.FINISHED, 1, "1 of 1 round done")
        await place.runs.stop()

    run_virtual(main())


@pytest.mark.nightly
def test_a_fold_that_waits_for_space_for_longer_than_a_day_fails_its_round(tmp_path: Path) -> None:
    async def main() -> None:
        place, _ = await start_stuck_run(tmp_path, StorageFull("full"))
        await asyncio.sleep(86_500.0)
        (failure,) = [event for event in events(place) if isinstance(event, RoundFailed)]
        assert failure.reason.startswith("Fold failed for 864")
        assert failure.reason.endswith(NO_SPACE)
        await place.runs.stop()

    run_virtual(main())


def test_an_error_of_unknown_kind_fails_the_round_after_a_minute_and_shows_no_path(tmp_path: Path) -> None:
    async def main() -> None:
        place, _ = await start_stuck_run(
            tmp_path, IsADirectoryError(21, "Is a directory", str(tmp_path / "blobs" / "39"))
        )
        reason = f"unexpected error (IsADirectoryError); {SEE_LOG}"
        assert (await place.runs.info("run")).reason == f"Fold is tried again: {reason}"
        assert not [event for event in events(place) if isinstance(event, RoundFailed)]
        await asyncio.sleep(70.0)
        (failure,) = [event for event in events(place) if isinstance(event, RoundFailed)]
        assert failure.reason.endswith(f" s: {reason}")
        assert str(tmp_path) not in str(events(place))
        await place.runs.stop()

    run_virtual(main())


def test_an_operator_ends_a_run_whose_fold_is_stuck(tmp_path: Path) -> None:
    async def main() -> None:
        place, blobs = await start_stuck_run(tmp_path, StorageFull("full"))
        assert (await stop(place)).state is RunState.STOPPED
        await settle()
        info = await place.runs.info("run")
        assert (info.state, info.reason) == (RunState.STOPPED, "by an operator")
        assert place.runs.driver("run").is_idle
        assert RoundFailed(round=1, reason="stopped by an operator") in events(place)
        blobs.error = None
        restarted = place_with(place)
        await place.runs.stop()
        await restarted.runs.start()
        await settle()
        assert [type(event) for event in events(restarted)][-2:] == [RoundFailed, RunRested]
        await restarted.runs.stop()

    run_virtual(main())


def test_a_fold_that_gets_stuck_after_the_run_was_stopped_can_be_ended_too(tmp_path: Path) -> None:
    async def main() -> None:
        place, _ = await start_stuck_run(tmp_path, StorageFull("full"))
        # As if the command had come before the disk was full. Then the closed Round continues.
        await place.state.stores.control.stop(Command(command_id="early", run_id="run", what=Stop()), 5.0)
        assert not place.runs.driver("run").is_idle
        await stop(place, "late")
        await settle()
        assert place.runs.driver("run").is_idle
        assert events(place)[-1] == RoundFailed(round=1, reason="stopped by an operator")
        await place.runs.stop()

    run_virtual(main())


def test_a_run_that_cannot_open_its_first_round_fails_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        blobs = FailingBlobs(tmp_path / "odd", Durability.PROCESS)
        blobs.error = Corrupted(f"{tmp_path}: damaged")
        place = open_place(tmp_path, blobs=blobs)
        await start(place.runs, bundle_in(tmp_path), plan())
        await settle()
        info = await place.runs.info("run")
        assert info.state is RunState.FAILED
        assert info.reason == f"version 0 is damaged on the coordinator's disk; {SEE_LOG}"
        blobs.error = None
        await place.runs.command(Command(command_id="resume", run_id="run", what=Resume()))
        await settle()
        assert events(place)[-1] == RoundOpened(round=1, base_version=0)
        await place.runs.stop()

    run_virtual(main())


class FailingSpool(FolderSpool):
    """A spool whose committed payloads cannot be read while ``error`` is set."""

    error: Exception | None = None

    def read(self, header: UpdateHeader, device: str) -> Iterator[memoryview]:
        """Raise the error while it is set."""
        if self.error is not None:
            raise self.error
        return super().read(header, device)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            Unavailable("spool: the object store is down"),
            "Accumulate is tried again: the coordinator's store cannot be",
        ),
        (ValueError("a bug"), "Accumulate is tried again: unexpected error (ValueError)"),
    ],
)
def test_only_a_damaged_update_is_reported_as_damaged(tmp_path: Path, error: Exception, reason: str) -> None:
    async def main() -> None:
        state = tmp_path / "state"
        spool = FailingSpool(state / "spool", state / "updates", Durability.PROCESS)
        place = place_with(open_place(tmp_path), spool=spool)
        await start(place.runs, bundle_in(tmp_path), ONE_DEVICE)
        await settle()
        spool.error = error
        await send(place, "a")
        await settle()
        assert reason in (await place.runs.info("run")).reason
        spool.error = None
        await asyncio.sleep(5.0)
        assert (await place.runs.info("run")).version == 1
        await place.runs.stop()

    run_virtual(main())


def test_a_fold_that_is_given_up_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        place, _ = await start_stuck_run(tmp_path, Corrupted("parameters: digest mismatch"))
        await place.runs.stop()

    run_virtual(main())
    lines = [record.getMessage() for record in caplog.records if "Fold" in record.getMessage()]
    assert lines == ["run run: Fold failed and is given up: version 0 is damaged on the coordinator's disk"]
