"""A device key that is online twice: the operator gets one warning."""

import asyncio
from pathlib import Path

from support.staleness import CAPABILITIES, assignment, settle
from support.virtual import bundle_in, open_place, plan, start

from fanin.protos import messages as m
from fanin.protos.messages import RunWarned
from fanin.server.fleet.checkins import WINDOW_S, Doubles
from fanin.simulation import run_virtual


def test_two_processes_with_one_key_are_one_warning(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(concurrency=1, buffer=1, quorum=1, max_rounds=3))
        await settle()
        # The only place is taken, so the others wait.
        await assignment(place, "a")

        async def process() -> None:
            while True:
                check = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=40.0)
                answer = await place.coordinator.check_in("b", check)
                assert isinstance(answer, m.Wait)
                await asyncio.sleep(answer.retry_max_s)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(process())]
            await asyncio.sleep(100.0)
            assert (await place.runs.describe("run", 1)).warnings == ()
            tasks.append(group.create_task(process()))
            await asyncio.sleep(300.0)
            (warning,) = (await place.runs.describe("run", 1)).warnings
            assert (warning.code, warning.subject) == ("shared_key", "b")
            events = [entry.event for entry in place.state.runs.events("run")]
            assert sum(isinstance(event, RunWarned) for event in events) == 1
            for task in tasks:
                task.cancel()
        await place.runs.stop()

    run_virtual(main())


def test_a_device_with_a_bad_network_is_not_online_twice() -> None:
    doubles = Doubles()
    assert not any(doubles.note("a", number * WINDOW_S * 0.6) for number in range(20))
