"""The metrics of one coordinator: bounded series, and the values of a Run's quality."""

import asyncio
import json
from pathlib import Path

import pytest
from support.scrape import Scrape
from support.staleness import send, settle
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.protos.messages import (
    BanDevice,
    Command,
    DeviceChange,
    Evaluation,
    LoggedEvent,
    RoundFailed,
    Stop,
    UnbanDevice,
    VersionEvaluation,
    VersionPublished,
)
from fanin.server.access.limits import Limits
from fanin.server.care.certificates import local_certificates, utc_now
from fanin.server.care.forecast import DiskWatch
from fanin.server.health import Readiness
from fanin.server.storage.lanes import Durations
from fanin.server.storage.records import AuditFact, EnrolledDevice
from fanin.server.telemetry.exposition import Exposition, MetricSources, ScrapedSamples, add_quality
from fanin.server.telemetry.instruments import Instruments
from fanin.server.telemetry.record import RunTally
from fanin.server.telemetry.table import SHOWN_S
from fanin.simulation import run_virtual

MAX_RUNS = 6


def published(number: int, evaluation: Evaluation | None = None, **values: float) -> LoggedEvent:
    """Return the event of a Version of a Round."""
    event = VersionPublished(
        number=number, version_sha256="ab" * 32, parent=number - 1, round=number, evaluation=evaluation, **values
    )
    return LoggedEvent(sequence=number, time=100.0 * number, event=event)


def watched_disk(folder: Path) -> DiskWatch:
    """Return the disk of a folder that grows by 24 kB a day."""
    rows = [[hour * 3600.0, {"blobs": 1000 * hour}, 48_000, 0] for hour in range(4)]
    (folder / "usage.json").write_text(json.dumps(rows))

    async def num_rounds() -> int:
        return 0

    return DiskWatch(folder, num_rounds, lambda: 0.0)


def sources_of(place: Place, instruments: Instruments, folder: Path) -> MetricSources:
    """Return the sources of a coordinator."""
    return MetricSources(
        runs=place.runs,
        state=place.state,
        coordinator=place.coordinator,
        limits=Limits(),
        readiness=Readiness(),
        instruments=instruments,
        disk=watched_disk(folder),
        certificates=local_certificates(folder / "tls", frozenset({"localhost"}), utc_now),
        last_backup=lambda: None,
    )


def runs_in(scrape: Scrape) -> set[str]:
    """Return the Runs that have series."""
    return {value for _, labels in scrape.samples for key, value in labels if key == "run"}


def test_series_of_runs_are_bounded_and_end_a_day_after_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        place, instruments = open_place(tmp_path), Instruments(asyncio.get_running_loop().time)
        exposition = Exposition(sources_of(place, instruments, tmp_path), max_runs=MAX_RUNS)

        async def scrape() -> Scrape:
            return Scrape((await exposition.render(""))[0].decode())

        bundle = bundle_in(tmp_path)
        for number in range(MAX_RUNS + 5):
            await start(place.runs, bundle, plan(), f"run-{number}")
        await asyncio.sleep(1.0)
        first = await scrape()
        assert first.value("fanin_disk_growth_bytes_per_second") * 86400 == pytest.approx(24_000)
        assert first.value("fanin_disk_full_timestamp_seconds") == pytest.approx(3 * 3600 + 2 * 86400)
        assert first.value("fanin_runs", state="running") == MAX_RUNS + 5
        assert runs_in(first) == {f"run-{number}" for number in range(5, MAX_RUNS + 5)}
        for number in range(MAX_RUNS + 5):
            if number != 7:
                await place.runs.command(Command(command_id=f"stop-{number}", run_id=f"run-{number}", what=Stop()))
        await asyncio.sleep(60.0)
        stopped = await scrape()
        assert len(runs_in(stopped)) == MAX_RUNS
        assert stopped.value("fanin_run_state", run="run-10", state="stopped") == 1
        # A Round of a stopped Run has failed; nothing of before the first scrape is counted.
        assert stopped.value("fanin_rounds_total", run="run-10", outcome="failed") == 1
        await asyncio.sleep(SHOWN_S)
        assert runs_in(await scrape()) == {"run-7"}
        await place.runs.stop()

    run_virtual(main())


