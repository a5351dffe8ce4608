"""Selection policies through the production coordinator: fairness over Rounds and restarts, and broken policies."""

import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.staleness import CAPABILITIES, assignment, send, settle
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.protos import messages as m
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import (
    MAX_PAGE_DEVICES,
    AcceptedDevices,
    Command,
    Pause,
    Resume,
    RoundFailed,
    RunState,
)
from fanin.server.rounds.opening import MAX_RECALLED_ROUNDS, recall_participation
from fanin.server.selection.participation import Participation
from fanin.server.storage.contracts import values
from fanin.server.storage.memory.database import MemoryDatabase
from fanin.server.storage.memory.rounds import MemoryRounds
from fanin.server.storage.memory.runs import MemoryRuns
from fanin.server.storage.memory.state import MemoryState
from fanin.server.storage.memory.writer import MemoryLeases
from fanin.simulation import run_virtual

DEVICES = "abcdef"
FAIR = plan(concurrency=2, buffer=2, quorum=2, max_rounds=999, selection="least_recent")


async def command(place: Place, what: Pause | Resume) -> None:
    number = len(await place.state.stores.runs.event_page("run", 0))
    await place.runs.command(Command(command_id=f"command-{number}", run_id="run", what=what))


async def select_devices(place: Place) -> dict[str, m.Assignment]:
    """Resume the paused Run while all devices wait. Return the Assignments of the selected devices."""
    check_in = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=30.0)
    tasks = {device: asyncio.create_task(place.coordinator.check_in(device, check_in)) for device in DEVICES}
    await settle()
    await command(place, Resume())
    await settle()
    answers = {device: task.result() for device, task in tasks.items() if task.done()}
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    return {device: answer.assignment for device, answer in answers.items() if isinstance(answer, m.Assigned)}


async def take_round(place: Place) -> str:
    """Complete a Round with the selected devices. Return their names."""
    await command(place, Pause())
    assignments = await select_devices(place)
    for device, work in assignments.items():
        assert (await send(place, device, work)).update_state is m.UpdateState.ACCEPTED
    await settle()
    return "".join(sorted(assignments))


def test_least_recent_selects_every_device_also_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path, order_seed=5)
        await start(place.runs, bundle_in(tmp_path), FAIR)
        await settle()
        first = [await take_round(place) for _ in range(3)]
        assert sorted("".join(first)) == list(DEVICES)
        second = [await take_round(place)]
        await place.runs.stop()
        place = open_place(tmp_path, order_seed=6)
        await place.runs.start()
        await settle()
        second += [await take_round(place) for _ in range(2)]
        assert second == first
        await place.runs.stop()

    run_virtual(main())


def test_a_device_that_never_sends_an_update_does_not_keep_the_place_of_a_new_one(tmp_path: Path) -> None:
    """Participation counts Assignments. Otherwise devices that always give up would be first in each Round."""

    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), FAIR)
        await settle()
        await command(place, Pause())
        assignments = await select_devices(place)
        for device, work in assignments.items():
            report = m.Report(assignment_id=work.assignment_id, failure="no examples")
            await place.coordinator.report(device, report)
        await command(place, Pause())
        assert not assignments.keys() & (await select_devices(place)).keys()
        await place.runs.stop()

    run_virtual(main())


def test_a_restart_recalls_the_last_rounds_only(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        run_plan = plan(concurrency=1, buffer=1, quorum=1, max_rounds=999, selection="least_recent")
        await start(place.runs, bundle_in(tmp_path), run_plan)
        await settle()
        await send(place, "early")
        for _ in range(MAX_RECALLED_ROUNDS):
            await settle()
            await send(place, "late")
        await settle()
        await place.runs.stop()
        place = open_place(tmp_path)
        await place.runs.start()
        await settle()
        participation = place.runs.driver("run").course.participation
        # The open Round counts as a recalled Round.
        assert participation.last_round("late") == MAX_RECALLED_ROUNDS + 1
        assert participation.last_round("early") == 0
        await place.runs.stop()

    run_virtual(main())


class CountedPages(MemoryRounds):
    """A store that counts the pages of devices that it returns."""

    num_pages = 0

    async def accepted_devices(self, run_id: str, round_number: int, from_index: int) -> AcceptedDevices | None:
        """See ``RoundStore.accepted_devices``."""
        self.num_pages += 1
        return await super().accepted_devices(run_id, round_number, from_index)


@pytest.mark.parametrize(("max_devices", "num_pages"), [(MAX_PAGE_DEVICES + 9, 2), (MAX_PAGE_DEVICES - 9, 1)])
def test_a_restart_recalls_the_devices_of_a_round_a_page_at_a_time(max_devices: int, num_pages: int) -> None:
    """A restart reads all pages of a Round with many devices, but stops when the table is full."""

    async def main() -> None:
        database, num_devices = MemoryDatabase(), MAX_PAGE_DEVICES + 1
        rounds = CountedPages(database)
        stores = replace(MemoryState().open(lambda: 1.0).stores, rounds=rounds)
        await MemoryRuns(database).add_run(values.start(), 1.0)
        writer = await MemoryLeases(database).take(values.RUN, "test", 1.0)
        await writer.open(values.opened())
        update = values.committed("any")
        for index in range(num_devices):
            await writer.commit(replace(update, device_id=f"device-{index}"), buffer=num_devices)
        await writer.close(1, cohort=values.COHORT, now_s=20.0)
        participation = Participation(max_devices)
        await recall_participation(values.RUN, participation, stores)
        last_rounds = [participation.last_round(f"device-{index}") for index in range(num_devices)]
        assert sum(last_rounds) == min(num_devices, max_devices)
        assert rounds.num_pages == num_pages

    run_virtual(main())


def install(folder: Path, body: str) -> None:
    """Write a distribution with a selection policy ``own`` to a folder, as pip would."""
    info = folder / "own_policy-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fanin.selection_policies]\nown = own_policy:own\n")
    (folder / "own_policy.py").write_text(f"def own(waiting, num_places, round_number, rng):\n    {body}\n")


