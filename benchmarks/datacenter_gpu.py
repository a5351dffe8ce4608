"""Tokens a second, MFU and peak memory of a decoder on one GPU, compared with a plain torch loop of the same model.

    python benchmarks/datacenter_gpu.py [--size 125m,350m,1.5b] [--sequence 2048] [--steps 50]
                                        [--recompute selective|none] [--json [FILE]]
    python benchmarks/datacenter_gpu.py --device cpu --size tiny --steps 3      (only shows that it runs)

Both use bf16, torch.compile for each layer, flash attention (scaled_dot_product_attention) and AdamW, and by default
selective recomputation. ``fanin`` is the engine that ``fanin train`` uses, on one process. ``plain`` is a hand-written
loop with the same module, compilation, recomputation and optimizer. The two alternate step by step in one process; the
result is the median of the steps after the warm-up.

MFU is defined in ``fanin.datacenter.watch.flops``. The gate is 45 % and the goal 55 %, for 1.5 B parameters at a
sequence of 2048 on an H200. Peak memory excludes the other model; on a CPU it is that of the whole process. Without a
CUDA device the benchmark stops, unless ``--device cpu`` is set.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fanin.datacenter.families.decoders import PRESETS, decoder_layout
from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import build_engine
from fanin.datacenter.parallel.settings import ParallelSettings, Recompute, TrainingSettings
from fanin.datacenter.parallel.transforms.recompute import keep_expensive
from fanin.datacenter.planner.facts import decoder_facts
from fanin.datacenter.watch.flops import best_gemm, hardware_of, mfu
from fanin.datacenter.watch.meters import peak_resident_bytes

GATE, GOAL = 0.45, 0.55
RATE: Final = 1e-4
BETAS: Final = (0.9, 0.95)
SAMPLES: Final = {"tiny": 4, "8m": 32, "125m": 32, "350m": 16, "1.5b": 8}
"""Samples of 2048 tokens in a step that fit an H200 together with the state of both models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One measurement: a preset, its batch and its device."""

    size: str
    samples: int
    sequence: int
    device: torch.device
    compiled: bool
    recompute: Recompute

    @property
    def config(self) -> DecoderConfig:
        """The config of the decoder."""
        return PRESETS[self.size]

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return random tokens, and each next token."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, self.config.vocabulary, (self.samples, self.sequence + 1), generator=generator)
        tokens = tokens.to(self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def engine_step(course: Course) -> Callable[[], float]:
    """Run one step of fanin's engine. Return its loss."""
    with course.device:
        module = Decoder(course.config)
    parallel = ParallelSettings(recompute=course.recompute, precision="bf16", compile=course.compiled)
    training = TrainingSettings(batch_size=course.samples, learning_rate=RATE, betas=BETAS)
    model = TrainableModel(module=module, layout=decoder_layout(course.config))
    engine = build_engine(model, parallel, training, None, course.device)
    inputs, targets = course.batch()
    batch = Batch(inputs=inputs, targets=targets)
    return lambda: float(engine.step(batch, targets.numel()).loss)


def plain_step(course: Course) -> Callable[[], float]:
    """Run one step of the hand-written loop. Return its loss."""
    with course.device:
        module = Decoder(course.config)
    again = partial(create_selective_checkpoint_contexts, keep_expensive)
    for layer in module.layers:
        if course.recompute == "selective":
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=again)
        if course.compiled:
            layer.compile()
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0, fused=True)
    inputs, targets = course.batch()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(course.device.type, torch.bfloat16):
            logits = module(inputs)
        loss = cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def measure(course: Course, steps: int, warm_up: int) -> dict[str, object]:
    """Measure both, alternating step by step."""
    factories = {"fanin": engine_step, "plain": plain_step}
    runs: dict[str, Callable[[], float]] = {}
    losses: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    for name, make in factories.items():
        # The bytes that are already allocated belong to the other model, which is idle.
        others = _begin_peak(course.device)
        runs[name] = make(course)
        losses[name] = [runs[name]() for _ in range(max(2, warm_up))]
        peaks[name] = _end_peak(course.device) - others
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(steps):
        for name, run in runs.items():
            started_s = time.perf_counter()
            losses[name].append(run())  # the loss is read: the step is over
            seconds[name].append(time.perf_counter() - started_s)
    return {name: _row(course, seconds[name], losses[name], peaks[name]) for name in runs}


