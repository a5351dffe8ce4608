"""``fanin bundle``: a signed Bundle without graphs, for Flower apps: the initial arrays alone."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fanin.clients.flower.initial import read_initial
from fanin.clients.flower.task import FlowerSettings
from fanin.commands.console.terminal import DEFAULT_KEY, JsonOption, prints_text, publisher_key, run_command, write_json
from fanin.commands.console.usage import wrong_usage
from fanin.edge.bundles.arrays import read_layout, write_arrays
from fanin.edge.files import new_folder
from fanin.edge.tensors import Array
from fanin.protos.errors import InvalidInput
from fanin.protos.texts import counted


def main(argv: Sequence[str]) -> int:
    """Run ``fanin bundle``."""
    return run_command(bundle, argv)


def bundle(
    out: Annotated[Path, typer.Option("--out", help="A new folder for the bundle.")],
    initial: Annotated[
        str,
        typer.Option(
            "--initial",
            metavar="FILE.npz|MODULE:NAME",
            help="The arrays of version 0: a file, or what returns a torch module, a state dict or a list of arrays.",
        ),
    ] = "",
    flower: Annotated[
        str,
        typer.Option(
            "--flower", metavar="MODULE:APP", help="The app whose NumPyClient returns them, without --initial."
        ),
    ] = "",
    name: Annotated[str, typer.Option("--name", help="Name of the model.")] = "flower",
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
    new_bundle = write_arrays(_arrays(initial, flower), out, publisher_key(key), name)
    table, local = new_bundle.manifest.table, read_layout(new_bundle).local
    if json:
        row = {"bundle": new_bundle.sha256, "num_parameters": table.num_values, "local_arrays": sorted(local)}
        write_json(json, row)
    if not prints_text(json):
        return
    for each, value in local.items():
        sys.stderr.write(f"note: array {each} is {value.dtype}, not float32: each device keeps its own\n")
    sys.stdout.write(
        f"bundle {new_bundle.sha256} in {out}\n"
        f"  parameters that travel  {table.num_values} in {counted(len(table.specs), 'array')}\n"
        f"  arrays that stay local  {len(local)}\n"
    )


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
    from fanin.clients.flower.app import FlowerApp

    return FlowerApp(FlowerSettings(app=flower, folder=Path.cwd())).initial()
