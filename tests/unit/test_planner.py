"""The planner: every layout is legal and fits, the fastest first. Its pipeline laws equal torch's schedule tables."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO
from math import prod
from pathlib import Path
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from fanin.commands.main import main
from fanin.commands.plan import progress_of
from fanin.datacenter.families.decoders import PRESETS
from fanin.datacenter.network.counters import ALL_REDUCE, SEND, Amount
from fanin.datacenter.network.links import LINKS, Link, Topology, link_of
from fanin.datacenter.parallel.checks import check_job
from fanin.datacenter.parallel.pipelines.schedules import SCHEDULES, Pipeline
from fanin.datacenter.parallel.settings import ParallelSettings
from fanin.datacenter.planner import LayoutRequest, plan, price
from fanin.datacenter.planner.bubble import bubble_share, bubble_units, max_in_flight
from fanin.datacenter.planner.choices import describe
from fanin.datacenter.planner.facts import decoder_facts
from fanin.datacenter.planner.memory import worst_memory
from fanin.datacenter.planner.search import factorisations, jobs
from fanin.datacenter.planner.timing import Machine, Timing, predict_timing
from fanin.datacenter.planner.traffic import predict_traffic
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.watch.flops import HARDWARE
from fanin.protos.errors import InvalidInput

TOPOLOGY = Topology(inside=LINKS["nvlink4"], between=LINKS["ib-ndr"], ranks_per_node=8)
MACHINE = Machine(hardware=HARDWARE["h100"], topology=TOPOLOGY, efficiency=0.6)
GIGABYTE = 10**9
FORWARD, BACKWARD, INPUTS = "F", "B", "I"
Action = tuple[str, int, int]
"""(kind, stage, microbatch)."""


def layout_request(model: str = "125m", **changes: object) -> LayoutRequest:
    defaults: dict[str, object] = {"world": 8, "memory_bytes": 80 * GIGABYTE, "batch_size": 32, "sequence": 512}
    return LayoutRequest(facts=decoder_facts(model, PRESETS[model]), machine=MACHINE, **{**defaults, **changes})


def table(pipeline: Pipeline) -> list[list[Action]]:
    """Return the actions of each rank in torch's schedule, in order."""
    name, per_rank = pipeline.rules.torch_name, pipeline.stages_per_rank
    rows = get_schedule_ops(name, pipeline.num_ranks, pipeline.microbatches, num_stages_per_rank=per_rank)
    return [list(_numbered(_actions(row), renumbers=pipeline.schedule == "1F1B")) for row in rows]


def _actions(row: Sequence[object]) -> Iterator[Action]:
    for action in row:
        for each in getattr(action, "sub_actions", None) or (action,):
            if match := re.fullmatch(r"(\d+)([FBIW])(\d+)", str(each)):
                yield match[2], int(match[1]), int(match[3])


def _numbered(actions: Iterator[Action], *, renumbers: bool) -> Iterator[Action]:
    """Renumber the microbatches if ``renumbers``: torch's table of 1F1B starts some ranks at microbatch 1."""
    seen: dict[str, int] = {}
    for kind, stage, number in actions:
        yield kind, stage, seen.setdefault(kind, 0) if renumbers else number
        seen[kind] = seen.get(kind, 0) + 1


def simulated(pipeline: Pipeline) -> tuple[float, list[int]]:
    """Return (the longest wait of a rank, the maximum of live microbatches on each rank).

    A forward takes 1 unit, a backward 2.
    """
    rows, end_times = table(pipeline), dict[Action, float]()
    times, places = [0.0] * len(rows), [0] * len(rows)
    live, peaks = [0] * len(rows), [0] * len(rows)
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, row in enumerate(rows):
            while places[rank] < len(row):
                kind, stage, number = row[places[rank]]
                needs = _needs(kind, stage, number, pipeline.num_stages)
                if not all(need in end_times for need in needs):
                    break
                times[rank] = max([times[rank], *(end_times[need] for need in needs)]) + (2 if kind == BACKWARD else 1)
                end_times["D" if kind in (BACKWARD, INPUTS) else kind, stage, number] = times[rank]
                live[rank] += {FORWARD: 1, INPUTS: 0}.get(kind, -1)
                peaks[rank] = max(peaks[rank], live[rank])
                places[rank] += 1
                has_moved = True
    assert [len(row) for row in rows] == places, "the schedule came to its end"
    return max(times) / 3 - pipeline.microbatches * pipeline.stages_per_rank, peaks


