"""The trainer with two copies against a hand-written DistributedDataParallel loop, on the same two cores.

    python benchmarks/datacenter.py --ddp [--blocks 9] [--steps 5] [--json [FILE]]

Both train the same decoder on the same tokens in the same two processes. They alternate in blocks of steps, so other
load on the machine affects both. The hand-written loop uses shuffled windows, the mean loss, the backward pass and
torch's fused AdamW. The trainer also selects samples by number, sums the loss of the global batch over the ranks, and
sets learning rates, as it always does.

The gate is 0.93 of the throughput of the hand-written loop, by medians of blocks.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from fanin.datacenter.config.settings import DataSettings, ModelSettings, StopSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.data.samples import DataSplit, WindowSamples
from fanin.datacenter.families.decoders import decoder_layout
from fanin.datacenter.families.known import family_model
from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import build_engine
from fanin.datacenter.parallel.objective import TOKENS, ScoredObjective
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.devices import build_mesh
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.training.loop import TrainingLoop

NUM_RANKS: Final = 2
GATE: Final = 0.93
BATCH: Final = 16
LENGTH: Final = 64
RATE: Final = 1e-3
SIZES: Final = DecoderConfig(vocabulary=128, width=128, num_layers=4, num_heads=4, num_kv_heads=4, feed_forward=352)


def tokens() -> np.ndarray:
    """Return random tokens. The values do not affect the time."""
    return np.random.default_rng(0).integers(0, SIZES.vocabulary, 200_000, np.int32)


def by_hand(rank: int) -> Callable[[], object]:
    """Return a function that runs one step of the hand-written loop."""
    model = DistributedDataParallel(Decoder(SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    data = torch.from_numpy(tokens()).long()
    starts, generator = (len(data) - 1) // LENGTH, torch.Generator().manual_seed(0)
    order: list[int] = []

    def step() -> float:
        if len(order) < BATCH:
            order.extend(torch.randperm(starts, generator=generator).tolist())
        own_starts = [order.pop() * LENGTH for _ in range(BATCH)][rank::NUM_RANKS]
        inputs = torch.stack([data[start : start + LENGTH] for start in own_starts])
        targets = torch.stack([data[start + 1 : start + LENGTH + 1] for start in own_starts])
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def ours(rank: int) -> Callable[[], object]:
    """Return a function that runs one step of the trainer."""
    shape = MeshShape(dp_replicate=NUM_RANKS)
    config = TrainConfig(
        model=ModelSettings(family=family_model("decoder", SIZES)),
        data=DataSettings(text="generated", length=LENGTH),
        training=TrainingSettings(batch_size=BATCH, learning_rate=RATE),
        stop=StopSettings(epochs=1_000),
        parallel=ParallelSettings(mesh=shape),
    )
    samples, scored = WindowSamples(tokens(), LENGTH), ScoredObjective(TOKENS)
    model = TrainableModel(module=Decoder(SIZES), layout=decoder_layout(SIZES), objective=scored.objective)
    engine = build_engine(model, config.parallel, config.training, build_mesh(shape, NUM_RANKS))
    return TrainingLoop(engine, scored, config, DataSplit(train=samples, held_out=samples)).step


def rank_of(rank: int, folder: str, blocks: int, steps: int) -> None:
    """Run all blocks on one rank. Rank 0 writes the seconds of each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=NUM_RANKS)
    loops = {"by_hand": by_hand(rank), "fanin": ours(rank)}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for block in range(blocks + 1):
        # The order alternates as well.
        for name in list(loops)[:: 1 if block % 2 else -1]:
            dist.barrier()
            started_s = time.perf_counter()
            for _ in range(steps):
                loops[name]()
            dist.barrier()
            seconds[name].append(time.perf_counter() - started_s)
    dist.destroy_process_group()
    if rank == 0:
        # The first block is the warm-up.
        (Path(folder) / "seconds.json").write_text(json.dumps({name: row[1:] for name, row in seconds.items()}))


def measured(blocks: int, steps: int) -> dict[str, object]:
    """Measure both throughputs and their ratio."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=rank_of, args=(rank, folder, blocks, steps)) for rank in range(NUM_RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("datacenter: a rank failed; its error is above")
        seconds: dict[str, list[float]] = json.loads((Path(folder) / "seconds.json").read_text())
    per_block = steps * BATCH * LENGTH
    rates = {name: per_block / statistics.median(row) for name, row in seconds.items()}
    ratio = rates["fanin"] / rates["by_hand"]
    return {
        "tokens_per_second": rates,
        "seconds_per_block_samples": seconds,
        "throughput_ratio": ratio,
        "gate_ratio": GATE,
        "kept": ratio >= GATE,
    }


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. Return 0 if the gate passes."""
    parser = argparse.ArgumentParser(description="Two copies by the trainer and by a hand-written loop.")
    parser.add_argument("--ddp", action="store_true", required=True, help="this measurement")
    parser.add_argument("--blocks", type=int, default=9, help="blocks of each that count")
    parser.add_argument("--steps", type=int, default=5, help="steps of a block")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE")
    options = parser.parse_args(argv)
    report = {"num_ranks": NUM_RANKS, "batch": BATCH, "length": LENGTH, **measured(options.blocks, options.steps)}
    if options.json:
        text = json.dumps(report, indent=1) + "\n"
        sys.stdout.write(text) if options.json == "-" else Path(options.json).write_text(text)
    else:
        rates = report["tokens_per_second"]
        verdict = "kept" if report["kept"] else "missed"
        sys.stdout.write(f"by hand {rates['by_hand']:.0f}, fanin {rates['fanin']:.0f} tokens/s\n")
        sys.stdout.write(f"ratio {report['throughput_ratio']:.3f}, gate {GATE}: {verdict}\n")
    return 0 if report["kept"] else 1
