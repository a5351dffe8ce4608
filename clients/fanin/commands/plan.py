"""``fanin plan``: rank the layouts of a model over ranks; the fastest layout that fits comes first, with its reason.

A layout is a mesh with its pipeline schedule, microbatches, recomputation and sharding. No process is started: the
numbers come from the formulas of ``fanin.datacenter.planner``.
"""

import sys
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Final, TextIO

import typer

from fanin import datacenter
from fanin.commands.console.terminal import JsonOption, prints_text, run_command, write_json
from fanin.commands.console.usage import wrong_usage

if TYPE_CHECKING:
    from fanin.datacenter.planner import LayoutChoice, LayoutRequest

# The names of the help text. The modules that define them import torch, which takes seconds.
PRESET_NAMES: Final = ("tiny", "8m", "125m", "350m", "1.5b", "8b", "70b")
LINK_NAMES: Final = (
    *("nvlink3", "nvlink4", "nvlink5", "pcie4", "pcie5", "ib-hdr", "ib-ndr"),
    *("ethernet-100", "ethernet-10", "loopback"),
)
DEVICE_NAMES: Final = ("a100", "h100", "h200", "b200")
SHOWN_AFTER_S: Final = 1.0
"""A search that takes longer reports its progress."""
SHOWN_EVERY_S: Final = 5.0
"""Seconds between two lines of progress where there is no terminal."""


def main(argv: Sequence[str]) -> int:
    """Run ``fanin plan``."""
    return run_command(plan, argv)


