"""Rounds that a restart continues: the deadline after a change of the wall clock, and the files of earlier Rounds."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.staleness import send, settle
from support.virtual import bundle_in, open_place, plan, start

from fanin.protos.messages import RunState
from fanin.server.protocols.plain import PLAIN
from fanin.server.rounds.opening import Moment, RoundHistory, begin_round
from fanin.server.storage.contracts import values
from fanin.server.storage.records import RunRecord
from fanin.simulation import run_virtual


@pytest.mark.parametrize(("wall_s", "left_s"), [(30.0, 40.0), (75.0, -5.0), (-1e6, values.COHORT.deadline_s)])
def test_a_wall_clock_that_was_set_back_does_not_postpone_a_deadline(wall_s: float, left_s: float) -> None:
    run = RunRecord(start=values.start(), state=RunState.RUNNING, reason="", max_rounds=5)
    record = replace(values.opened(), deadline_at_s=70.0)
    state, _ = begin_round(run, PLAIN, record, Moment(now=1000.0, wall_s=wall_s), RoundHistory(extension_s=0.0))
    assert state.deadline == 1000.0 + left_s


def test_a_restart_removes_payloads_without_a_record_of_the_round_before(tmp_path: Path) -> None:
    """The process that ended may have published the newest Version without removing the files of its Round."""

    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(concurrency=1, buffer=1, quorum=1))
        await send(place, "device")
        await settle()
        await place.runs.stop()
        (recorded,) = (tmp_path / "state" / "updates" / "run" / "1").iterdir()
        unrecorded = recorded.with_name("late.0123456789abcdef.payload")
        unrecorded.write_bytes(b"the database failed, and the device never returned")
        place = open_place(tmp_path)
        await place.runs.start()
        await settle()
        assert list(recorded.parent.iterdir()) == [recorded]
        await place.runs.stop()

    run_virtual(main())
