"""The deadline of a Round moves while devices make progress: bounded, recorded, and resumed after a restart."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path

from support.staleness import assignment, send, settle
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.protos import messages as m
from fanin.protos.messages import RoundExtended, RoundFailed, VersionPublished
from fanin.server.protocols import events as e
from fanin.server.protocols.machine import Round, Rules
from fanin.server.protocols.plain import PLAIN
from fanin.server.selection.presence import Presence
from fanin.simulation import run_virtual

RULES = Rules(concurrency=2, buffer=2, quorum=2, deadline_s=60.0, max_extension_s=7.0)
LONG = plan(concurrency=1, buffer=1, quorum=1, deadline_s=60.0, max_rounds=1)
LONG = replace(LONG, cohort=replace(LONG.cohort, max_extension_s=30.0, min_report_s=math.inf))


def open_round(rules: Rules = RULES) -> Round:
    state = Round(protocol=PLAIN, rules=rules)
    for device in ("a", "b"):
        state, _ = state.step(e.CheckedIn(device=device), 0.0)
    return state


def test_the_deadline_moves_by_a_twentieth_up_to_the_limit() -> None:
    state, moments = open_round(), []
    for now, extension_s in ((60.0, 3.0), (63.0, 6.0), (66.0, 7.0)):
        assert state.wake_at == now
        state, effects = state.step(e.TimePassed(progressing=("a",)), now)
        moments.append(state.deadline)
        record = e.RecordExtension(extension_s=extension_s, devices=("a",))
        assert effects == (record, e.KeepDeadline(deadline=60.0 + extension_s))
    assert moments == [63.0, 66.0, 67.0]
    assert state.step(e.TimePassed(progressing=("a",)), 67.0)[1] == (e.Close(),)


def test_the_deadline_does_not_move_without_progress_or_before_its_time() -> None:
    assert open_round().step(e.TimePassed(progressing=("a",)), 59.0) == (open_round(), ())
    assert open_round().step(e.TimePassed(), 60.0)[1] == (e.Close(),)
    plain = replace(RULES, max_extension_s=0.0)
    assert open_round(plain).step(e.TimePassed(progressing=("a",)), 60.0)[1] == (e.Close(),)


def test_a_quorum_that_came_in_time_closes_the_round_as_before() -> None:
    rules = replace(RULES, quorum=1, min_report_s=1.0, report_factor=2.0)
    state, _ = open_round(rules).step(e.UpdateCommitted(device="a"), 10.0)
    assert state.wake_at == 20.0
    assert state.step(e.TimePassed(progressing=("b",)), 20.0)[1] == (e.Close(),)


def test_an_update_after_the_deadline_moved_keeps_the_times_of_the_quorum() -> None:
    rules = replace(RULES, quorum=1, min_report_s=1.0, report_factor=2.0)
    state, _ = open_round(rules).step(e.TimePassed(progressing=("a",)), 60.0)
    state, _ = state.step(e.UpdateCommitted(device="a"), 61.0)
    assert (state.quorum_s, state.wake_at) == (61.0, 63.0)


def test_a_device_makes_progress_only_while_its_step_rises() -> None:
    presence = Presence(1.0)
    for device, step in (("a", 1), ("b", 1), ("c", 9)):
        presence.note(device, 0.0, m.TrainingProgress(step=step, num_steps=9))
    presence.note("a", 1.0, m.TrainingProgress(step=2, num_steps=9))
    presence.note("b", 1.0, m.TrainingProgress(step=1, num_steps=9))
    assert set(presence.progressing(1.0)) == {"a", "c"}
    assert set(presence.progressing(5.0)) == {"c"}
    presence.end("c")
    assert presence.progressing(5.0) == ()


async def train(place: Place, work: m.Assignment, num_reports: int) -> None:
    for step in range(1, num_reports + 1):
        await asyncio.sleep(1.0)
        progress = m.TrainingProgress(step=step, num_steps=1000)
        await place.coordinator.report("a", m.Report(assignment_id=work.assignment_id, progress=progress))


def events(place: Place, kind: type) -> list[object]:
    return [entry.event for entry in place.state.runs.events("run") if isinstance(entry.event, kind)]


def test_a_slow_device_that_makes_progress_is_awaited_also_over_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), LONG)
        await settle()
        work = await assignment(place, "a")
        await train(place, work, 70)
        (first, *_) = events(place, RoundExtended)
        assert first == RoundExtended(round=1, extension_s=3.0, num_devices=1, device_ids=("a",))
        before = len(events(place, RoundExtended))
        await place.runs.stop()
        place = open_place(tmp_path)
        await place.runs.start()
        await settle()
        await train(place, work, 10)
        extended = events(place, RoundExtended)
        assert len(extended) > before
        assert max(event.extension_s for event in extended) <= 30.0  # type: ignore[attr-defined]
        assert (await send(place, "a", work)).update_state is m.UpdateState.ACCEPTED
        await settle()
        assert [event.round for event in events(place, VersionPublished) if event.round] == [1]  # type: ignore[attr-defined]
        await place.runs.stop()

    run_virtual(main())


def test_no_device_extends_a_round_beyond_the_limit_or_while_it_stands_still(tmp_path: Path) -> None:
    async def main(folder: Path, num_reports: int) -> float:
        place = open_place(folder)
        await start(place.runs, bundle_in(folder), LONG)
        await settle()
        work = await assignment(place, "a")
        begun_s = asyncio.get_running_loop().time()
        await train(place, work, num_reports)
        async for entry in place.runs.watch("run", 0):
            if isinstance(entry.event, RoundFailed):
                break
        ended_s = asyncio.get_running_loop().time()
        await place.runs.stop()
        return ended_s - begun_s

    for name in ("always", "stopped"):
        (tmp_path / name).mkdir()
    assert 90.0 <= run_virtual(main(tmp_path / "always", 95)) <= 97.0
    assert 60.0 <= run_virtual(main(tmp_path / "stopped", 20)) <= 61.0
