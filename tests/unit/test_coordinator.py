"""The coordinator's calls for devices, on a virtual clock: assignments, downloads, and robustness to failures."""

import asyncio
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from support.scenes import Scene, play, versions, wait_for_end
from support.virtual import PUBLISHER, bundle_in, open_place, plan, start

from fanin.clients.versions import next_version
from fanin.protos import messages as m
from fanin.protos.chunks import Artifact
from fanin.protos.errors import Conflict, Corrupted, InvalidInput, NotFound
from fanin.protos.messages import RoundFailed, RoundOpened, RunState, VersionPublished
from fanin.server.access.limits import Limits
from fanin.server.fleet.coordinator import Coordinator
from fanin.server.storage.blobs import FolderBlobs
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import run_to_end
from fanin.server.storage.records import EnrolledDevice
from fanin.simulation import LoopbackTransport, SyntheticTrainer, VirtualDevice, run_virtual, synthetic_bundle

T = TypeVar("T")
CAPABILITIES = m.Capabilities(codecs=("fixed32",), runtimes=("synthetic 1",), graph_formats=("onnx",))


async def poll(coordinator: Coordinator, device: str, wait_s: float = 0.1) -> m.CheckInAnswer:
    """Check in once."""
    return await coordinator.check_in(device, m.CheckIn(protocol=1, capabilities=CAPABILITIES, wait_s=wait_s))


async def assignment_for(coordinator: Coordinator, device: str) -> m.Assignment:
    """Check in, and return the Assignment that the coordinator must answer with."""
    answer = await poll(coordinator, device)
    assert isinstance(answer, m.Assigned), answer
    return answer.assignment


def test_work_finishes_however_often_its_caller_is_cancelled() -> None:
    async def main() -> None:
        done = asyncio.Event()

        async def work() -> None:
            await asyncio.sleep(10.0)
            done.set()

        caller = asyncio.create_task(run_to_end(work()))
        for _ in range(3):
            await asyncio.sleep(1.0)
            caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert done.is_set()

    run_virtual(main())


def test_a_device_keeps_its_assignment_when_another_run_has_a_free_place(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        bundle = bundle_in(tmp_path)
        await start(place.runs, bundle, plan(concurrency=1, buffer=1, quorum=1), "first")
        await asyncio.sleep(1.0)
        first = await assignment_for(place.coordinator, "x")
        await start(place.runs, bundle, plan(concurrency=2, buffer=2, quorum=2), "second")
        await asyncio.sleep(1.0)
        second = await assignment_for(place.coordinator, "y")
        assert (first.run_id, second.run_id) == ("first", "second")
        # A place in the older Run becomes free; y still works for the second.
        await place.coordinator.report("x", m.Report(assignment_id=first.assignment_id, failure="gave up"))
        repeat = await assignment_for(place.coordinator, "y")
        assert repeat.assignment_id == second.assignment_id
        await place.runs.stop()

    run_virtual(main())


def test_a_device_that_repeats_that_it_gave_up_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="fanin.server.fleet.uploads")

    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan())
        await asyncio.sleep(1.0)
        work = await assignment_for(place.coordinator, "x")
        for _ in range(5):
            await place.coordinator.report("x", m.Report(assignment_id=work.assignment_id, failure="\U000e0001" * 400))
        await place.runs.stop()

    run_virtual(main())
    (message,) = (record.getMessage() for record in caplog.records if "gave up" in record.getMessage())
    assert len(message) < 600


def test_a_round_that_waits_because_devices_give_up_reports_why(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(concurrency=2, buffer=2, quorum=2, deadline_s=60.0))
        await asyncio.sleep(1.0)

        async def reason() -> str:
            return (await place.runs.describe("run", 1)).run.reason

        work = await assignment_for(place.coordinator, "x")
        assert await reason() == ""
        await place.coordinator.report("x", m.Report(assignment_id=work.assignment_id, failure="no\ndata" + "." * 400))
        text = await reason()
        assert text.startswith("round 1 waits: 1 device gave up, the last with: 'no\\ndata....")
        assert len(text) < 300
        # A device that gave up and tries again does not count towards the quorum; other devices do.
        await assignment_for(place.coordinator, "x")
        await assignment_for(place.coordinator, "y")
        assert await reason() == text
        await asyncio.sleep(61.0)
        (failure,) = (
            record.event for record in place.state.runs.events("run") if isinstance(record.event, RoundFailed)
        )
        expected = (
            "0 updates within 60 s, expected at least 2 (cohort.quorum); "
            "1 device gave up, the last with: 'no\\ndata...."
        )
        assert failure.reason.startswith(expected)
        assert await reason() == "", "the next round has no device that gave up"
        await place.runs.stop()

    run_virtual(main())


