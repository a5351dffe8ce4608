"""``fanin assemble``: a signed Bundle from graphs of another exporter, checked with the installed runtimes."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fanin.commands.console.terminal import DEFAULT_KEY, JsonOption, prints_text, publisher_key, run_command, write_json
from fanin.commands.console.usage import wrong_usage
from fanin.edge.assembly.assemble import assemble as assemble_bundle
from fanin.edge.assembly.facts import read_assembly
from fanin.edge.files import new_folder


def main(argv: Sequence[str]) -> int:
    """Run ``fanin assemble``."""
    return run_command(assemble, argv)


def assemble(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.toml",
            help="Describes the graphs, the parameters of version 0 and the sizes (docs/howto/assemble.md).",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="A new folder for the bundle.")],
    key: Annotated[
        Path,
        typer.Option("--key", help="The publisher's key; created on first use, with its public half in a .pub file."),
    ] = DEFAULT_KEY,
    json: JsonOption = "",
) -> None:
    """Open, check and run the graphs of another exporter as a device would, then sign them as a bundle."""
    with wrong_usage():
        new_folder("--out", out)
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
    if not prints_text(json):
        return
    sizes = ", ".join(f"{name} {artifact.size_bytes} bytes" for name, artifact in manifest.artifacts.items())
    sys.stdout.write(
        f"bundle {bundle.sha256} in {out}\n"
        f"  parameters that travel  {manifest.table.num_values}\n"
        f"  artifacts               {sizes}\n"
        f"  each graph ran once in {', '.join(formats)}; test yourself that the train step learns\n"
    )