def _begin_peak(device: torch.device) -> int:
    """Return the bytes that are already allocated, and start to count the peak."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _end_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


def _row(course: Course, seconds: list[float], losses: list[float], peak: int) -> dict[str, object]:
    median = statistics.median(seconds)
    rate = course.samples * course.sequence / median
    per_token = decoder_facts(course.size, course.config).work.flops_per_token(course.sequence)
    return {
        "seconds_per_step": median,
        "seconds_per_step_samples": seconds,
        "tokens_per_second": rate,
        "mfu": mfu(per_token, rate, _peak_flops(course.device)),
        "peak_memory_bytes": peak,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _peak_flops(device: torch.device) -> float:
    if device.type != "cuda":
        return best_gemm(torch.bfloat16, sizes=(256, 512))
    name = torch.cuda.get_device_name(device)
    known = hardware_of(name)
    if known is None:
        raise SystemExit(
            f"datacenter_gpu: got {name!r}, whose peak is not in fanin.datacenter.watch.flops; add its row"
        )
    return known.flops_per_second


def device_of(name: str) -> torch.device:
    """Return the device. Exit with an error message if there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "datacenter_gpu: got no CUDA device, expected one; run it on a machine with a GPU, or give --device cpu "
            "--size tiny to see that it runs"
        )
    return torch.device(name)


def report_of(options: argparse.Namespace) -> dict[str, object]:
    """Return the report by size."""
    device = device_of(options.device)
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "sequence": options.sequence,
        "steps": options.steps,
        "compiled": options.compile,
        "recompute": options.recompute,
        "mfu_definition": "6 N_matmul + 6 layers heads (query width + value width) sequence, peak dense bf16",
        "gate_mfu": GATE,
        "goal_mfu": GOAL,
    }
    for size in options.size:
        course = Course(
            size=size,
            samples=options.samples or SAMPLES[size],
            sequence=options.sequence,
            device=device,
            compiled=options.compile,
            recompute=options.recompute,
        )
        rows = measure(course, options.steps, options.warm_up)
        ratio = rows["plain"]["seconds_per_step"] / rows["fanin"]["seconds_per_step"]
        report[size] = {"samples": course.samples, **rows, "speed_against_plain": ratio}
        torch.cuda.empty_cache()
    return report


def sizes(text: str) -> list[str]:
    """Return the presets that fit one GPU twice."""
    presets = text.split(",")
    if unknown := [each for each in presets if each not in SAMPLES]:
        raise argparse.ArgumentTypeError(f"got {unknown}, expected some of {', '.join(SAMPLES)}")
    return presets


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    options = argparse.ArgumentParser(description="A decoder on one GPU, compared with a plain torch loop.")
    options.add_argument("--size", type=sizes, default="125m,350m,1.5b", help=f"some of {', '.join(SAMPLES)}")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--sequence", type=int, default=2048)
    options.add_argument("--samples", type=int, default=0, help="of a step; default: by size")
    options.add_argument("--steps", type=int, default=50, help="that count")
    options.add_argument("--warm-up", type=int, default=5)
    options.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    options.add_argument("--recompute", choices=("selective", "none"), default="selective")
    options.add_argument("--json", nargs="?", const="-", metavar="FILE")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser().parse_args(argv)
    report = report_of(options)
    if options.json:
        text = json.dumps(report, indent=1) + "\n"
        sys.stdout.write(text) if options.json == "-" else Path(options.json).write_text(text)
        return 0
    for size in options.size:
        for name in ("fanin", "plain"):
            row = report[size][name]
            sys.stdout.write(
                f"{size:5} {name:6} {row['tokens_per_second']:12,.0f} tokens/s  MFU {row['mfu']:.1%}  "
                f"{row['peak_memory_bytes'] / 1e9:.1f} GB\n"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