def test_a_poll_that_a_second_one_replaces_is_answered_with_a_later_retry(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        first = asyncio.create_task(poll(place.coordinator, "x", wait_s=30.0))
        await asyncio.sleep(1.0)
        second = await poll(place.coordinator, "x")
        assert await first == m.Wait(retry_min_s=1.0, retry_max_s=5.0)
        assert second == m.Wait(retry_min_s=0.0, retry_max_s=1.0)

    run_virtual(main())


def test_a_check_in_that_gets_no_work_never_reaches_the_store(tmp_path: Path) -> None:
    num_calls = 0

    async def counting_lane(work: Callable[[], T]) -> T:
        nonlocal num_calls
        num_calls += 1
        return work()

    async def main() -> None:
        place = open_place(tmp_path, store_lane=counting_lane)
        await place.state.devices.enroll([EnrolledDevice(public_key=f"{number:064x}") for number in range(1000)], 1.0)
        coordinator = Coordinator(
            place.runs, place.state.stores, place.state.files, Limits(max_parked=1), random.Random(0)
        )
        parked_poll = asyncio.create_task(poll(coordinator, "parked", wait_s=30.0))
        await asyncio.sleep(1.0)
        before = num_calls
        # The retry window of the population: 1,000 devices at 500 check-ins a second.
        assert await poll(coordinator, "turned away") == m.Wait(retry_min_s=0.2, retry_max_s=2.0)
        assert await parked_poll == m.Wait(retry_min_s=0.0, retry_max_s=1.0)
        assert num_calls == before

    run_virtual(main())


def test_a_device_can_download_only_the_chunks_of_its_assignment(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan())
        await asyncio.sleep(1.0)
        work = await assignment_for(place.coordinator, "x")
        secret = place.state.blobs.put_pieces([b"another run's parameters"])
        for digest, good in ((work.version.parameters.chunks[0].sha256, True), (secret.chunks[0].sha256, False)):
            download = m.Download(assignment_id=work.assignment_id, sha256=digest, offset=0)
            if good:
                assert [data async for data in place.coordinator.download("x", download)]
            else:
                with pytest.raises(NotFound, match="FN-0613"):
                    [data async for data in place.coordinator.download("x", download)]
        good, bad = work.version.parameters.chunks[0], secret.chunks[0]
        download = m.Download(
            assignment_id=work.assignment_id, sha256=good.sha256, offset=5, more_sha256=(good.sha256, bad.sha256)
        )
        content = b""
        with pytest.raises(NotFound, match="FN-0613"):
            async for data in place.coordinator.download("x", download):
                content += data
        # The Chunks before the missing one arrive: the first from its offset, the others in full.
        expected = place.state.blobs.read(good.sha256)
        assert content == expected[5:] + expected
        await place.runs.stop()

    run_virtual(main())


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_damaged_or_missing_chunk_of_an_assignment_is_the_coordinators_fault(
    tmp_path: Path, *, is_missing: bool
) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan())
        await asyncio.sleep(1.0)
        work = await assignment_for(place.coordinator, "x")
        sha256 = work.version.parameters.chunks[0].sha256
        path = tmp_path / "state" / "blobs" / sha256[:2] / sha256
        good = path.read_bytes()
        path.unlink() if is_missing else path.write_bytes(good[:-1])
        download = m.Download(assignment_id=work.assignment_id, sha256=sha256, offset=0)
        with pytest.raises(Corrupted, match="not stored here, but" if is_missing else "damaged on disk"):
            [data async for data in place.coordinator.download("x", download)]
        await place.runs.put_chunk(sha256, good)
        assert b"".join([data async for data in place.coordinator.download("x", download)]) == good
        await place.runs.stop()

    run_virtual(main())


def test_foreign_files_in_the_folder_do_not_stop_a_run(tmp_path: Path) -> None:
    def add_foreign_files() -> None:
        state = tmp_path / "state"
        for folder in (state, state / "spool", *(state / "blobs").glob("*"), *(state / "updates").glob("**/")):
            (folder / ".DS_Store").write_bytes(b"")
            (folder / "lost+found").mkdir(exist_ok=True)

    async def story(scene: Scene) -> None:
        add_foreign_files()
        await scene.until(VersionPublished)
        add_foreign_files()
        await scene.restart()
        await wait_for_end(scene)

    assert len(versions(play(tmp_path, story))) == 3
    assert len(list((tmp_path / "state" / "updates").glob("run/*/.DS_Store"))) == 1


