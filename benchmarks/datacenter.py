"""The pipeline bubble: the time of a step against the formula a + (m + p - 1) t, for m = 2 to 16 microbatches.

    python benchmarks/datacenter.py --bubble [--schedule 1F1B] [--work sleep|decoder] [--json [FILE]]
    python benchmarks/datacenter.py --ddp      # another measurement, in datacenter_ddp.py

Two ranks (p = 2) with one thread each communicate over gloo. ``sleep`` uses layers that wait 10 ms forward and 20 ms
backward, so other load on the machine hardly matters. ``decoder`` uses layers that compute. A microbatch has the same
number of samples for every m.

a and t are fitted to the medians by least squares. ``worst_share`` is the largest relative distance of a median from
the fitted line. The gate is 0.10.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import datacenter_ddp
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fanin.datacenter.families.decoders import decoder_layout
from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import build_engine
from fanin.datacenter.parallel.layout import Layout, ModelSizes
from fanin.datacenter.parallel.objective import sample_objective
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.parallel.torch_messages import silence_expected_messages
from fanin.datacenter.ranks.devices import build_mesh
from fanin.datacenter.ranks.mesh import MeshShape

NUM_RANKS: Final = 2
MICROBATCHES: Final = (2, 4, 6, 8, 12, 16)
GATE: Final = 0.10
FORWARD_S, BACKWARD_S = 0.010, 0.020
WIDTH: Final = 8
LENGTH: Final = 64
CONFIG: Final = DecoderConfig(vocabulary=128, width=128, num_layers=4, num_heads=4, num_kv_heads=4, feed_forward=352)


class Wait(torch.autograd.Function):
    """The identity, with a delay in both directions."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD_S)
        return gradient.clone()


class WaitingLayer(nn.Module):
    """A layer that only waits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, scaled."""
        return Wait.apply(x * self.scale)


class WaitingModel(nn.Module):
    """A model with one layer for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(WaitingLayer() for _ in range(NUM_RANKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, WIDTH) to the same shape."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def waiting_model() -> TrainableModel:
    """Return a model whose layers sleep."""
    sizes = ModelSizes(num_layers=NUM_RANKS, num_heads=1, num_kv_heads=1, feed_forward=1)
    layout = Layout(sizes=sizes, inputs=("embed",), layers="layers", outputs=("head",), plan={})
    objective = sample_objective(lambda outputs, targets: (outputs - targets).square().sum(-1))
    return TrainableModel(module=WaitingModel(), layout=layout, objective=objective)


def decoder_model() -> TrainableModel:
    """Return a model whose layers compute."""
    return TrainableModel(module=Decoder(CONFIG), layout=decoder_layout(CONFIG))


def batch_of(work: str, num_samples: int) -> Batch:
    """Return a batch of zeros. The values do not affect the time."""
    if work == "sleep":
        zeros = torch.zeros(num_samples, WIDTH)
        return Batch(inputs=zeros, targets=zeros)
    tokens = torch.zeros(num_samples, LENGTH, dtype=torch.long)
    return Batch(inputs=tokens, targets=tokens)


def rank_of(rank: int, folder: str, schedule: str, work: str, repeats: int) -> None:
    """Run all microbatch counts on one rank. Rank 0 writes the seconds of each step."""
    torch.set_num_threads(1)
    silence_expected_messages()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=NUM_RANKS)
    shape, engines = MeshShape(pp=NUM_RANKS), {}
    mesh = build_mesh(shape, NUM_RANKS)
    for microbatches in MICROBATCHES:
        model = (
            waiting_model()
            if work == "sleep"
            else TrainableModel(module=Decoder(CONFIG), layout=decoder_layout(CONFIG))
        )
        parallel = ParallelSettings(mesh=shape, schedule=schedule, microbatches=microbatches)
        training = TrainingSettings(batch_size=microbatches, learning_rate=1e-3)
        engines[microbatches] = build_engine(model, parallel, training, mesh)
    samples: dict[int, list[float]] = {microbatches: [] for microbatches in MICROBATCHES}
    # The first step infers shapes, and runs one more microbatch. The engines alternate, so other load affects all.
    for _ in range(repeats + 2):
        for microbatches, engine in engines.items():
            batch = batch_of(work, microbatches)
            dist.barrier()
            started_s = time.perf_counter()
            engine.step(batch, microbatches)
            samples[microbatches].append(time.perf_counter() - started_s)
    dist.destroy_process_group()
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(
            json.dumps({microbatches: each[2:] for microbatches, each in samples.items()})
        )


def measure(schedule: str, work: str, repeats: int) -> dict[int, list[float]]:
    """Measure the seconds of each step, by the number of microbatches."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            fork.Process(target=rank_of, args=(rank, folder, schedule, work, repeats)) for rank in range(NUM_RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("datacenter: a rank failed; its error is above")
        samples = json.loads((Path(folder) / "seconds.json").read_text())
    return {int(number): seconds for number, seconds in samples.items()}


def fit(samples: dict[int, list[float]]) -> dict[str, object]:
    """Fit the formula to the times, and return the fit with its largest error."""
    medians = {number: statistics.median(seconds) for number, seconds in samples.items()}
    slots = np.array([number + NUM_RANKS - 1 for number in medians], float)
    seconds = np.array(list(medians.values()))
    (each_s, once_s), *_ = np.linalg.lstsq(np.stack([slots, np.ones_like(slots)], 1), seconds, rcond=None)
    line = once_s + slots * each_s
    worst = float(np.abs(seconds / line - 1).max())
    return {
        "seconds_per_step": medians,
        "seconds_per_step_samples": samples,
        "fitted_seconds_per_step": dict(zip(medians, line.tolist(), strict=True)),
        "fixed_seconds": float(once_s),
        "seconds_per_slot": float(each_s),
        "worst_share": worst,
        "gate_share": GATE,
        "kept": worst <= GATE,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return 0 if the gate passes."""
    arguments = sys.argv[1:] if argv is None else argv
    if "--ddp" in arguments:
        return datacenter_ddp.main(arguments)
    parser = argparse.ArgumentParser(description="The bubble of a pipeline of two ranks against its law.")
    parser.add_argument("--bubble", action="store_true", required=True, help="this measurement; --ddp is the other")
    parser.add_argument("--schedule", choices=("GPipe", "1F1B"), default="1F1B")
    parser.add_argument("--work", choices=("sleep", "decoder"), default="sleep")
    parser.add_argument("--repeats", type=int, default=5, help="steps that count, for each number of microbatches")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE")
    options = parser.parse_args(arguments)
    result = fit(measure(options.schedule, options.work, options.repeats))
    report = {"schedule": options.schedule, "work": options.work, "num_ranks": NUM_RANKS, **result}
    if options.json:
        text = json.dumps(report, indent=1) + "\n"
        sys.stdout.write(text) if options.json == "-" else Path(options.json).write_text(text)
    else:
        for number, seconds in report["seconds_per_step"].items():
            fitted_s = report["fitted_seconds_per_step"][number]
            sys.stdout.write(f"m {number:3}  {1e3 * seconds:8.1f} ms  law {1e3 * fitted_s:8.1f} ms\n")
        verdict = "kept" if report["kept"] else "missed"
        sys.stdout.write(f"worst {report['worst_share']:.1%}, gate {GATE:.0%}: {verdict}\n")
    return 0 if report["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