def test_a_failed_run_keeps_its_series_until_somebody_acts(tmp_path: Path) -> None:
    async def main() -> None:
        place, instruments = open_place(tmp_path), Instruments(asyncio.get_running_loop().time)
        exposition = Exposition(sources_of(place, instruments, tmp_path), max_runs=4)

        async def scrape() -> Scrape:
            return Scrape((await exposition.render(""))[0].decode())

        bundle = bundle_in(tmp_path)
        digest = bundle.manifest.artifacts[bundle.manifest.initial].chunks[0].sha256
        for number in range(6):
            await start(place.runs, bundle, plan(concurrency=1, buffer=1, quorum=1), f"run-{number}")
        await settle()
        # A Round of a damaged Version fails, and its Run with it.
        (tmp_path / "state" / "blobs" / digest[:2] / digest).write_bytes(b"damaged")
        for number in range(6):
            await send(place, f"device-{number}")
        await settle()
        assert (await scrape()).value("fanin_runs", state="failed") == 6
        await asyncio.sleep(7 * SHOWN_S)
        scraped = await scrape()
        assert len(runs_in(scraped)) == 4
        assert {scraped.value("fanin_run_state", run=run_id, state="failed") for run_id in runs_in(scraped)} == {1}
        for number in range(6):
            await place.runs.command(Command(command_id=f"stop-{number}", run_id=f"run-{number}", what=Stop()))
        stopped = await scrape()
        assert len(runs_in(stopped)) == 4
        assert {stopped.value("fanin_run_state", run=run_id, state="stopped") for run_id in runs_in(stopped)} == {1}
        await asyncio.sleep(SHOWN_S)
        assert runs_in(await scrape()) == set()
        await place.runs.stop()

    run_virtual(main())


def test_bans_and_entries_of_the_audit_log_are_counted(tmp_path: Path) -> None:
    async def main() -> None:
        place, instruments = open_place(tmp_path), Instruments(asyncio.get_running_loop().time)
        stores, device = place.state.stores, EnrolledDevice(public_key=bytes(range(32)).hex())
        await stores.audit.append(AuditFact(principal="coordinator", call="Start", subject="before"), 1.0)
        exposition = Exposition(sources_of(place, instruments, tmp_path))

        async def scrape() -> Scrape:
            return Scrape((await exposition.render(""))[0].decode())

        first = await scrape()
        assert first.value("fanin_devices_banned") == 0
        assert first.value("fanin_audit_entries_total", kind="process") == 0
        await place.state.devices.enroll([device], 2.0)
        await place.state.devices.change(
            DeviceChange(device_id=device.device_id, what=BanDevice(reason="harm")), None, 3.0
        )
        for outcome in ("begun", "done"):
            fact = AuditFact(principal="admin anna", call="Command", subject="run r: stop", outcome=outcome)
            await stores.audit.append(fact, 4.0)
        last = await scrape()
        assert last.value("fanin_devices_banned") == 1
        counts = {kind: last.value("fanin_audit_entries_total", kind=kind) for kind in ("enrollment", "device", "run")}
        assert counts == {"enrollment": 1, "device": 1, "run": 1}
        await place.state.devices.change(DeviceChange(device_id=device.device_id, what=UnbanDevice()), None, 5.0)
        assert (await scrape()).value("fanin_devices_banned") == 0

    run_virtual(main())


def test_a_tally_adds_events() -> None:
    tally = RunTally()
    evaluation = Evaluation(
        num_examples=10, loss=0.5, accuracy_float=0.9, accuracy_int8=0.8, int8_agreement=0.9, num_labels=10
    )
    tally.add(published(1, evaluation, round_s=3.0, num_saturated=4, train_loss=0.7, train_loss_examples=10))
    tally.add(LoggedEvent(sequence=2, time=150.0, event=RoundFailed(round=2, reason="no quorum")))
    tally.add(published(3, round_s=5.0))
    assert (tally.num_published, tally.num_failed, tally.num_saturated, tally.durations.sum_s) == (2, 1, 4, 8.0)
    assert (tally.next_sequence, tally.last_success_s) == (4, 300.0)
    tally.held_out = VersionEvaluation(
        version=1, data="test", time=1.0, values={"loss": 0.4, "accuracy": 0.85, "accuracy_int8": 0.84, "other": 1.0}
    )
    samples = ScrapedSamples()
    add_quality(samples, "r", tally)
    values = {family.name: family.samples[0].value for family in samples.families() if family.samples}
    # The last Round reports no training loss, and nobody evaluated Version 2.
    assert values == {
        "fanin_evaluation_version": 0,
        "fanin_evaluation_loss": 0.5,
        "fanin_evaluation_float_accuracy_ratio": 0.9,
        "fanin_evaluation_int8_accuracy_ratio": 0.8,
        "fanin_held_out_version": 1,
        "fanin_held_out_loss": 0.4,
        "fanin_held_out_float_accuracy_ratio": 0.85,
        "fanin_held_out_int8_accuracy_ratio": 0.84,
    }


def test_a_model_of_values_has_no_accuracy_and_a_problem_no_values() -> None:
    tally, samples = RunTally(), ScrapedSamples()
    evaluation = Evaluation(num_examples=10, loss=0.5, accuracy_float=0.0, accuracy_int8=0.0, int8_agreement=0.0)
    tally.add(published(1, evaluation, train_loss=0.25, train_loss_examples=3))
    tally.held_out = VersionEvaluation(version=1, data="test", time=1.0, problem="the file is gone")
    add_quality(samples, "r", tally)
    names = {family.name for family in samples.families() if family.samples}
    assert names == {"fanin_train_loss", "fanin_evaluation_version", "fanin_evaluation_loss"}


def test_durations_are_counted_up_to_their_bounds() -> None:
    durations = Durations((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 3.0):
        durations.note(seconds)
    assert durations.cumulative() == (2, 3, 4)
    assert durations.sum_s == 3.65
