"""Runs whose Rounds refresh the ranges of activations, through the production coordinator."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.linear import linear_graphs
from support.rounds import TABLE, finish_round
from support.stage_runs import falsify, problems, reopen, roll_back
from support.staleness import settle
from support.virtual import PUBLISHER, Place, bundle_in, open_place, plan, start

from fanin.clients.device.updates import Change, make_update
from fanin.edge.assembly.assemble import assemble
from fanin.edge.bundles.arrays import write_arrays
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.codecs.statistics import range_counts_of
from fanin.edge.ranges import EDGES, NUM_BINS, RANGES, bin_of, counts, ranges_table
from fanin.edge.tensors import encode_parameters
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of, cut
from fanin.protos.errors import FaninError, InvalidPlan
from fanin.server.aggregation.parameters import load_version
from fanin.simulation import LoopbackTransport, run_virtual
from fanin.simulation.federation.synthetic import ACTIVATION

DEVICES = ("a", "b", "c")
PLAN = plan(concurrency=3, buffer=3, quorum=3, max_rounds=50, ranges="devices")
CAPABILITIES = m.Capabilities(codecs=("fixed32",), runtimes=("scripted 1",), graph_formats=("onnx",))
NONE = m.RangeCounts()


def measured(low: float, high: float) -> m.RangeCounts:
    """Return the counts of a device with these extremes in each of 10 examples."""
    lows, highs = (np.full((10, 1), end, np.float32) for end in (low, high))
    return range_counts_of(counts(lows, highs), np.arange(1))


def edge(magnitude: float) -> float:
    """Return the upper edge of the bin of a magnitude."""
    return float(EDGES[bin_of(np.array([magnitude], np.float32))[0]])


class Federation:
    """Three devices and their coordinator."""

    def __init__(self, place: Place, bundle: Bundle) -> None:
        self.place, self.bundle = place, bundle

    @classmethod
    async def begin(cls, folder: Path) -> "Federation":
        place, bundle = open_place(folder), bundle_in(folder)
        await start(place.runs, bundle, PLAN)
        await settle()
        return cls(place, bundle)

    def line(self, device: str) -> LoopbackTransport:
        return LoopbackTransport(fleet=self.place.coordinator, device=device, latency_s=0.01)

    async def assignment(self, device: str) -> m.Assignment:
        check_in = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=0.1)
        answer = await self.place.coordinator.check_in(device, check_in)
        assert isinstance(answer, m.Assigned), answer
        return answer.assignment

    async def take_round(self, *ranges: m.RangeCounts) -> m.Version:
        """Let the devices finish a Round with these counts. Return its Version."""
        works = [await self.assignment(device) for device in DEVICES]
        for device, work, each in zip(DEVICES, works, ranges, strict=True):
            assert work.range_examples == m.RANGE_EXAMPLES
            await finish_round(self.line(device), work, ranges=each)
        await settle()
        return await self.newest()

    async def newest(self) -> m.Version:
        return await self.place.state.stores.runs.newest_version("run")

    def range_in(self, version: m.Version) -> tuple[float, float]:
        """Return the range of the activation in a Version."""
        values = load_version(self.place.state.blobs, version, self.bundle.manifest)
        low, high = (ACTIVATION.low, ACTIVATION.high) if values.ranges is None else values.ranges.tolist()
        return low, high


def test_a_version_has_the_ranges_that_the_devices_of_its_round_counted(tmp_path: Path) -> None:
    async def main() -> None:
        run = await Federation.begin(tmp_path)
        first = await run.newest()
        assert (dict(first.auxiliary), run.range_in(first)) == ({}, (ACTIVATION.low, ACTIVATION.high))
        second = await run.take_round(measured(-3.0, 0.0), measured(-2.0, 5.0), measured(-2.5, 6.0))
        assert run.range_in(second) == (-edge(3.0), edge(6.0))
        # Without counts the ranges stay, with those of the same value, too.
        third = await run.take_round(NONE, NONE, NONE)
        assert third.auxiliary == second.auxiliary
        fourth = await run.take_round(measured(0.0, 0.5), NONE, NONE)
        assert run.range_in(fourth) == (0.0, edge(0.5))
        await run.place.runs.stop()
        assert problems(run.place) == []

    run_virtual(main())


def test_one_of_three_devices_widens_a_range_at_most_twofold(tmp_path: Path) -> None:
    async def main() -> None:
        run = await Federation.begin(tmp_path)
        version = await run.take_round(measured(-1.0, 1.0), measured(-1e30, 1e30), measured(-1.0, 1.0))
        assert run.range_in(version) == (-2.0, 2.0)
        await run.place.runs.stop()

    run_virtual(main())


def test_a_restart_within_a_round_changes_no_range(tmp_path: Path) -> None:
    ranges = (measured(-3.0, 1.0), measured(-2.0, 5.0), measured(-7.0, 6.0))

    async def main(folder: Path, restarts: bool) -> m.Version:
        run = await Federation.begin(folder)
        works = [await run.assignment(device) for device in DEVICES]
        for device, work, each in zip(DEVICES, works, ranges, strict=True):
            await finish_round(run.line(device), work, ranges=each)
            if restarts and device != "c":
                run.place = await reopen(folder, run.place)
                await settle()
        await settle()
        version = await run.newest()
        await run.place.runs.stop()
        assert problems(run.place) == []
        return version

    quiet, restarted = (run_virtual(main(tmp_path / name, name == "b")) for name in ("a", "b"))
    assert (quiet.number, quiet.auxiliary) == (1, restarted.auxiliary)


def test_verify_finds_false_ranges(tmp_path: Path) -> None:
    async def main() -> None:
        run = await Federation.begin(tmp_path)
        await run.take_round(measured(-3.0, 0.0), measured(-2.0, 5.0), NONE)
        await run.place.runs.stop()
        data = encode_parameters(ranges_table([ACTIVATION]), np.array([-1.0, 2.0], np.float32))
        for ref, piece in cut(data):
            run.place.state.blobs.put(ref.sha256, piece)
        falsify(tmp_path, run.place, {RANGES: artifact_of(data)})
        assert problems(run.place) == ["round 1: recomputed another auxiliary tensor ranges"]
        falsify(tmp_path, run.place, {})
        assert problems(run.place) == ["round 1: signed the auxiliary tensors [], not ['ranges']"]

    run_virtual(main())


def test_a_rollback_keeps_the_ranges_of_its_version(tmp_path: Path) -> None:
    async def main() -> None:
        run = await Federation.begin(tmp_path)
        first = await run.take_round(*[measured(-3.0, 1.0)] * 3)
        await run.take_round(*[measured(-9.0, 9.0)] * 3)
        await roll_back(run.place, 1, "back")
        back = await run.newest()
        assert (back.number, back.sha256, back.auxiliary) == (3, first.sha256, first.auxiliary)
        after = await run.take_round(NONE, NONE, NONE)
        assert after.auxiliary == first.auxiliary
        await run.place.runs.stop()
        assert problems(run.place) == []
        second = run.place.state.runs.version("run", 2)
        assert second is not None
        falsify(tmp_path, run.place, dict(second.auxiliary), number=3)
        assert problems(run.place)[0] == "has the auxiliary tensors ['ranges'], which it adopted from no version"

    run_virtual(main())


def test_a_device_without_an_assignment_may_download_the_ranges(tmp_path: Path) -> None:
    async def main() -> None:
        run = await Federation.begin(tmp_path)
        version = await run.take_round(*[measured(-3.0, 1.0)] * 3)
        publications = run.place.runs.find_publications("run")
        assert publications is not None
        publication = publications.publish("d")
        (ref,) = version.auxiliary[RANGES].chunks
        assert await run.line("d").download(publication.download_id, ref.sha256)
        await run.place.runs.stop()

    run_virtual(main())


@pytest.mark.parametrize(
    ("cells", "sizes"),
    [
        ((1, NUM_BINS), (63, 64)),
        ((1, NUM_BINS), (1 << 31, 64)),
        ((1, 2 * NUM_BINS), (64, 64)),
        ((1 << 30,), (64,)),
    ],
)
def test_bad_counts_are_refused_and_harm_no_other_device(
    tmp_path: Path, cells: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    async def main() -> None:
        run = await Federation.begin(tmp_path)
        work = await run.assignment("a")
        change = Change(values=np.zeros(TABLE.num_values, np.float32), counts={m.EXAMPLES: 10})
        header, payload = make_update(work, TABLE, change, m.Telemetry())
        bad = replace(header, ranges=m.RangeCounts(cells=cells, counts=sizes))
        with pytest.raises(FaninError) as refused:
            await run.line("a").upload(bad, lambda offset, size_bytes: payload[offset : offset + size_bytes])
        assert refused.value.code == "FN-0644"
        for device in ("b", "c", "d"):
            await finish_round(run.line(device), await run.assignment(device), ranges=measured(-1.0, 1.0))
        await settle()
        assert run.range_in(await run.newest()) == (-1.0, 1.0)
        await run.place.runs.stop()
        assert problems(run.place) == []

    run_virtual(main())


def test_a_bundle_without_activations_or_graphs_refuses_a_run_that_refreshes_them(tmp_path: Path) -> None:
    async def main() -> list[str]:
        place = open_place(tmp_path)
        weights = {"w": np.zeros((2, 3), np.float32)}
        bundles = {
            "assembled": assemble(linear_graphs(), tmp_path / "assembled", PUBLISHER),
            "arrays": write_arrays(weights, tmp_path / "arrays", PUBLISHER, "arrays"),
        }
        codes = []
        for run_id, bundle in bundles.items():
            with pytest.raises(InvalidPlan) as refused:
                await start(place.runs, bundle, PLAN, run_id)
            codes.append(refused.value.code)
        assert (await place.runs.listed()).runs == ()
        await place.runs.stop()
        return codes

    assert run_virtual(main()) == ["FN-0269", "FN-0260"]
