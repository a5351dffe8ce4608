"""Runs whose ranges of activations the coordinator measures on its data set, through the production coordinator."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.measured import NAME, SHA256, FakeData, ranges
from support.rounds import finish_round
from support.stage_runs import falsify, problems, roll_back
from support.staleness import settle
from support.virtual import Place, bundle_in, open_place, plan, start

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.ranges import RANGES, ranges_table
from fanin.edge.tensors import encode_parameters
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of, cut
from fanin.protos.errors import InvalidPlan
from fanin.server.aggregation.auxiliary import MeasureAgain
from fanin.server.aggregation.parameters import load_version
from fanin.server.aggregation.verify import Verdict, verify_run
from fanin.server.storage.records import MeasuredRanges
from fanin.simulation import LoopbackTransport, run_virtual
from fanin.simulation.federation.synthetic import ACTIVATION

DEVICES = ("a", "b", "c")
PLAN = plan(concurrency=3, buffer=3, quorum=3, max_rounds=50, ranges="data")
CAPABILITIES = m.Capabilities(codecs=("fixed32",), runtimes=("scripted 1",), graph_formats=("onnx",))
NEED = f"not recomputed, needs data set {NAME} with digest {SHA256}"


def by_number(version: m.Version) -> MeasuredRanges:
    """Return ranges that name their Version."""
    return ranges(-version.number, 2.0 * version.number)


async def begin(folder: Path, data: FakeData) -> tuple[Place, Bundle]:
    place, bundle = open_place(folder, data=data), bundle_in(folder)
    await start(place.runs, bundle, PLAN)
    await settle()
    return place, bundle


async def send_updates(place: Place) -> None:
    """Let the devices finish a Round."""
    for device in DEVICES:
        check_in = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=0.1)
        answer = await place.coordinator.check_in(device, check_in)
        assert isinstance(answer, m.Assigned), answer
        assert answer.assignment.range_examples == 0
        line = LoopbackTransport(fleet=place.coordinator, device=device, latency_s=0.01)
        await finish_round(line, answer.assignment)


async def take_round(place: Place, bundle: Bundle) -> tuple[int, tuple[float, float]]:
    """Let the devices finish a Round. Return the number and the range of its Version."""
    await send_updates(place)
    await asyncio.sleep(3.0)
    await settle()
    version = await place.state.stores.runs.newest_version("run")
    values = load_version(place.state.blobs, version, bundle.manifest).ranges
    assert values is not None
    low, high = values.tolist()
    return version.number, (low, high)


def verdicts(place: Place, measure: MeasureAgain | None = None) -> list[Verdict]:
    return list(verify_run(place.state, "run", measure=measure))


def test_a_version_has_the_ranges_that_were_measured_for_it(tmp_path: Path) -> None:
    async def main() -> None:
        data = FakeData(by_number)
        place, bundle = await begin(tmp_path, data)
        assert await take_round(place, bundle) == (1, (-1.0, 2.0))
        assert await take_round(place, bundle) == (2, (-2.0, 4.0))
        await roll_back(place, 1, "back")
        back = await place.state.stores.runs.newest_version("run")
        first = place.state.runs.version("run", 1)
        assert first is not None
        assert (back.number, back.auxiliary) == (3, first.auxiliary)
        assert await take_round(place, bundle) == (4, (-4.0, 8.0))
        assert data.versions == [1, 2, 4]
        await place.runs.stop()
        assert [each.ranges for each in verdicts(place)] == ["", NEED, NEED, "", NEED]
        assert problems(place) == []

    run_virtual(main())


def test_a_measurement_that_fails_costs_the_version_its_own_ranges_and_nothing_else(tmp_path: Path) -> None:
    def sometimes(version: m.Version) -> MeasuredRanges:
        if version.number in (1, 3):
            return MeasuredRanges(data=NAME, problem="its process ended")
        return replace(by_number(version), values=np.array([-2.0, np.nan], "<f4").tobytes())

    async def main() -> None:
        place, bundle = await begin(tmp_path, FakeData(sometimes))
        before = (ACTIVATION.low, ACTIVATION.high)
        # An activation that was not measured keeps its range, as do all of them after a failure.
        expected = [(1, before), (2, (-2.0, before[1])), (3, (-2.0, before[1]))]
        assert [await take_round(place, bundle) for _ in range(3)] == expected
        events = [entry.event for entry in place.state.runs.events("run")]
        (warning,) = (event for event in events if isinstance(event, m.RunWarned))
        assert (warning.code, warning.subject) == ("ranges_kept", NAME)
        assert "the version of round 1 has the ranges" in warning.text
        assert "its process ended" in warning.text
        await place.runs.stop()
        assert problems(place) == []
        kept = "those of the version before, because none were measured: its process ended"
        assert [each.ranges for each in verdicts(place)] == ["", kept, NEED, kept]

    run_virtual(main())


def test_a_successor_without_the_data_set_continues_with_the_recorded_ranges(tmp_path: Path) -> None:
    async def main() -> None:
        place, bundle = await begin(tmp_path, FakeData(by_number))
        writer = place.state.stores
        await send_updates(place)
        # In the middle of the measurement.
        await asyncio.sleep(0.5)
        await place.runs.stop()
        record = place.state.rounds.round("run", 1)
        assert record is not None
        assert (record.mark.value, record.measured) == ("closed", None)
        lease = await writer.take("run")
        await lease.writer.keep_ranges(1, ranges(-5.0, 6.0))

        data = FakeData(by_number)
        place = open_place(tmp_path, data=data)
        await place.runs.start()
        await asyncio.sleep(3.0)
        assert data.versions == []
        version = await place.state.stores.runs.newest_version("run")
        values = load_version(place.state.blobs, version, bundle.manifest).ranges
        assert values is not None
        assert (version.number, values.tolist()) == (1, [-5.0, 6.0])
        await place.runs.stop()

        place = open_place(tmp_path)
        await place.runs.start()
        await settle()
        assert await take_round(place, bundle) == (2, (-5.0, 6.0))
        await place.runs.stop()
        assert problems(place) == []
        assert "got no data set 'digits', expected fanin serve --data digits=PATH" in verdicts(place)[2].ranges

    run_virtual(main())


@pytest.mark.parametrize(
    ("again", "text", "problem"),
    [
        (ranges(-1.0, 2.0), "equal bits", ""),
        (ranges(-1.001, 2.0), "within 0.0003 of their width", ""),
        (ranges(-1.5, 2.0), "", "they differ by 0.17 of their width"),
        (ranges(np.nan, 2.0), "", "they differ by inf of their width"),
        (replace(ranges(-1.0, 2.0), data_sha256="cd"), f"{NEED}; --data has a file with digest cd", ""),
        (MeasuredRanges(data=NAME, problem="no such file"), f"{NEED}; no such file", ""),
    ],
)
def test_verify_measures_again(tmp_path: Path, again: MeasuredRanges, text: str, problem: str) -> None:
    async def main() -> None:
        place, bundle = await begin(tmp_path, FakeData(by_number))
        await take_round(place, bundle)
        await place.runs.stop()
        other = replace(again, runtime="other 2")
        _, verdict = verdicts(place, lambda recorded, bundle, version: other)
        assert verdict.ranges.endswith(text)
        assert verdict.problem.endswith(problem)
        assert verdict.has_recomputed_ranges == (again.data_sha256 == SHA256)
        if verdict.has_recomputed_ranges:
            assert "digits with other 2" in verdict.ranges + verdict.problem

    run_virtual(main())


def test_verify_finds_ranges_that_are_not_the_recorded_ones(tmp_path: Path) -> None:
    async def main() -> None:
        place, bundle = await begin(tmp_path, FakeData(by_number))
        await take_round(place, bundle)
        await place.runs.stop()
        data = encode_parameters(ranges_table([ACTIVATION]), np.array([-1.0, 2.5], np.float32))
        for ref, piece in cut(data):
            place.state.blobs.put(ref.sha256, piece)
        falsify(tmp_path, place, {RANGES: artifact_of(data)})
        assert problems(place) == ["round 1: recomputed another auxiliary tensor ranges"]

    run_virtual(main())


def test_a_plan_without_a_data_set_and_a_coordinator_without_it_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidPlan) as refused:
        replace(PLAN, evaluation=replace(PLAN.evaluation, data=""))
    assert refused.value.code == "FN-1490"

    async def main() -> list[str]:
        place, codes = open_place(tmp_path), []
        for call in (place.runs.check_plan(PLAN), start(place.runs, bundle_in(tmp_path), PLAN)):
            with pytest.raises(InvalidPlan) as refused:
                await call
            codes.append(refused.value.code)
        await place.runs.stop()
        return codes

    assert run_virtual(main()) == ["FN-0250", "FN-0250"]
