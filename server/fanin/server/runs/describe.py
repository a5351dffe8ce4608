"""What an operator is told of a Run: the record's Rounds, and of the one under way what its machine knows."""

import asyncio

from fanin.protos.control import RoundInfo, RoundPhase, RunDescription, RunInfo
from fanin.server.rounds.effects import Tools
from fanin.server.runs.driver import RunDriver
from fanin.server.storage.sqlite.rounds import KeptRound, RoundMark

MAX_NAMED_DEVICES = 100
"""Enough to look for one; a cohort of a million would not fit into a message."""
_PHASES = {
    RoundMark.OPEN: RoundPhase.SELECTING,
    RoundMark.CLOSED: RoundPhase.FOLDING,
    RoundMark.PUBLISHED: RoundPhase.PUBLISHED,
    RoundMark.FAILED: RoundPhase.FAILED,
}


async def describe(driver: RunDriver, info: RunInfo, num_rounds: int, tools: Tools) -> RunDescription:
    """The Run of a driver, with its last Rounds."""
    run_id = driver.run_id
    kept = await tools.store_lane(lambda: tools.rounds.latest(run_id, max(num_rounds, 1)))
    machine = driver.course.round
    is_open = machine is not None and machine.is_open
    at_work = sorted(machine.at_work) if machine is not None and is_open else []
    deadline = machine.deadline if machine is not None and is_open else None
    left_s = 0.0 if deadline is None else max(deadline - asyncio.get_running_loop().time(), 0.0)
    return RunDescription(
        run=info,
        rounds=tuple(_info(one, driver if one is kept[0] else None) for one in kept[:num_rounds]),
        grid=kept[0].record.grid if kept else (),
        num_at_work=len(at_work),
        at_work=tuple(at_work[:MAX_NAMED_DEVICES]),
        deadline_s=left_s,
        num_devices=tools.devices.num_devices,
    )


def _info(kept: KeptRound, driver: RunDriver | None) -> RoundInfo:
    record = kept.record
    phase = _PHASES[record.mark]
    # What is durable is told by the record, and the steps between by the machine.
    machine = None if driver is None else driver.course.round
    if machine is not None and not record.mark.is_final:
        phase = RoundPhase(machine.phase.value)
    return RoundInfo(
        round=record.round,
        base_version=record.base_version,
        phase=phase,
        num_updates=kept.num_updates,
        opened_at=record.opened_at_s,
        version=kept.version,
    )