def test_a_run_id_is_short_enough_for_its_assignments(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        bundle = bundle_in(tmp_path)
        with pytest.raises(InvalidInput, match="FN-0105"):
            await start(place.runs, bundle, plan(), "r" * 65)
        await start(place.runs, bundle, plan(), "r" * 64)
        await asyncio.sleep(1.0)
        assert (await assignment_for(place.coordinator, "d" * 32)).run_id == "r" * 64
        await place.runs.stop()

    run_virtual(main())


class FailingBlobs(FolderBlobs):
    """Blobs whose first writes raise an unexpected error."""

    num_failures = 2

    def put_pieces(self, pieces: Iterable[bytes]) -> Artifact:
        """Raise an unexpected error for the first calls."""
        if self.num_failures:
            self.num_failures -= 1
            raise ZeroDivisionError("nobody expects this")
        return super().put_pieces(pieces)


def test_a_run_survives_an_unexpected_error(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path, blobs=FailingBlobs(tmp_path / "odd", Durability.PROCESS))
        await start(place.runs, bundle_in(tmp_path), plan(concurrency=1, buffer=1, quorum=1, max_rounds=1))
        transport = LoopbackTransport(fleet=place.coordinator, device="x")
        device = VirtualDevice(
            transport, SyntheticTrainer(partition=0), (PUBLISHER.public,), random.Random(0), lambda *_: 1.0
        )
        task = asyncio.create_task(device.run())
        await asyncio.sleep(1.7)
        reason = (await place.runs.info("run")).reason
        events = [entry.event async for entry in place.runs.watch("run", 0)]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert reason == (
            "Fold is tried again: unexpected error (ZeroDivisionError); the coordinator's log has the details"
        )
        assert (await place.runs.info("run")).state is RunState.FINISHED
        assert sum(isinstance(event, RoundOpened) for event in events) == 1
        await place.runs.stop()

    run_virtual(main())


def test_one_damaged_run_does_not_block_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        bundle = bundle_in(tmp_path)
        await start(place.runs, bundle, plan(), "good")
        await asyncio.sleep(1.0)
        await place.runs.stop()
        # A second Run, whose Bundle loses its manifest.
        other = synthetic_bundle(tmp_path / "other", PUBLISHER, {"c": (2,)})
        second_start = open_place(tmp_path)
        await second_start.runs.start()
        await start(second_start.runs, other, plan(), "damaged")
        await second_start.runs.stop()
        (tmp_path / "state" / "blobs" / other.sha256[:2] / other.sha256).unlink()

        third_start = open_place(tmp_path)
        await third_start.runs.start()
        assert [info.run_id for info in (await third_start.runs.listed()).runs] == ["good", "damaged"]
        with pytest.raises(Conflict, match="FN-0615"):
            third_start.runs.driver("damaged")
        await third_start.runs.stop()

    run_virtual(main())


async def slow_lane(work: Callable[[], T]) -> T:
    """Run the work with a short delay before and after it."""
    await asyncio.sleep(0.01)
    result = work()
    await asyncio.sleep(0.01)
    return result


@pytest.mark.parametrize("hang_up_s", [0.005, 0.015, 0.025, 0.035, 0.045, 0.055, 0.065])
def test_an_operator_who_hangs_up_leaves_no_version_without_its_rounds(tmp_path: Path, hang_up_s: float) -> None:
    async def main() -> None:
        place = open_place(tmp_path, store_lane=slow_lane)
        bundle = bundle_in(tmp_path)
        await start(place.runs, bundle, plan(quorum=1, deadline_s=1.0, max_rounds=1))
        await asyncio.sleep(1.0)
        driver = place.runs.driver("run")
        await poll(place.coordinator, "x")
        # No device uploads: three Rounds fail, and the Run rests.
        for _ in range(3):
            await poll(place.coordinator, "x")
            await asyncio.sleep(2.0)
        assert driver.run.state is RunState.FAILED
        latest = await place.runs.version("run", None)
        version, data = next_version(latest.version, np.ones(22, np.float32), bundle, PUBLISHER)
        place.state.blobs.put_pieces([data])
        task = asyncio.create_task(place.runs.publish_version(version, 1))
        await asyncio.sleep(hang_up_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(1.0)
        newest_number = (await place.runs.info("run")).version
        # Either no effect is recorded, or both are: the Version and the Round that starts from it.
        assert (newest_number, driver.intake.num_places > 0) in ((0, False), (1, True))
        assert (await place.runs.publish_version(version, 1)).version == 1
        await asyncio.sleep(1.0)
        assert driver.intake.num_places == 4
        await place.runs.stop()

    run_virtual(main())
