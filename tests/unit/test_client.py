"""The device's client over a scripted connection: its reaction to each failure, its files and its counts."""

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from support.errors import raises
from support.scripted import FailingTrainer, LosingRuntime, Script, Store, client_of, run, scripted_coordinator

from fanin.clients.device.conditions import Conditions, ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.device.updates import Change
from fanin.clients.transport import ReadPayload
from fanin.protos import messages as m
from fanin.protos.chunks import Artifact, ChunkRef, artifact_of
from fanin.protos.errors import (
    STATUS,
    Conflict,
    Corrupted,
    FaninError,
    InvalidUpdate,
    NotFound,
    StorageFull,
    Unauthenticated,
    Unavailable,
)
from fanin.simulation import SyntheticTrainer


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return scripted_coordinator(tmp_path)


def test_an_older_version_is_refused_before_its_parameters_are_downloaded(script: Script, tmp_path: Path) -> None:
    """No coordinator, real or false, can bring a device back to an older Version than it has seen."""
    parameters = script.work.version.parameters
    Cache(tmp_path / "device", 1 << 20).records.raise_version("run", (1, 1))
    run(script, tmp_path)
    (failure,) = script.failures
    assert "version 0 of run run: older than version 1, which this device has verified; rejected" in failure
    assert script.headers == []
    assert not {ref.sha256 for ref in parameters.chunks} & set(script.served_bytes)


def test_an_update_is_accepted_and_forgotten(script: Script, tmp_path: Path) -> None:
    assert run(script, tmp_path).num_accepted == 1
    assert script.failures == []
    assert list((tmp_path / "device" / "updates").iterdir()) == []


@pytest.mark.parametrize("call", ["download", "train", "upload"])
def test_work_that_raises_an_unexpected_error_is_abandoned_and_reported(
    script: Script, tmp_path: Path, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    fault = RuntimeError("boom")
    script.faults = {call: fault}
    client = run(script, tmp_path, FailingTrainer(fault if call == "train" else None))
    assert script.failures == ["unexpected error: RuntimeError: boom"]
    assert client.num_accepted == 0
    assert "Traceback" in caplog.text


@dataclass
class Answers:
    """A ``may_work`` that returns these answers, then True. It raises an answer that is an exception."""

    answers: list[object]

    def __call__(self) -> bool:
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]  # an app's function may return anything