async def start_with_policy(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch, concurrency: int) -> Place:
    """Start a coordinator with a Run that selects devices by the policy ``own``."""
    install(folder / "site", body)
    monkeypatch.syspath_prepend(folder / "site")
    monkeypatch.delitem(sys.modules, "own_policy", raising=False)
    place = open_place(folder)
    run_plan = plan(concurrency=concurrency, buffer=2, quorum=2, selection="own")
    await start(place.runs, bundle_in(folder), run_plan)
    await settle()
    return place


def outcome_of(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Sequence[str], RunState]:
    """Run the policy. Return the reasons of failed Rounds, the assigned devices, and the state of the Run."""

    async def main() -> tuple[list[str], Sequence[str], RunState]:
        place = await start_with_policy(folder, body, monkeypatch, concurrency=2)
        await command(place, Pause())
        assignments = await select_devices(place)
        events = [entry.event for entry in await place.state.stores.runs.event_page("run", 0)]
        reasons = [event.reason for event in events if isinstance(event, RoundFailed)]
        state = (await place.runs.info("run")).state
        await place.runs.stop()
        return reasons, sorted(assignments), state

    return run_virtual(main())


def test_a_policy_of_another_distribution_selects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "return sorted(waiting, key=lambda device: device.device_id)[-num_places:]"
    assert outcome_of(tmp_path, body, monkeypatch) == ([], ["e", "f"], RunState.RUNNING)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return waiting", "got more than 2 devices, expected at most one for each of 2 places"),
        ("return ['ghost']", "got something at index 0 that is not one of the 6 waiting devices"),
        ("return 1 / 0", "raised ZeroDivisionError: division by zero, expected a sequence of waiting devices"),
    ],
)
def test_a_broken_policy_fails_the_round_with_one_error_and_assigns_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, body: str, text: str
) -> None:
    with caplog.at_level(logging.ERROR):
        reasons, devices, state = outcome_of(tmp_path, body, monkeypatch)
    reason = f"the selection policy 'own' broke its contract: {text}"
    # Each of the three Rounds fails once. Then the Run fails.
    assert reasons == [f"{reason}; the coordinator's log has the details"] * 3
    assert (devices, state) == ([], RunState.FAILED)
    assert [record.getMessage() for record in caplog.records] == [f"run run: {reason}"] * 3


def test_a_run_with_an_unknown_policy_does_not_start(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        with pytest.raises(InvalidPlan, match="FN-0210"):
            await start(place.runs, bundle_in(tmp_path), plan(selection="unifrom"))
        assert (await place.runs.listed()).runs == ()

    run_virtual(main())


def test_a_round_whose_policy_chooses_no_device_reports_it_until_it_chooses_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        body = "return [one for one in waiting if one.device_id == 'f'][:num_places]"
        place = await start_with_policy(tmp_path, body, monkeypatch, concurrency=2)
        check_in = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=30.0)
        tasks = [asyncio.create_task(place.coordinator.check_in(device, check_in)) for device in "abc"]
        await settle()
        expected = "selection policy own chose none of 3 waiting devices"
        assert (await place.runs.describe("run", 1)).run.reason == expected
        tasks.append(asyncio.create_task(place.coordinator.check_in("f", check_in)))
        await settle()
        assert (await place.runs.describe("run", 1)).run.reason == ""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await place.runs.stop()

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    assert [record.getMessage() for record in caplog.records] == [
        "run run: round 1 waits: selection policy own chose none of 1 waiting device"
    ]


def test_places_that_become_free_at_once_are_offered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[int]:
        body = "own.places += [num_places]\n    return waiting[:num_places]\nown.places = []"
        place = await start_with_policy(tmp_path, body, monkeypatch, concurrency=4)
        assignments = {device: await assignment(place, device) for device in "abcd"}
        check_in = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=30.0)
        tasks = [asyncio.create_task(place.coordinator.check_in(device, check_in)) for device in "efgh"]
        await settle()
        places = sys.modules["own_policy"].own.places
        places.clear()
        reports = {
            device: m.Report(assignment_id=row.assignment_id, failure="no") for device, row in assignments.items()
        }
        await asyncio.gather(*(place.coordinator.report(device, report) for device, report in reports.items()))
        assert all(isinstance(answer, m.Assigned) for answer in await asyncio.gather(*tasks))
        await place.runs.stop()
        return list(places)

    assert run_virtual(main()) == [4]