def _needs(kind: str, stage: int, number: int, num_stages: int) -> list[Action]:
    if kind == FORWARD:
        return [(FORWARD, stage - 1, number)] if stage else []
    if kind in (BACKWARD, INPUTS):
        return [(FORWARD, stage, number), *([("D", stage + 1, number)] if stage + 1 < num_stages else [])]
    return [("D", stage, number)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_laws_of_schedules_are_those_of_torchs_tables(schedule: str, times: int, ranks: int) -> None:
    stages = SCHEDULES[schedule].default_stages
    pipeline = Pipeline(schedule=schedule, num_ranks=ranks, stages_per_rank=stages, microbatches=times * ranks)
    wait, live = simulated(pipeline)
    assert bubble_units(pipeline) == pytest.approx(wait)
    expected = [max_in_flight(pipeline, rank) for rank in range(ranks)]
    if schedule == "ZBV" and times == 1:
        # Too few microbatches to fill both directions. The law holds for a full pipeline.
        assert all(peak <= law for peak, law in zip(live, expected, strict=True))
    else:
        assert live == expected


@given(ranks=st.integers(2, 16), microbatches=st.integers(1, 64))
def test_the_share_of_a_bubble(ranks: int, microbatches: int) -> None:
    pipeline = Pipeline(schedule="GPipe", num_ranks=ranks, stages_per_rank=1, microbatches=microbatches)
    assert bubble_share(pipeline) == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@given(number=st.integers(1, 96))
def test_factorisations_are_all_and_once(number: int) -> None:
    factors = list(factorisations(number))
    assert len(set(factors)) == len(factors)
    assert all(prod(each) == number for each in factors)
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    triples = [(a, b, c) for a in divisors for b in divisors for c in divisors if number % (a * b * c) == 0]
    assert {each[:3] for each in factors} == set(triples)


def test_every_layout_is_legal_and_fits_and_the_fastest_is_first() -> None:
    request = layout_request(memory_bytes=6 * GIGABYTE)
    choices = plan(request)
    assert len(choices) > 50
    seconds = [choice.timing.seconds for choice in choices]
    assert seconds == sorted(seconds)
    for choice in choices:
        job = choice.job
        check_job(request.facts.layout, job.parallel, job.training, request.world)
        assert choice.memory.total <= request.memory_bytes
        assert "most memory is" in choice.reason
        # No layout is faster than its matrix products.
        assert 0.0 < choice.mfu <= MACHINE.efficiency * (1 + 1e-9)
    assert len(choices) < len(list(jobs(request))), "some did not fit"
    assert {str(choice.job.parallel.mesh) for choice in choices} >= {"dp_shard=8", "pp=2,dp_shard=2,tp=2"}


def test_the_planner_picks_the_known_best() -> None:
    # A model that is small for the memory, and fast links: replicas or shards, no split layers, no recomputation.
    best = plan(layout_request("125m"))[0].job.parallel
    assert (best.mesh.pp, best.mesh.tp, best.recompute) == (1, 1, "none")
    # 8 B parameters in half of the memory that they need without sharding: the planner shards.
    best = plan(layout_request("8b", world=8, batch_size=8, sequence=2048))[0].job.parallel
    assert best.mesh.dp_shard * best.mesh.tp * best.mesh.pp >= 8


def test_a_model_that_cannot_fit_is_refused_with_the_least_memory_that_fits() -> None:
    with pytest.raises(InvalidInput, match="FN-1381") as excinfo:
        plan(layout_request("8b", memory_bytes=2 * GIGABYTE))
    least = min(worst_memory(job, fused_norms=True).total for job in jobs(layout_request("8b")))
    assert f"at least {least / GIGABYTE:.3g} GB, which mesh " in str(excinfo.value)
    assert "full recomputation" in str(excinfo.value)
    assert plan(layout_request("8b", memory_bytes=least))


def test_a_batch_that_no_mesh_divides_is_refused() -> None:
    with pytest.raises(InvalidInput, match="FN-1380"):
        plan(layout_request(world=13, batch_size=3))


@pytest.mark.parametrize("name", ["world", "memory_bytes", "batch_size", "sequence"])
def test_numbers_are_positive(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{name}: got 0, expected at least 1"):
        layout_request(**{name: 0})


def parallel(mesh: str, **changes: object) -> ParallelSettings:
    return ParallelSettings(mesh=MeshShape.parse(mesh), precision="bf16", **changes)


def memory(mesh: str, **changes: object) -> int:
    return worst_memory(layout_request(batch_size=64).job(parallel(mesh, **changes))).total


def test_memory_falls_as_it_should() -> None:
    assert memory("dp_shard=8") < memory("dp_replicate=2,dp_shard=4") < memory("dp_replicate=8")
    totals = [memory("dp_shard=8", recompute=mode) for mode in ("full", "selective", "none")]
    assert totals == sorted(totals)
    assert len(set(totals)) == 3
    assert memory("dp_shard=8", microbatches=8) < memory("dp_shard=8", microbatches=2)
    assert memory("pp=8", microbatches=16) < memory("pp=8", microbatches=16, schedule="GPipe")
    assert memory("dp_shard=8", offload=True) < memory("dp_shard=8")
    for mesh in ("tp=4,dp_shard=2", "pp=2,tp=4"):
        options = {"microbatches": 4}
        assert memory(mesh, sequence_parallel=True, **options) < 0.95 * memory(mesh, **options)


@pytest.mark.parametrize("mesh", ["dp_shard=8", "dp_replicate=8", "dp_shard=2,tp=4", "pp=2,dp_shard=4"])
def test_double_precision_needs_twice_the_bytes_of_full_precision(mesh: str) -> None:
    full, double = (
        layout_request(batch_size=64).job(
            ParallelSettings(mesh=MeshShape.parse(mesh), microbatches=2, precision=precision)
        )
        for precision in ("full", "double")
    )
    assert worst_memory(double).total == 2 * worst_memory(full).total
    timings = [predict_timing(job, MACHINE) for job in (full, double)]
    assert timings[1].optimizer_s == 2 * timings[0].optimizer_s


def predicted(mesh: str, machine: Machine = MACHINE, **changes: object) -> Timing:
    return predict_timing(layout_request(batch_size=64).job(parallel(mesh, **changes)), machine)


def seconds(mesh: str, machine: Machine = MACHINE, **changes: object) -> float:
    return predicted(mesh, machine, **changes).seconds


def test_sequences_are_sharded_where_a_layout_supports_it() -> None:
    choices = [choice for choice in plan(layout_request(world=4, batch_size=4)) if choice.job.tp > 1]
    split = [choice for choice in choices if choice.job.parallel.sequence_parallel]
    assert {choice.job.parallel.sequence_parallel for choice in choices} == {False, True}
    assert all("sequence parallelism" in describe(choice.job.parallel) for choice in split)
    # It cuts the bytes between pipeline neighbours to a quarter. The ring inside a layer carries the same amount.
    one, other = (
        predict_traffic(layout_request().job(parallel("pp=2,tp=4", microbatches=4, sequence_parallel=each)))
        for each in (True, False)
    )
    assert 4 * one["pp", SEND].size_bytes == other["pp", SEND].size_bytes
    tp_bytes = [
        sum(amount.wire_bytes(kind, 4) for (axis, kind), amount in counts.items() if axis == "tp")
        for counts in (one, other)
    ]
    # The difference is the gradients of the norms.
    assert 1.0 < tp_bytes[0] / tp_bytes[1] < 1.001
    uneven = list(jobs(layout_request(world=4, batch_size=4, sequence=511)))
    assert not [job for job in uneven if job.parallel.sequence_parallel]


def test_time_rises_as_it_should() -> None:
    assert seconds("dp_shard=8") < seconds("dp_shard=8", recompute="full")
    assert seconds("pp=4,dp_shard=2", microbatches=16) < seconds("pp=4,dp_shard=2", microbatches=4)
    # A schedule with a smaller bubble loses much more to recomputation.
    zero_bubble, other = "InterleavedZeroBubble", "Interleaved1F1B"
    without_recompute, with_recompute = (
        [seconds("pp=2,dp_shard=4", microbatches=4, schedule=name, recompute=mode) for name in (zero_bubble, other)]
        for mode in ("none", "full")
    )
    assert without_recompute[0] < without_recompute[1]
    assert with_recompute[0] > 2 * with_recompute[1]
    slow = replace(MACHINE, topology=Topology(inside=link_of("0.1"), between=link_of("0.1"), ranks_per_node=8))
    assert seconds("tp=4,dp_shard=2", slow) > 2 * seconds("tp=4,dp_shard=2")
    half = replace(MACHINE, efficiency=MACHINE.efficiency / 2)
    assert predicted("dp_shard=8", half).compute_s == pytest.approx(2 * predicted("dp_shard=8").compute_s)
    small_nodes = replace(MACHINE, topology=replace(TOPOLOGY, ranks_per_node=2))
    assert seconds("tp=4,dp_shard=2") < seconds("tp=4,dp_shard=2", small_nodes)


@given(size=st.integers(1, 10**12), ranks=st.integers(2, 512))
def test_a_ring_costs_its_latency_and_its_bytes(size: int, ranks: int) -> None:
    link = Link(name="x", latency_s=0.5, bytes_per_second=100.0, source="given")
    share = size * (ranks - 1) / ranks / 100.0
    amount = Amount(num_calls=1, size_bytes=size)
    assert link.seconds(ALL_REDUCE, amount, ranks) == pytest.approx((ranks - 1) + 2 * share)
    assert link.seconds(SEND, amount, ranks) == pytest.approx(0.5 + size / 100.0)


def test_axes_that_leave_a_node_take_the_longer_way() -> None:
    sizes = MeshShape(pp=2, dp_shard=4, tp=4).sizes
    assert TOPOLOGY.link("tp", sizes) is TOPOLOGY.inside
    assert TOPOLOGY.link("pp", sizes) is TOPOLOGY.between
    # Two ranks of a group in each node: two ports.
    port = TOPOLOGY.between.bytes_per_second
    assert TOPOLOGY.link("dp_shard", sizes).bytes_per_second == 2 * port
    assert TOPOLOGY.link("dp_shard", MeshShape(dp_shard=16, tp=8).sizes) is TOPOLOGY.between
    assert TOPOLOGY.link("dp_shard", MeshShape(dp_shard=64).sizes).bytes_per_second == 8 * port
    slow = replace(TOPOLOGY, inside=link_of("100"))
    assert slow.link("dp_shard", MeshShape(dp_shard=64).sizes).bytes_per_second == 100e9


@pytest.mark.parametrize("text", ["fast", "-3", "0", "nan", "inf"])
def test_a_link_has_a_speed(text: str) -> None:
    with pytest.raises(InvalidInput, match="link"):
        link_of(text)


def test_the_command_prints_a_text_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "125m", "--world", "4", "--memory", "20", "--link", "100", "--batch", "8"]
    assert main([*words, "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("125m: 134.1 M parameters, ")
    assert [line[:5] for line in text.splitlines()[1::3]] == ["  1. ", "  2. ", "  3. "]
    path = tmp_path / "plan.json"
    assert main([*words, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["model"], report["world"], report["memory_bytes"]) == ("125m", 4, 20 * GIGABYTE)
    first, second = report["choices"][:2]
    assert first["seconds_per_step"] <= second["seconds_per_step"]
    assert prod(first["mesh"].values()) == 4
    assert sum(first["memory_bytes"].values()) == first["peak_memory_bytes"] <= 20 * GIGABYTE


def test_one_mesh_is_priced_also_if_it_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "price.json"
    words = ["plan", "--model", "8b", "--batch", "16", "--mesh", "pp=2,dp_shard=4", "--top", "3"]
    assert main([*words, "--memory", "2"]) == 0
    text = capsys.readouterr().out
    assert "; 8 x h100; 0 of " in text
    assert text.count("mesh pp=2,dp_shard=4") == 3
    assert text.count(" GB: does not fit") == 3
    assert "more than a rank has" in text
    assert main([*words, "--memory", "80", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["world"], report["efficiency"]) == (8, HARDWARE["h100"].efficiency)
    assert all(choice["mesh"] == MeshShape.parse("pp=2,dp_shard=4").sizes for choice in report["choices"])
    assert report["choices"][0]["fits"]
    assert sum(report["choices"][0]["seconds"].values()) == pytest.approx(report["choices"][0]["seconds_per_step"])


def test_the_price_of_a_mesh_is_that_of_the_search() -> None:
    search = {describe(each.job.parallel): each for each in plan(layout_request())}
    choices = [each for each in price(layout_request(), MeshShape(pp=2, dp_shard=4)) if each.fits]
    assert choices
    for each in choices:
        other = search[describe(each.job.parallel)]
        assert (each.timing, each.memory, each.reason) == (other.timing, other.memory, other.reason)


def test_a_mesh_that_breaks_a_rule_is_refused_with_the_rule() -> None:
    with pytest.raises(InvalidInput, match="FN-1267"):
        price(layout_request(), MeshShape(tp=8))
    with pytest.raises(InvalidInput, match="FN-1266"):
        price(layout_request(), MeshShape(dp_shard=4))


class Terminal(StringIO):
    """A stream that is a terminal, where progress overwrites its line."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "lines"), [(StringIO(), 2), (Terminal(), 6)])
def test_a_long_search_reports_its_progress(stream: StringIO, lines: int) -> None:
    times_s = iter([0.0, 0.5, 1.5, 2.6, 3.7, 4.8, 5.9, 7.0])
    progress = progress_of(stream, lambda: next(times_s))
    for number in range(7):
        progress(number / 10, 1000 * number)
    first, *others = stream.getvalue().replace("\r", "\n").strip().splitlines()
    assert first == "plan: 10% of the meshes, 1,000 ways, 2 s"
    assert len(others) == lines - 1


def test_meshes_whose_parameters_alone_are_too_many_are_not_tried() -> None:
    reports: list[tuple[float, int]] = []
    tight = layout_request("8b", world=16, batch_size=16)
    assert plan(tight, lambda share, num_ways: reports.append((share, num_ways)))
    # Each layout that is tried is reported.
    assert len(reports) == reports[-1][1] < sum(1 for _ in jobs(tight))
    assert [share for share, _ in reports] == sorted(share for share, _ in reports)


@pytest.mark.nightly
def test_a_thousand_ranks_take_ten_seconds_of_a_processor() -> None:
    started_s = process_time()
    assert len(plan(layout_request("8b", world=1024, batch_size=1024, sequence=8192))) > 1000
    # Ten seconds, doubled for a busy machine.
    assert process_time() - started_s < 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "1"], "does not fit: got 1 GB a rank, expected at least"),
        (["--memory", "nan"], "--memory: got nan, expected a positive number of gigabytes"),
        (["--memory", "inf"], "--memory: got inf, expected"),
        (["--memory", "1e300"], "--memory: got 1e+300, expected"),
        (["--memory", "-1", "--device", "cpu"], "--memory: got -1.0, expected"),
        (["--device", "abacus"], "--device: got 'abacus', expected cpu or one of a100"),
        (["--device", "cpu"], "--memory: missing, expected gigabytes"),
        (["--precision", "int3"], "--precision: got 'int3', expected one of bf16, full, double"),
        (["--link", "string"], "link: got 'string', expected gigabytes a second or one of nvlink3"),
    ],
)
def test_the_command_reports_a_wrong_argument(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["plan", "--model", "8b", "--world", "8", "--batch", "8", *words])
    assert status == (1 if "does not fit" in message else 2)
    assert message in capsys.readouterr().err
