"""``fanin bundle``: a signed Bundle without graphs, for Flower apps: the initial arrays alone."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fanin.clients.device.policy.owner import read_floor
from fanin.clients.flower.initial import read_initial
from fanin.clients.flower.task import FlowerSettings
from fanin.commands.console.terminal import DEFAULT_KEY, JsonOption, prints_text, publisher_key, run_command, write_json
from fanin.commands.console.usage import wrong_usage
from fanin.edge.bundles.arrays import ArrayChoices, ArrayLayout, read_layout, write_arrays
from fanin.edge.files import new_folder
from fanin.edge.floors.floor import NO_FLOOR
from fanin.edge.tensors import Array
from fanin.protos.errors import InvalidInput
from fanin.protos.texts import counted, listed


def main(argv: Sequence[str]) -> int:
    """Run ``fanin bundle``."""
    return run_command(bundle, argv)


def bundle(
    out: Annotated[Path, typer.Option("--out", help="A new folder for the bundle.")],
    initial: Annotated[
        str,
        typer.Option(
            "--initial",
            metavar="FILE|MODULE:NAME",
            help="The arrays of version 0: an .npz, .npy, .pt, .ckpt or .safetensors file, or what returns a model, a "
            "state dict or a list of arrays.",
        ),
    ] = "",
    flower: Annotated[
        str,
        typer.Option(
            "--flower",
            metavar="MODULE:APP|FOLDER",
            help="The app whose NumPyClient returns them, or the project whose ServerApp or client has them.",
        ),
    ] = "",
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="PATTERN", help="Arrays that stay on each device, as in 'head.*'."),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the model.")] = "flower",
    privacy_floor: Annotated[
        Path | None,
        typer.Option(
            "--privacy-floor",
            metavar="FILE",
            help="The least privacy with which devices train it, as a table [privacy_floor] in TOML.",
        ),
    ] = None,
    key: Annotated[
        Path,
        typer.Option("--key", help="The publisher's key; created on first use, with its public half in a .pub file."),
    ] = DEFAULT_KEY,
    json: JsonOption = "",
) -> None:
    """Write a signed bundle of arrays without graphs, which Flower apps train (docs/howto/flower.md)."""
    with wrong_usage():
        new_folder("--out", out)
        _check_source(initial, flower)
    floor = NO_FLOOR if privacy_floor is None else read_floor(privacy_floor, f"--privacy-floor: {privacy_floor}")
    choices = ArrayChoices(kept=keep or (), privacy_floor=floor)
    new_bundle = write_arrays(_arrays(initial, flower), out, publisher_key(key), name, choices)
    table, layout = new_bundle.manifest.table, read_layout(new_bundle)
    local = layout.local
    if json:
        row = {"bundle": new_bundle.sha256, "num_parameters": table.num_values, "local_arrays": sorted(local)}
        write_json(json, row)
    if not prints_text(json):
        return
    sys.stderr.writelines(f"note: {note}\n" for note in _notes(layout))
    sys.stdout.write(
        f"bundle {new_bundle.sha256} in {out}\n"
        f"  parameters that travel  {table.num_values} in {counted(len(table.specs), 'array')}\n"
        f"  arrays that stay local  {len(local)}\n"
    )


def _notes(layout: ArrayLayout) -> Iterator[str]:
    """Yield notes on the arrays that are not float32, or do not travel."""
    for dtype in sorted({*layout.dtypes.values()}, key=str):
        names = [name for name, each in layout.dtypes.items() if each == dtype]
        is_float = dtype.kind == "f"
        rule = "and is that dtype in apps" if is_float else "and each mean is rounded to whole numbers; see --keep"
        yield f"{listed(names)} ({dtype}): travels as float32, {rule}"
    if layout.local:
        names = [f"{name} ({value.dtype})" for name, value in layout.local.items()]
        yield f"{listed(names)}: does not travel, and each device has its own"


def _check_source(initial: str, flower: str) -> None:
    """Raise InvalidInput unless one of the options has the initial arrays."""
    if bool(initial) == bool(flower):
        raise InvalidInput(
            f"--initial and --flower: got {'both' if initial else 'neither'}, expected one: --initial FILE.npz or "
            "MODULE:NAME, or --flower MODULE:APP for an app of a NumPyClient",
            code="FN-0916",
        )


def _arrays(initial: str, flower: str) -> dict[str, Array]:
    """Return the initial arrays. Raises InvalidInput."""
    if initial:
        return read_initial(initial, Path.cwd())
    from fanin.clients.flower.app import FlowerApp, initial_arrays

    settings = FlowerSettings(app=flower, folder=Path.cwd())
    return initial_arrays(settings, FlowerApp(settings))
