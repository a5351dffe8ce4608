"""``fanin inspect``: verify a Bundle and show what is in it."""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fanin.clients.operator import read_text
from fanin.commands.terminal import JsonOption, run_command, write_json
from fanin.edge.bundle import Bundle, open_folder, read_signed_manifest
from fanin.edge.manifest import Port
from fanin.protos.messages import check_key


def main(argv: Sequence[str]) -> int:
    """The command."""
    return run_command(inspect, argv)


def inspect(
    bundle: Annotated[Path, typer.Argument(help="The bundle's folder.")],
    publisher: Annotated[
        Path | None,
        typer.Option("--publisher", help="File with the public key that must have signed it; default: whoever did."),
    ] = None,
    json: JsonOption = "",
) -> None:
    """Verify a bundle's signature and every artifact's digest, then show its facts."""
    if publisher is None:
        trusted = read_signed_manifest(bundle).public_key
    else:
        trusted = read_text(publisher, "--publisher").strip()
        check_key(f"--publisher: {publisher}", trusted)
    opened = open_folder(bundle, trusted=(trusted,))
    for name in opened.manifest.artifacts:
        opened.artifact(name)
    opened.initial_parameters()
    row = bundle_row(opened)
    if json:
        write_json(json, row)
    else:
        sys.stdout.write(_text(opened, row))


def bundle_row(bundle: Bundle) -> dict[str, object]:
    """A Bundle's facts for programs."""
    manifest = bundle.manifest
    return {
        "bundle_sha256": bundle.sha256,
        "name": manifest.name,
        "publisher": bundle.signed.public_key,
        "verified": True,
        "num_parameters": manifest.table.num_values,
        "batch_size": manifest.batch_size,
        "num_classes": manifest.num_classes,
        "parameters": {spec.name: list(spec.shape) for spec in manifest.table.specs},
        "signatures": {
            name: {
                "graphs": dict(found.graphs),
                "inputs": [_port_row(port) for port in found.inputs],
                "outputs": [_port_row(port) for port in found.outputs],
            }
            for name, found in manifest.signatures.items()
        },
        "slots": dict(Counter(str(slot.kind) for slot in manifest.slots)),
        "artifacts": {
            name: {"sha256": artifact.sha256, "size_bytes": artifact.size_bytes}
            for name, artifact in manifest.artifacts.items()
        },
    }


def _port_row(port: Port) -> dict[str, object]:
    return {"name": port.name, "dtype": port.dtype, "shape": list(port.shape)}


def _text(bundle: Bundle, row: dict[str, object]) -> str:
    manifest = bundle.manifest
    lines = [
        f"bundle {bundle.sha256}",
        f"  name        {manifest.name}",
        f"  publisher   {bundle.signed.public_key} (signature verified)",
        f"  parameters  {manifest.table.num_values} values in {len(manifest.table.specs)} tensors",
        f"  batch size  {manifest.batch_size}, {manifest.num_classes} classes",
        f"  int8 slots  {len(manifest.slots)} {row['slots']}",
        "  signatures",
        *(
            f"    {name:10} {len(found.inputs)} inputs, {len(found.outputs)} outputs, "
            f"{', '.join(f'{kind}: {file}' for kind, file in found.graphs.items())}"
            for name, found in manifest.signatures.items()
        ),
        "  artifacts (digests verified)",
        *(
            f"    {name:24} {artifact.size_bytes:>10} bytes  {artifact.sha256}"
            for name, artifact in manifest.artifacts.items()
        ),
    ]
    return "\n".join(lines) + "\n"