def test_a_may_work_that_raises_pauses_the_client_and_is_logged_once(
    script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fault = RuntimeError("no battery service")
    may_work = Answers([fault, fault, np.ones(2), True, fault])
    client = client_of(script, tmp_path, may_work=may_work)
    client.run()
    assert (client.num_accepted, client.failure) == (1, None)
    records = [record for record in caplog.records if "may_work" in record.getMessage()]
    # One line for each of the two series of failures.
    assert [record.getMessage() for record in records] == [
        "may_work: RuntimeError: no battery service; the client pauses and calls it again every 0.001 s"
    ] * 2
    assert all(record.exc_info is not None for record in records)


def test_an_update_that_cannot_be_removed_does_not_end_the_client(
    script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenFolder(Script):
        """Replaces the device's folder of Updates by a file during an upload: nothing can be listed or removed."""

        def upload(self, header: m.UpdateHeader, read: ReadPayload) -> m.UploadReply:
            shutil.rmtree(tmp_path / "device" / "updates")
            (tmp_path / "device" / "updates").write_bytes(b"")
            return super().upload(header, read)

    coordinator = BrokenFolder(bundle=script.bundle, work=script.work)
    assert run(coordinator, tmp_path).num_accepted == 1
    assert "updates cannot be removed" in caplog.text


def test_the_error_that_ends_a_client_is_available_to_the_app(script: Script, tmp_path: Path) -> None:
    script.faults = {"enroll": Unauthenticated("no")}
    client = client_of(script, tmp_path)
    assert client.failure is None
    with raises(Conflict, "no"):
        client.run()
    assert isinstance(client.failure, Conflict)


@pytest.mark.parametrize("call", ["enroll", "check_in", "download", "train", "upload", "report"])
@pytest.mark.parametrize("kind", sorted(STATUS, key=lambda kind: kind.__name__))
def test_every_error_in_every_call_is_handled(
    script: Script, tmp_path: Path, call: str, kind: type[FaninError]
) -> None:
    script.faults = {call: kind("boom")}
    if call == "report":
        script.faults["upload"] = InvalidUpdate("no")
    fault = script.faults.pop(call) if call == "train" else None
    client = client_of(script, tmp_path, FailingTrainer(fault))
    try:
        client.run()
    except Conflict as exc:
        assert str(exc) == "boom"
        assert call != "train", "an error of the app's trainer is not the coordinator's refusal"
    else:
        assert client.num_accepted == 1 or script.failures


@pytest.mark.parametrize("call", ["enroll", "check_in"])
@pytest.mark.parametrize("kind", [RuntimeError, OSError, Corrupted, Unavailable, StorageFull])
def test_a_failed_call_before_an_assignment_is_retried(
    script: Script, tmp_path: Path, call: str, kind: type[Exception]
) -> None:
    script.faults = {call: kind("boom")}
    assert run(script, tmp_path).num_accepted == 1
    assert script.calls[call] == 2


@pytest.mark.parametrize("call", ["download", "train", "upload"])
def test_a_failure_of_the_operating_system_is_retried(script: Script, tmp_path: Path, call: str) -> None:
    fault = ConnectionResetError("reset")
    script.faults = {call: fault}
    client = run(script, tmp_path, FailingTrainer(fault if call == "train" else None))
    assert client.num_accepted == 1
    assert (script.failures, script.calls["check_in"]) == ([], 1)


def test_a_device_keeps_its_assignment_while_the_coordinators_files_are_damaged(script: Script, tmp_path: Path) -> None:
    script.faults = {"download": Corrupted("the coordinator's own state does not verify")}
    assert run(script, tmp_path).num_accepted == 1
    assert (script.failures, script.calls["check_in"]) == ([], 1)


@pytest.mark.parametrize("kind", [Unauthenticated, Conflict])
def test_a_permanent_refusal_of_the_coordinator_ends_the_client(
    script: Script, tmp_path: Path, kind: type[FaninError]
) -> None:
    script.faults = {"enroll": kind("no")}
    with raises(Conflict, "no"):
        run(script, tmp_path)


def test_a_refused_update_is_reported(script: Script, tmp_path: Path) -> None:
    script.faults = {"upload": InvalidUpdate("update: got 3 shifts, expected 2")}
    assert run(script, tmp_path).num_accepted == 0
    assert script.failures == ["update: got 3 shifts, expected 2 [FN-0005]"]


@pytest.mark.parametrize("kind", [NotFound, Conflict])
def test_an_update_that_no_round_waits_for_is_dropped(script: Script, tmp_path: Path, kind: type[FaninError]) -> None:
    script.faults = {"upload": kind("gone")}
    assert run(script, tmp_path).num_accepted == 1
    assert (script.failures, script.calls["check_in"]) == ([], 2)


def test_a_device_that_no_run_suits_logs_the_reason_and_continues(
    script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script.answer = m.Rejected(reason=m.RejectReason.UNSUITABLE, text="codec: got none")
    run(script, tmp_path)
    assert "rejected (unsuitable): codec: got none" in caplog.text


def test_more_parameters_than_the_manifest_names_are_not_fetched(script: Script, tmp_path: Path) -> None:
    original = script.work.version.parameters
    junk = tuple(ChunkRef(sha256=f"{index:064x}", size_bytes=1 << 20) for index in range(100))
    refs = (*original.chunks, *junk)
    oversized = Artifact(sha256=original.sha256, size_bytes=original.size_bytes + (100 << 20), chunks=refs)
    script.work = replace(script.work, version=replace(script.work.version, parameters=oversized))
    run(script, tmp_path)
    (reason,) = script.failures
    assert reason == (
        f"version 0 of run run: got parameters of {oversized.size_bytes} bytes, "
        f"expected {original.size_bytes} by the bundle's manifest [FN-0828]"
    )
    assert set(script.served_bytes) == {ref.sha256 for ref in script.work.bundle.manifest.chunks}


def test_bytes_are_counted_over_all_tries_of_an_assignment(script: Script, tmp_path: Path) -> None:
    artifacts = script.bundle.manifest.artifacts
    total = script.work.bundle.manifest.size_bytes + sum(artifact.size_bytes for artifact in artifacts.values())
    script.break_at = total - 10
    assert run(script, tmp_path).num_accepted == 1
    (header,) = script.headers
    assert header.telemetry.bytes_downloaded == total == sum(script.served_bytes.values())


def test_chunks_that_were_damaged_since_the_last_start_cost_no_assignment(script: Script, tmp_path: Path) -> None:
    assert run(script, tmp_path).num_accepted == 1
    for path in (tmp_path / "device" / "chunks").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    script.headers.clear()
    assert run(script, tmp_path).num_accepted == 1
    assert script.failures == []


@pytest.mark.parametrize("fault", ["for good", "for now"])
def test_a_failed_fetch_frees_space_but_keeps_the_chunks_of_the_next_try(
    script: Script, tmp_path: Path, fault: str
) -> None:
    cache = Cache(tmp_path / "device")
    (old,) = artifact_of(bytes(1000)).chunks
    cache.chunks.fetch(old, lambda _: [bytes(1000)])
    manifest = script.work.bundle.manifest
    if fault == "for good":
        script.work = replace(script.work, version=replace(script.work.version, signature=bytes(64)))
        run(script, tmp_path, max_bytes=500)
        assert script.failures[0].startswith("version 0 of run run: the signature does not match")
    else:
        script.break_at = manifest.size_bytes + 5
        run(script, tmp_path, max_bytes=500)
        assert set(script.served_bytes.values()) == {
            manifest.size_bytes,
            *(artifact.size_bytes for artifact in script.bundle.manifest.artifacts.values()),
        }
    assert not cache.chunks.has(old)


@pytest.mark.parametrize("loss_sum", [float("inf"), float("nan")])
def test_a_version_whose_loss_is_no_number_is_reported(script: Script, tmp_path: Path, loss_sum: float) -> None:
    run(script, tmp_path, RuntimeTrainer(LosingRuntime(loss_sum), Store()))
    (reason,) = script.failures
    assert reason.startswith(f"training: the Version's loss is not finite on these examples (got {loss_sum})")


@dataclass
class Charger:
    """A ``may_work`` that the test switches. The client calls it at each step."""

    is_plugged: bool = True
    num_refused: int = 0

    def __call__(self) -> bool:
        if not self.is_plugged:
            self.num_refused += 1
            # The charger is back at the second call.
            self.is_plugged = self.num_refused > 1
            return False
        return True


@dataclass
class UnpluggingTrainer:
    """Unplugs the charger before the first batch of its first training."""

    charger: Charger
    num_trainings: int = 0
    runtime: str = "synthetic 1"
    graph_format: str = "onnx"

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        self.num_trainings += 1
        self.charger.is_plugged = self.num_trainings > 1
        return SyntheticTrainer(partition=0).train(model, assignment, should_continue)


def test_a_training_stops_when_the_charger_is_unplugged_and_begins_again(script: Script, tmp_path: Path) -> None:
    charger = Charger()
    trainer = UnpluggingTrainer(charger)
    client = client_of(script, tmp_path, trainer, may_work=charger)
    client.run()
    assert (client.num_accepted, trainer.num_trainings, script.failures) == (1, 2, [])
    # The client checks in once more, only when the charger is back. It downloads nothing twice.
    assert (script.calls["check_in"], charger.num_refused) == (2, 2)
    assert set(script.served_bytes.values()) == {
        script.work.bundle.manifest.size_bytes,
        *(artifact.size_bytes for artifact in script.bundle.manifest.artifacts.values()),
    }


def test_a_download_stops_within_one_piece_and_resumes_from_its_offset(script: Script, tmp_path: Path) -> None:
    charger = Charger()
    unplug_offset = script.work.bundle.manifest.size_bytes + 5

    class UnpluggedDownload(Script):
        def download(self, download: m.Download) -> Iterator[bytes]:
            for data in super().download(download):
                if sum(self.served_bytes.values()) == unplug_offset and not charger.num_refused:
                    charger.is_plugged = False
                assert charger.is_plugged or sum(self.served_bytes.values()) == unplug_offset
                yield data

    coordinator = UnpluggedDownload(bundle=script.bundle, work=script.work)
    client = client_of(coordinator, tmp_path, may_work=charger)
    client.run()
    assert (client.num_accepted, coordinator.calls["check_in"]) == (1, 2)
    (header,) = coordinator.headers
    # Every byte was downloaded once: the interrupted piece was kept.
    total = script.work.bundle.manifest.size_bytes + sum(
        a.size_bytes for a in script.bundle.manifest.artifacts.values()
    )
    assert header.telemetry.bytes_downloaded == sum(coordinator.served_bytes.values()) == total


def test_an_upload_stops_before_its_next_piece_and_keeps_the_update(script: Script, tmp_path: Path) -> None:
    charger = Charger()
    num_read = []

    class UnpluggedUpload(Script):
        def upload(self, header: m.UpdateHeader, read: ReadPayload) -> m.UploadReply:
            num_read.append(len(read(0, 4)))
            charger.is_plugged = len(num_read) > 1
            num_read.append(len(read(4, 4)))
            return super().upload(header, read)

    coordinator = UnpluggedUpload(bundle=script.bundle, work=script.work)
    trainer = UnpluggingTrainer(Charger())
    trainer.num_trainings = 1
    client = client_of(coordinator, tmp_path, trainer, may_work=charger)
    client.run()
    assert (client.num_accepted, num_read, coordinator.failures) == (1, [4, 4, 4], [])
    # The stored Update was sent without a second training.
    assert trainer.num_trainings == 2


def test_a_stop_ends_a_training_within_one_batch(script: Script, tmp_path: Path) -> None:
    class Endless(UnpluggingTrainer):
        def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
            client.stop()
            while should_continue():
                self.num_trainings += 1
            raise AssertionError("should_continue returns True or raises")

    trainer = Endless(Charger())
    client = client_of(script, tmp_path, trainer)
    client.run()
    assert (client.num_accepted, trainer.num_trainings, client.failure) == (0, 0, None)


def test_may_work_is_called_at_most_ten_times_a_second_inside_a_step() -> None:
    now_s, call_times_s = 0.0, []

    def may_work() -> bool:
        call_times_s.append(now_s)
        return True

    conditions = Conditions(may_work, lambda: now_s)
    for step in range(1000):
        now_s = step / 1000
        assert conditions.should_continue()
    assert 9 <= len(call_times_s) <= 10


def test_two_threads_never_call_may_work_at_once() -> None:
    num_inside, max_inside = 0, 0

    def may_work() -> bool:
        nonlocal num_inside, max_inside
        num_inside += 1
        max_inside = max(max_inside, num_inside)
        time.sleep(0.05)
        num_inside -= 1
        return True

    conditions = Conditions(may_work, time.monotonic)
    threads = [threading.Thread(target=conditions.hold) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max_inside == 1
