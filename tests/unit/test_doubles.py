"""A device key that is online twice: the operator gets one warning, and each of the two processes is told."""

import asyncio
from pathlib import Path

from support.staleness import CAPABILITIES, assignment, settle
from support.virtual import bundle_in, open_place, plan, start

from fanin.clients.device.session.machine import LONGEST_PAUSE_S
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

        told = set[int]()

        async def process(number: int) -> None:
            while True:
                check = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=40.0)
                answer = await place.coordinator.check_in("b", check)
                if isinstance(answer, m.Rejected):
                    assert "with a --state of its own" in answer.text
                    told.add(number)
                    await asyncio.sleep(LONGEST_PAUSE_S - 20.0 * number)
                else:
                    assert isinstance(answer, m.Wait)
                    await asyncio.sleep(answer.retry_max_s)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(process(0))]
            await asyncio.sleep(100.0)
            assert not told
            assert (await place.runs.describe("run", 1)).warnings == ()
            tasks.append(group.create_task(process(1)))
            await asyncio.sleep(400.0)
            # The owner of each machine is told.
            assert told == {0, 1}
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
