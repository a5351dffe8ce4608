"""The declared statistics of a Plan in the event of a Version."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.staleness import TABLE, assignment, settle, watched
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.clients.device.updates import Change, make_update
from fanin.protos import messages as m
from fanin.protos.errors import InvalidUpdate
from fanin.protos.messages import RunState
from fanin.protos.plans import Plan, Statistic, StopPlan
from fanin.simulation import LoopbackTransport, run_virtual


def test_a_statistic_that_no_device_reported_is_left_out(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        names = ("words", "zeros", "silent")
        run_plan = replace(
            plan(concurrency=1, buffer=1, quorum=1, max_rounds=1),
            statistics=tuple(Statistic(name=name, bound=1000) for name in names),
        )
        await start(place.runs, bundle_in(tmp_path), run_plan)
        await settle()
        counts = {m.EXAMPLES: 10, "words": 7, "zeros": 0}
        change = Change(values=np.zeros(TABLE.num_values, np.float32), counts=counts)
        header, payload = make_update(await assignment(place, "a"), TABLE, change, m.Telemetry(runtime="synthetic 1"))
        transport = LoopbackTransport(fleet=place.coordinator, device="a", latency_s=0.01)
        await transport.upload(header, lambda first, size: payload[first : first + size])
        await settle()
        (version,) = await watched(place)
        assert version.statistics == {"words": 7, "zeros": 0}
        await place.runs.stop()

    run_virtual(main())


async def upload(place: Place, device: str, counts: dict[str, int], work: m.Assignment | None = None) -> m.Assignment:
    """Send an Update with these statistics. Return its Assignment."""
    work = work or await assignment(place, device)
    change = Change(values=np.zeros(TABLE.num_values, np.float32), counts={m.EXAMPLES: 10} | counts)
    header, payload = make_update(work, TABLE, change, m.Telemetry(runtime="synthetic 1"))
    line = LoopbackTransport(fleet=place.coordinator, device=device, latency_s=0.01)
    reply = await line.upload(header, lambda first, size: payload[first : first + size])
    assert reply.update_state is m.UpdateState.ACCEPTED
    return work


def plan_of(num_devices: int) -> Plan:
    return plan(concurrency=num_devices, buffer=num_devices, quorum=num_devices, max_rounds=1)


def test_a_device_that_reports_the_float_evaluation_alone_neither_lowers_the_int8_accuracy_nor_pauses_the_run(
    tmp_path: Path,
) -> None:
    in_float = {m.EVAL_EXAMPLES: 50, m.EVAL_LOSS: 50 * m.LOSS_UNIT}
    labels = {m.EVAL_PREDICTIONS: 50, m.EVAL_CORRECT_FLOAT: 45}
    in_int8 = {m.EVAL_CORRECT_INT8: 45, m.EVAL_AGREE: 50}

    async def main() -> None:
        place = open_place(tmp_path)
        stop = StopPlan(max_rounds=1, max_int8_drop=1.0)
        await start(place.runs, bundle_in(tmp_path), replace(plan_of(2), stop=stop))
        await settle()
        work = await assignment(place, "a")
        parts = (labels, labels | {m.EVAL_CORRECT_INT8: 45}, {m.EVAL_CORRECT_FLOAT: 45})
        for liar, part in zip("cde", parts, strict=True):
            with pytest.raises(InvalidUpdate, match="FN-0637"):
                await upload(place, liar, in_float | part)
        await upload(place, "a", in_float, work)
        await upload(place, "b", in_float | labels | in_int8)
        (version,) = await watched(place)
        evaluation = version.evaluation
        assert evaluation is not None
        # 45 of the 50 labels that both models predicted. Counted over 100, int8 would have 0.45.
        assert (evaluation.accuracy_float, evaluation.accuracy_int8, evaluation.num_examples) == (0.9, 0.9, 100)
        assert (await place.runs.info("run")).state is RunState.FINISHED
        await place.runs.stop()

    run_virtual(main())


def test_a_mean_is_over_the_examples_of_the_devices_that_report_its_sum(tmp_path: Path) -> None:
    names = ("train.words", "evaluate.words", "words")

    async def main() -> None:
        place = open_place(tmp_path)
        run_plan = replace(plan_of(2), statistics=tuple(Statistic(name=name, bound=1000) for name in names))
        await start(place.runs, bundle_in(tmp_path), run_plan)
        await settle()
        await upload(place, "a", dict.fromkeys(names, 30) | {m.EVAL_EXAMPLES: 6})
        await upload(place, "b", {m.EVAL_EXAMPLES: 94})
        (version,) = await watched(place)
        assert version.statistics == dict.fromkeys(names, 30)
        assert version.statistics_examples == {"train.words": 10, "evaluate.words": 6}
        await place.runs.stop()

    run_virtual(main())
