"""The options of the demo. This module imports neither torch nor a runtime, so the help is printed at once."""

from pathlib import Path
from typing import Annotated, Final

import typer

from fanin.commands.console.terminal import JsonOption, VerboseOption, prints_text, write_json
from fanin.edge.codecs.fixed import CODECS

DEFAULT_MESH: Final = "pp=2,tp=2"
DATA_SETS: Final = ("digits", "fashion-mnist")
"""The names of the tasks, for the help. ``tasks`` imports torch."""


def demo(
    devices: Annotated[int, typer.Option("--devices", help="Number of devices.")] = 8,
    rounds: Annotated[
        int,
        typer.Option("--rounds", help="Maximum rounds before the datacenter trains again; 0: the data set's default."),
    ] = 0,
    dataset: Annotated[str, typer.Option("--dataset", help=f"Data set: {', '.join(DATA_SETS)}.")] = "digits",
    runtimes: Annotated[
        str, typer.Option("--runtimes", help="The devices' runtimes, in turn: onnx, litert, tflite.")
    ] = "onnx",
    codec: Annotated[str, typer.Option("--codec", help=f"Codec of the updates: {', '.join(CODECS)}.")] = "fixed32",
    alpha: Annotated[
        float, typer.Option("--alpha", help="Dirichlet alpha of the split: 0.1 very uneven, 100 even.")
    ] = 0.5,
    seed: Annotated[int, typer.Option("--seed", help="Seed; the final version of a seed is bit-identical.")] = 0,
    mesh: Annotated[
        str, typer.Option("--mesh", help="The datacenter's processes by axis: pp, dp_replicate, dp_shard, tp; or none.")
    ] = DEFAULT_MESH,
    device_python: Annotated[
        list[Path] | None,
        typer.Option("--device-python", help="Python of the devices' environment; once for each of --runtimes."),
    ] = None,
    delay_seed: Annotated[
        int, typer.Option("--delay-seed", help="Seed of random delays before uploads; -1: no delays.")
    ] = -1,
    state: Annotated[
        Path | None, typer.Option("--state", help="Keep everything in this new folder; default: a temporary one.")
    ] = None,
    verbose: VerboseOption = False,
    json: JsonOption = "",
) -> None:
    """Train one model across a datacenter and devices, all on this machine: 1,797 handwritten digits, no network.

    The datacenter pre-trains on a few of them with torchrun. A coordinator and the devices, each in its own process,
    federate over the others with TLS. The datacenter continues from the last version, and one more round runs.
    """
    # Importing torch takes seconds.
    from fanin.commands.demo.report import json_row, print_table
    from fanin.commands.demo.steps import DemoOptions, run_demo

    options = DemoOptions(
        devices=devices,
        rounds=rounds,
        dataset=dataset,
        runtimes=runtimes,
        codec=codec,
        alpha=alpha,
        seed=seed,
        mesh=mesh,
        device_python=tuple(device_python or ()),
        delay_seed=delay_seed,
        state=state,
        verbose=verbose,
    )
    findings = run_demo(options)
    if prints_text(json):
        print_table(findings)
    if json:
        write_json(json, json_row(findings))
