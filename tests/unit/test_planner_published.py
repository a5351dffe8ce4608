"""Predictions of the planner, compared with published runs: each is within the ratio that docs/explanation/mesh.md
states.

Every number of a run is from the page that ``source`` names. A run is left out if its page lacks a number that the
prediction needs. MPT and GPT have two matrices in their feed-forward, and fanin's decoder has three. Two thirds of
their width gives the same number of values.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from fanin.datacenter.families.decoders import PRESETS
from fanin.datacenter.models.decoder import DecoderConfig
from fanin.datacenter.network.links import LINKS, Link, Topology, link_of
from fanin.datacenter.parallel.settings import ParallelSettings, Recompute
from fanin.datacenter.planner import LayoutChoice, LayoutRequest
from fanin.datacenter.planner.facts import ModelFacts, decoder_facts
from fanin.datacenter.planner.memory import worst_memory
from fanin.datacenter.planner.timing import Machine, predict_timing
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.watch.flops import HARDWARE

TITAN_A100 = "torchtitan docs/performance.md (2024), 64 A100"
TITAN_H100 = "torchtitan benchmarks/llama3_h100_202412_torchtitan.md (2024-12)"
FOUNDRY = "MosaicML llm-foundry scripts/train/benchmarking/README.md (2023)"
IBM = "pytorch.org blog, Maximizing training throughput using PyTorch FSDP (2024-03-13), table 1"
KEMPNER = "KempnerForge benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md"
RATIOS = {"a100": 1.2, "h100": 1.3, "h200": 1.5}
"""Largest ratio of a predicted and a published speed, in either direction."""
MEMORY_RATIO = 1.3


def _decoder(width: int, num_layers: int, heads: tuple[int, int], feed_forward: int, vocabulary: int) -> DecoderConfig:
    return DecoderConfig(
        vocabulary=vocabulary,
        width=width,
        num_layers=num_layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        feed_forward=feed_forward,
    )


def _mpt(width: int, num_layers: int, num_heads: int) -> DecoderConfig:
    # Two matrices of 4 x width have 8 x width^2 values. Here three matrices have as many.
    return DecoderConfig(
        vocabulary=50_432,
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        feed_forward=round(8 * width / 3),
        tied=True,
    )


MODELS = {
    "llama3-8b": PRESETS["8b"],
    "llama3-70b": PRESETS["70b"],
    "llama3-13b": _decoder(5120, 40, (40, 8), 17_920, 128_256),
    "llama2-7b": _decoder(4096, 32, (32, 32), 11_008, 32_000),
    "llama2-13b": _decoder(5120, 40, (40, 40), 13_824, 32_000),
    "llama2-70b": _decoder(8192, 80, (64, 8), 28_672, 32_000),
    "mpt-1b": _mpt(2048, 24, 16),
    "mpt-3b": _mpt(2560, 32, 20),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-13b": _mpt(5120, 40, 40),
    "mpt-30b": _mpt(7168, 48, 56),
    "mpt-70b": _mpt(8192, 80, 64),
}


SOURCES = {TITAN_A100: "T1", TITAN_H100: "T2", FOUNDRY: "M", IBM: "P", KEMPNER: "K"}
"""Sources, and their short names in the table of docs/explanation/mesh.md."""
DOCUMENT = Path(__file__).parents[2] / "docs/explanation/mesh.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The hardware of a run. A link whose speed the page leaves out is of the machine's usual kind."""

    device: str
    inside: str
    between: Link
    ranks_per_node: int = 8


