"""The description of a Run for operators: its recorded Rounds, and the state of the Round under way."""

import asyncio

from fanin.protos.control import RoundInfo, RoundPhase, RunDescription, RunInfo
from fanin.server.rounds.machine import Cohort
from fanin.server.runs.driver import RunDriver
from fanin.server.storage.records import RoundMark, RoundSummary
from fanin.server.storage.stores import Stores

MAX_NAMED_DEVICES = 100
"""Devices at work that a description names: enough to look for one. A cohort of a million would not fit."""
_PHASES = {
    RoundMark.OPEN: RoundPhase.SELECTING,
    RoundMark.CLOSED: RoundPhase.FOLDING,
    RoundMark.PUBLISHED: RoundPhase.PUBLISHED,
    RoundMark.FAILED: RoundPhase.FAILED,
}


async def describe(driver: RunDriver, info: RunInfo, num_rounds: int, stores: Stores) -> RunDescription:
    """Return a Run with its last ``num_rounds`` Rounds, newest first."""
    latest = await stores.rounds.latest(driver.run_id, max(num_rounds, 1))
    machine = driver.course.round
    is_open = machine is not None and machine.is_open
    cohort = machine.cohort if machine is not None and is_open else Cohort()
    at_work = sorted(cohort.at_work)
    deadline = machine.deadline if machine is not None and is_open else None
    left_s = 0.0 if deadline is None else max(deadline - asyncio.get_running_loop().time(), 0.0)
    return RunDescription(
        run=info,
        rounds=tuple(_info(one, driver if one is latest[0] else None) for one in latest[:num_rounds]),
        grid=latest[0].record.grid if latest else (),
        num_at_work=len(at_work),
        at_work=tuple(at_work[:MAX_NAMED_DEVICES]),
        num_gave_up=len(cohort.gave_up),
        deadline_s=left_s,
        num_devices=stores.devices.num_devices,
    )


def _info(summary: RoundSummary, driver: RunDriver | None) -> RoundInfo:
    record = summary.record
    phase = _PHASES[record.mark]
    # The record has the durable steps of a Round, its machine the steps in between.
    machine = None if driver is None else driver.course.round
    if machine is not None and not record.mark.is_final:
        phase = machine.phase
    return RoundInfo(
        round=record.round,
        base_version=record.base_version,
        phase=phase,
        num_updates=summary.num_updates,
        opened_at=record.opened_at_s,
        version=summary.version,
    )