def plan(
    model: Annotated[
        str,
        typer.Option("--model", help=f"One of {', '.join(PRESET_NAMES)}, or a .toml file with a table [model.NAME]."),
    ],
    world: Annotated[
        int | None, typer.Option("--world", min=1, help="Number of ranks; default: those of --mesh.")
    ] = None,
    mesh: Annotated[
        str, typer.Option("--mesh", help="Only price this mesh, such as pp=2,dp_shard=4, even if it does not fit.")
    ] = "",
    memory: Annotated[
        float | None, typer.Option("--memory", help="Gigabytes (10^9) of each rank; default: 90 % of the device.")
    ] = None,
    link: Annotated[
        str,
        typer.Option("--link", help=f"Within a node: gigabytes a second, or one of {', '.join(LINK_NAMES)}."),
    ] = "nvlink4",
    between: Annotated[str, typer.Option("--between", help="Between nodes; default: same as --link.")] = "",
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", min=1, help="Ranks on one node.")] = 8,
    device: Annotated[
        str, typer.Option("--device", help=f"One of {', '.join(DEVICE_NAMES)}, or cpu: this machine, as measured.")
    ] = "h100",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Samples a step, over all ranks.")] = 256,
    sequence: Annotated[int, typer.Option("--sequence", min=1, help="Tokens a sample.")] = 2048,
    precision: Annotated[str, typer.Option("--precision", help="bf16, full: float32, or double: float64.")] = "bf16",
    efficiency: Annotated[
        float | None,
        typer.Option(
            "--efficiency",
            min=0.01,
            max=1.0,
            help="Share of the peak that matrix products reach; default: the device's.",
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Number of layouts to show.")] = 10,
    json: JsonOption = "",
) -> int:
    """Rank every way to spread a model over ranks by predicted step time, and refuse what cannot fit."""
    with wrong_usage():
        options = datacenter.PlanOptions(
            model=model,
            world=world,
            mesh=mesh,
            memory_gb=memory,
            link=link,
            between=between,
            ranks_per_node=ranks_per_node,
            device=device,
            batch_size=batch,
            sequence=sequence,
            precision=precision,
            efficiency=efficiency,
        )
    result = datacenter.plan(options, progress_of(sys.stderr))
    wanted, choices = result.request, result.choices
    if json:
        write_json(json, _report(wanted, choices, top))
    if prints_text(json):
        sys.stdout.write(_text(wanted, choices, top))
    return 0


def progress_of(stream: TextIO, now: Callable[[], float] = monotonic) -> Callable[[float, int], None]:
    """Return a callback for the search: it overwrites one progress line on a terminal, or writes a line every 5 s."""
    start_s = now()
    due_s = start_s + SHOWN_AFTER_S
    overwrites = stream.isatty()

    def show(share: float, num_ways: int) -> None:
        nonlocal due_s
        time_s = now()
        if time_s < due_s:
            return
        due_s = time_s + (SHOWN_AFTER_S if overwrites else SHOWN_EVERY_S)
        line = f"plan: {share:.0%} of the meshes, {num_ways:,} ways, {time_s - start_s:.0f} s"
        stream.write(f"\r{line}" if overwrites else f"{line}\n")
        stream.flush()

    return show


def _report(wanted: "LayoutRequest", choices: "Sequence[LayoutChoice]", top: int) -> dict[str, object]:
    facts = wanted.facts
    return {
        "model": facts.name,
        "num_parameters": facts.num_values,
        "flops_per_token": facts.work.flops_per_token(wanted.sequence),
        "world": wanted.world,
        "memory_bytes": wanted.memory_bytes,
        "device": wanted.machine.hardware.name,
        "peak_flops_per_second": wanted.machine.hardware.flops_per_second,
        "batch_size": wanted.batch_size,
        "sequence": wanted.sequence,
        "efficiency": wanted.machine.efficiency,
        "num_choices": len(choices),
        "choices": [_row(choice) for choice in choices[:top]],
    }


def _row(choice: "LayoutChoice") -> dict[str, object]:
    from fanin.datacenter.network.counters import by_axis

    parallel, memory = choice.job.parallel, choice.memory
    return {
        "mesh": parallel.mesh.sizes,
        "schedule": parallel.schedule if parallel.pipelined else None,
        "microbatches": parallel.microbatches,
        "recompute": parallel.recompute,
        "reshard": parallel.reshards if parallel.sharded else None,
        "sequence_parallel": parallel.sequence_parallel,
        "seconds_per_step": choice.timing.seconds,
        "seconds": choice.timing.parts,
        "tokens_per_second": choice.tokens_per_second,
        "mfu": choice.mfu,
        "fits": choice.fits,
        "peak_memory_bytes": memory.total,
        "memory_bytes": {
            "parameters": memory.parameters,
            "optimizer": memory.optimizer,
            "gradients": memory.gradients,
            "activations": memory.activations,
            "working": memory.working,
        },
        "bytes_per_step": by_axis(choice.timing.traffic),
        "reason": choice.reason,
    }


def _text(wanted: "LayoutRequest", choices: "Sequence[LayoutChoice]", top: int) -> str:
    from fanin.datacenter.planner.choices import describe

    facts = wanted.facts
    work = facts.work.flops_per_token(wanted.sequence)
    head = f"{facts.name}: {facts.num_values / 1e6:,.1f} M parameters, {work / 1e9:,.2f} GFLOP a token"
    num_fitting, num = sum(choice.fits for choice in choices), len(choices)
    fits = f"{num_fitting} ways fit" if num_fitting == num else f"{num_fitting} of {num} ways fit"
    lines = [f"{head}; {wanted.world} x {wanted.machine.hardware.name}; {fits}"]
    for number, choice in enumerate(choices[:top], start=1):
        lines += [
            f"{number:3}. {describe(choice.job.parallel)}",
            f"     {_numbers(choice)}",
            f"     {choice.reason}",
        ]
    return "\n".join(lines) + "\n"


def _numbers(choice: "LayoutChoice") -> str:
    from fanin.datacenter.planner.choices import GIGABYTE

    return (
        f"{choice.timing.seconds:.3f} s a step, {choice.tokens_per_second:,.0f} tokens/s, MFU {choice.mfu:.1%}, "
        f"{choice.memory.total / GIGABYTE:.1f} GB" + ("" if choice.fits else ": does not fit")
    )
