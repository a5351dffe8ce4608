"""``fanin assemble``: a signed Bundle of graphs that another exporter made, checked by the runtimes that are here."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fanin.commands.terminal import DEFAULT_KEY, JsonOption, publisher_key, run_command, write_json
from fanin.edge.assembly.assemble import assemble as assemble_bundle
from fanin.edge.assembly.facts import read_assembly
from fanin.protos.errors import InvalidInput


def main(argv: Sequence[str]) -> int:
    """The command."""
    return run_command(assemble, argv)


def assemble(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.toml", help="What it is made of: graphs, Version 0's parameters, sizes (docs/edge.md)."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The bundle's folder; it must not hold one yet.")],
    key: Annotated[
        Path, typer.Option("--key", help="The publisher's key; made on first use, its public half beside it.")
    ] = DEFAULT_KEY,
    json: JsonOption = "",
) -> None:
    """Open, check and run another exporter's graphs as a device would, then sign them as a bundle."""
    if out.exists() and any(out.iterdir()):
        raise InvalidInput(f"--out: {out} is not empty, expected a new folder")
    bundle = assemble_bundle(read_assembly(file), out, publisher_key(key))
    manifest = bundle.manifest
    formats = sorted(manifest.signatures["infer"].graphs)
    if json:
        row = {
            "bundle": bundle.sha256,
            "formats": formats,
            "num_parameters": manifest.table.num_values,
            "size_bytes": {name: artifact.size_bytes for name, artifact in manifest.artifacts.items()},
        }
        write_json(json, row)
        return
    sizes = ", ".join(f"{name} {artifact.size_bytes} bytes" for name, artifact in manifest.artifacts.items())
    sys.stdout.write(
        f"bundle {bundle.sha256} in {out}\n"
        f"  parameters that travel  {manifest.table.num_values}\n"
        f"  artifacts               {sizes}\n"
        f"  each graph ran once in {', '.join(formats)}; whether a step learns is its maker's to test\n"
    )