A100 = Cluster(device="a100", inside="nvlink3", between=LINKS["ib-hdr"])
H100 = Cluster(device="h100", inside="nvlink4", between=LINKS["ib-ndr"])
H200 = Cluster(device="h200", inside="nvlink4", between=LINKS["ib-ndr"], ranks_per_node=4)
# 400 and 800 Gbit/s a node of 8.
A100_SLOW = Cluster(device="a100", inside="nvlink3", between=link_of("6.25"))
H100_SLOW = Cluster(device="h100", inside="nvlink4", between=link_of("12.5"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run. ``speed`` is in tokens a second of each GPU."""

    source: str
    cluster: Cluster
    model: str
    mesh: str
    batch: int
    sequence: int
    pieces: int
    recompute: Recompute
    speed: float

    @property
    def name(self) -> str:
        return f"{self.cluster.device} {self.model} {self.mesh} {self.recompute}"


def _run(
    source: str, cluster: Cluster, setup: tuple[str, str, Recompute], work: tuple[int, int, int], speed: float
) -> Run:
    """Return a run. ``setup``: model, mesh, recomputation. ``work``: global batch, sequence, microbatches of a rank."""
    return Run(
        source=source,
        cluster=cluster,
        model=setup[0],
        mesh=setup[1],
        recompute=setup[2],
        batch=work[0],
        sequence=work[1],
        pieces=work[2],
        speed=speed,
    )


RUNS = [
    _run(TITAN_A100, A100, ("llama3-8b", "dp_shard=64", "selective"), (64, 8192, 1), 2973),
    _run(TITAN_A100, A100, ("llama3-70b", "dp_shard=64", "full"), (64, 8192, 1), 331),
    _run(TITAN_A100, A100, ("llama2-13b", "dp_shard=64", "none"), (128, 4096, 1), 2162),
    _run(TITAN_A100, A100, ("llama2-13b", "dp_shard=64", "selective"), (128, 4096, 1), 1904),
    _run(TITAN_A100, A100, ("llama2-70b", "dp_shard=64", "full"), (128, 4096, 1), 353),
    _run(FOUNDRY, A100, ("mpt-1b", "dp_shard=8", "none"), (448, 2048, 4), 20_513),
    _run(FOUNDRY, A100, ("mpt-7b", "dp_shard=8", "none"), (96, 2048, 2), 4641),
    _run(FOUNDRY, A100, ("mpt-13b", "dp_shard=8", "none"), (48, 2048, 3), 2262),
    _run(FOUNDRY, A100, ("mpt-30b", "dp_shard=8", "full"), (504, 2048, 21), 916),
    _run(FOUNDRY, A100, ("mpt-70b", "dp_shard=64", "full"), (2048, 2048, 4), 410),
    _run(IBM, A100_SLOW, ("llama2-7b", "dp_shard=128", "none"), (256, 4096, 1), 3700),
    _run(IBM, A100_SLOW, ("llama2-13b", "dp_shard=128", "selective"), (256, 4096, 1), 1800),
    _run(IBM, A100_SLOW, ("llama2-70b", "dp_shard=128", "full"), (256, 4096, 1), 370),
    _run(TITAN_H100, H100, ("llama3-8b", "dp_shard=8", "selective"), (16, 8192, 1), 5762),
    _run(TITAN_H100, H100, ("llama3-8b", "dp_shard=128", "selective"), (256, 8192, 1), 5605),
    _run(FOUNDRY, H100, ("mpt-1b", "dp_shard=8", "none"), (112, 2048, 1), 45_455),
    _run(FOUNDRY, H100, ("mpt-3b", "dp_shard=64", "none"), (1152, 2048, 3), 22_525),
    _run(FOUNDRY, H100, ("mpt-7b", "dp_shard=8", "none"), (48, 2048, 1), 10_643),
    _run(FOUNDRY, H100, ("mpt-13b", "dp_shard=8", "none"), (16, 2048, 1), 4792),
    _run(FOUNDRY, H100, ("mpt-13b", "dp_shard=64", "none"), (128, 2048, 1), 4800),
    _run(FOUNDRY, H100, ("mpt-30b", "dp_shard=8", "full"), (504, 2048, 21), 2002),
    _run(FOUNDRY, H100, ("mpt-70b", "dp_shard=64", "full"), (2048, 2048, 4), 1039),
    _run(IBM, H100_SLOW, ("llama2-7b", "dp_shard=96", "none"), (192, 4096, 1), 7500),
    _run(IBM, H100_SLOW, ("llama2-13b", "dp_shard=96", "selective"), (192, 4096, 1), 3800),
    _run(IBM, H100_SLOW, ("llama2-70b", "dp_shard=96", "full"), (192, 4096, 1), 800),
    _run(KEMPNER, H200, ("llama3-8b", "none", "full"), (8, 4096, 4), 10_471),
    _run(KEMPNER, H200, ("llama3-8b", "dp_shard=2", "full"), (16, 4096, 4), 18_728 / 2),
    _run(KEMPNER, H200, ("llama3-8b", "dp_shard=4", "full"), (32, 4096, 2), 38_983 / 4),
    _run(KEMPNER, H200, ("llama3-8b", "tp=2", "full"), (8, 4096, 2), 13_163 / 2),
    _run(KEMPNER, H200, ("llama3-8b", "tp=4", "full"), (8, 4096, 2), 25_135 / 4),
    _run(KEMPNER, H200, ("llama3-8b", "dp_shard=2,tp=2", "full"), (16, 4096, 2), 25_980 / 4),
    _run(KEMPNER, H200, ("llama3-8b", "dp_shard=2,tp=4", "full"), (16, 4096, 2), 44_299 / 8),
    _run(KEMPNER, H200, ("llama3-13b", "dp_shard=8", "full"), (128, 4096, 4), 35_405 / 8),
    _run(KEMPNER, H200, ("llama3-13b", "dp_shard=2,tp=4", "full"), (32, 4096, 4), 27_345 / 8),
    _run(KEMPNER, H200, ("llama3-13b", "dp_shard=8,tp=4", "full"), (128, 4096, 4), 104_309 / 32),
    _run(KEMPNER, H200, ("llama3-70b", "dp_shard=8,tp=4", "full"), (64, 4096, 4), 17_657 / 32),
]
MEMORIES = {
    # Measured in eager mode. A compiled model needs less memory than the formula predicts.
    "h100 llama3-8b dp_shard=8 selective": 82.4,
    "h100 llama3-8b dp_shard=128 selective": 67.0,
    "h200 llama3-13b dp_shard=8 full": 88.5,
}
"""Published memory of a GPU in GiB, by run."""


@cache
def facts(model: str) -> ModelFacts:
    """Return the model's facts. Counting them needs a module, so they are cached."""
    return decoder_facts(model, MODELS[model])


def predicted(run: Run) -> LayoutChoice:
    """Return the planner's prediction for a run."""
    cluster, shape = run.cluster, MeshShape.parse(run.mesh)
    hardware = HARDWARE[cluster.device]
    topology = Topology(inside=LINKS[cluster.inside], between=cluster.between, ranks_per_node=cluster.ranks_per_node)
    request = LayoutRequest(
        facts=facts(run.model),
        machine=Machine(hardware=hardware, topology=topology, efficiency=hardware.efficiency),
        world=shape.num_ranks,
        memory_bytes=hardware.memory_bytes,
        batch_size=run.batch,
        sequence=run.sequence,
    )
    job = request.job(
        ParallelSettings(mesh=shape, microbatches=run.pieces, recompute=run.recompute, precision=request.precision)
    )
    timing = predict_timing(job, request.machine)
    memory = worst_memory(job, fused_norms=True)
    return LayoutChoice(
        job=job, timing=timing, memory=memory, machine=request.machine, memory_bytes=request.memory_bytes
    )


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_published_speed_is_predicted_within_the_ratio(run: Run) -> None:
    choice = predicted(run)
    ratio = choice.tokens_per_second / choice.job.parallel.mesh.num_ranks / run.speed
    assert 1 / RATIOS[run.cluster.device] < ratio < RATIOS[run.cluster.device]


@pytest.mark.parametrize("name", MEMORIES)
def test_a_published_memory_is_predicted_within_the_ratio(name: str) -> None:
    (run,) = (run for run in RUNS if run.name == name)
    ratio = predicted(run).memory.total / 2**30 / MEMORIES[name]
    # The prediction is never too low: a layout that fits by the formula fits in practice.
    assert 1 < ratio < MEMORY_RATIO


def test_each_accelerator_has_three_runs_and_is_neither_fast_nor_slow_on_average() -> None:
    for device in RATIOS:
        runs = [run for run in RUNS if run.cluster.device == device]
        assert len(runs) >= 3
        product = 1.0
        for run in runs:
            choice = predicted(run)
            product *= choice.tokens_per_second / choice.job.parallel.mesh.num_ranks / run.speed
        assert 0.92 < product ** (1 / len(runs)) < 1.08


def row(run: Run) -> str:
    """Return the run's row in the table of docs/explanation/mesh.md."""
    choice = predicted(run)
    speed = choice.tokens_per_second / choice.job.parallel.mesh.num_ranks
    memory = f"{choice.memory.total / 2**30:.0f} / {MEMORIES[run.name]:.0f}" if run.name in MEMORIES else ""
    cells = [run.cluster.device, run.model, f"`{run.mesh}`", run.recompute, f"{run.batch} x {run.sequence}"]
    cells += [f"{speed:,.0f}", f"{run.speed:,.0f}", f"{speed / run.speed:.2f}", memory, SOURCES[run.source]]
    return f"| {' | '.join(cells)} |"


def test_the_documented_table_has_the_predictions_of_the_planner() -> None:
    documented = [
        line for line in DOCUMENT.read_text().splitlines() if line.startswith(("| a100 ", "| h100 ", "| h200 "))
    ]
    assert documented == [row(run) for run in RUNS]
