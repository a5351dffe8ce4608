"""``fanin inspect``: verify and show a Bundle, or show a model file."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fanin.clients.textfiles import read_public_key
from fanin.commands.console.terminal import JsonOption, prints_text, run_command, write_json
from fanin.commands.console.usage import wrong_usage
from fanin.edge.bundles.bundle import Bundle, open_folder, read_signed_manifest
from fanin.edge.bundles.formats import format_of
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.codecs.trained import TrainedPart
from fanin.edge.floors.floor import NO_FLOOR
from fanin.edge.floors.rows import floor_row, floor_text
from fanin.edge.lengths import Lengths
from fanin.edge.queries.files import query_row
from fanin.edge.runtimes.available import open_format
from fanin.edge.runtimes.base import ModelPort
from fanin.edge.runtimes.models import PREPROCESS
from fanin.edge.signatures import Port
from fanin.edge.tensors import TensorTable, sha256_hex
from fanin.protos.texts import counted


def main(argv: Sequence[str]) -> int:
    """Run ``fanin inspect``."""
    return run_command(inspect, argv)


def inspect(
    what: Annotated[Path, typer.Argument(metavar="WHAT", help="A bundle's folder, or a .onnx or .tflite file.")],
    publisher: Annotated[
        Path | None,
        typer.Option("--publisher", help="File with the public key that must have signed it; default: any signer."),
    ] = None,
    signature: Annotated[
        str, typer.Option("--signature", help="The signature to show, if a .tflite file has several.")
    ] = "",
    runtime: Annotated[
        str, typer.Option("--runtime", help="The runtime that opens a file; default: the first that can.")
    ] = "",
    json: JsonOption = "",
) -> None:
    """Verify a bundle's signature and the digest of every artifact, then show its contents; or show a model file."""
    if what.is_file():
        with wrong_usage():
            format_of(what.name)
        row = file_row(what, runtime or None, signature)
        text = _file_text(row)
    else:
        opened = _open(what, publisher)
        row = bundle_row(opened)
        text = _text(opened, row)
    if json:
        write_json(json, row)
    if prints_text(json):
        sys.stdout.write(text)


def _open(folder: Path, publisher: Path | None) -> Bundle:
    """Open a Bundle and verify all of it. Raises InvalidBundle."""
    trusted = read_signed_manifest(folder).public_key if publisher is None else read_public_key(publisher)
    opened = open_folder(folder, trusted=(trusted,))
    for name in opened.manifest.artifacts:
        opened.artifact(name)
    opened.initial_parameters()
    return opened


def file_row(path: Path, runtime: str | None, signature: str) -> dict[str, object]:
    """Return the JSON row of a model file, as reported by the runtime that opened it. Raises InvalidBundle."""
    graph_format, data = format_of(path.name), path.read_bytes()
    opener = open_format([graph_format], runtime)
    model = opener.open_model(data, str(path), signature)
    return {
        "file": str(path),
        "format": graph_format,
        "sha256": sha256_hex(data),
        "size_bytes": len(data),
        "opened_by": opener.name,
        "inputs": [_model_port_row(port) for port in model.inputs],
        "outputs": [_model_port_row(port) for port in model.outputs],
    }


def _model_port_row(port: ModelPort) -> dict[str, object]:
    row: dict[str, object] = {"name": port.name, "dtype": port.dtype, "shape": list(port.shape)}
    return row | {"scale": port.scale, "zero_point": port.zero_point} if port.scale else row


def _file_text(row: dict[str, object]) -> str:
    lines = [f"{row['format']} file {row['sha256']}", f"  size        {row['size_bytes']} bytes"]
    lines.append(f"  opened by   {row['opened_by']}")
    return "\n".join([*lines, *_port_lines(row)]) + "\n"


def _port_lines(row: dict[str, object]) -> list[str]:
    """Return the inputs and outputs of a row as lines."""
    lines = []
    for kind in ("inputs", "outputs"):
        lines.append(f"  {kind}")
        ports = row[kind]
        assert isinstance(ports, list)
        for port in ports:
            stored = f"  value = {port['scale']:.6g} * (stored {-port['zero_point']:+d})" if "scale" in port else ""
            lines.append(f"    {port['name']:24} {port['dtype']:8} {port['shape']}{stored}")
    return lines


def bundle_row(bundle: Bundle) -> dict[str, object]:
    """Return the JSON row of a Bundle."""
    manifest = bundle.manifest
    return {
        "bundle_sha256": bundle.sha256,
        "name": manifest.name,
        "publisher": bundle.signed.public_key,
        "verified": True,
        "num_parameters": manifest.table.num_values,
        "batch_size": manifest.batch_size,
        "other_batch_sizes": list(manifest.other_batch_sizes),
        "num_classes": manifest.num_classes,
        "num_tokens": dict(manifest.num_tokens),
        "lengths": [] if manifest.lengths is None else list(manifest.lengths.sizes),
        "optimizer": {name: setting.default for name, setting in manifest.optimizer.items()},
        "parameters": {spec.name: list(spec.shape) for spec in manifest.table.specs},
        "roles": {name: asdict(role) for name, role in manifest.table.roles.items()},
        "local": {} if manifest.local is None else {spec.name: list(spec.shape) for spec in manifest.local.table.specs},
        "privacy_floor": floor_row(manifest.privacy_floor),
        "query": None if manifest.query is None else query_row(manifest.query),
        "inputs": [_port_row(port) for port in _infer_ports(manifest)[0]],
        "outputs": [_port_row(port) for port in _infer_ports(manifest)[1]],
        "signatures": {
            name: {
                "graphs": dict(signature.graphs),
                "inputs": [_port_row(port) for port in signature.inputs],
                "outputs": [_port_row(port) for port in signature.outputs],
            }
            for name, signature in manifest.signatures.items()
        },
        "slots": {name: dict(Counter(str(slot.kind) for slot in slots)) for name, slots in manifest.slots.items()},
        "artifacts": {
            name: {"sha256": artifact.sha256, "size_bytes": artifact.size_bytes}
            for name, artifact in manifest.artifacts.items()
        },
    }


def _infer_ports(manifest: Manifest) -> tuple[Sequence[Port], Sequence[Port]]:
    """Return the inputs of a model for people, raw ones if it preprocesses them, and its outputs."""
    signatures = manifest.signatures
    if not signatures:
        return (), ()
    return signatures[PREPROCESS if PREPROCESS in signatures else "infer"].inputs, signatures["infer"].outputs


def names_of(table: TensorTable) -> str:
    """Return the number of values of a table, and its names."""
    return f"{counted(table.num_values, 'value')} in {', '.join(spec.name for spec in table.specs)}"


def _others(manifest: Manifest) -> str:
    sizes = " or ".join(map(str, manifest.other_batch_sizes))
    return f", or {sizes} by [training] batch_size of the plan" if sizes else ""


def kind_of(manifest: Manifest) -> str:
    """Return a phrase for a model's outputs, and for its inputs if they are tokens."""
    if manifest.query is not None:
        return f"statistics of the examples: {'; '.join(manifest.query.texts)}"
    if not manifest.signatures:
        return "arrays without graphs; code on the device trains them"
    outputs = counted(manifest.num_classes, "class", "classes") if manifest.num_classes else "values"
    tokens = " and ".join(counted(num, "token") for num in manifest.num_tokens.values())
    return f"{tokens} to {outputs}" if tokens else outputs


def _lengths_line(lengths: Lengths) -> str:
    sizes = " or ".join(map(str, lengths.sizes))
    return f"  lengths     {sizes} on {', '.join(lengths.axes)}; shorter rows are padded at their end"


def _port_row(port: Port) -> dict[str, object]:
    return {"name": port.name, "dtype": port.dtype, "shape": list(port.shape)}


def _text(bundle: Bundle, row: dict[str, object]) -> str:
    manifest, averaged = bundle.manifest, TrainedPart(bundle.manifest.table).averaged
    settings = ", ".join(f"{name} {setting.default:g}" for name, setting in manifest.optimizer.items())
    values = counted(manifest.table.num_values, "value")
    lines = [
        f"bundle {bundle.sha256}",
        f"  name        {manifest.name}",
        f"  publisher   {bundle.signed.public_key} (signature verified)",
        f"  parameters  {values} in {counted(len(manifest.table.specs), 'tensor')}",
        *([f"  averaged    {names_of(averaged)}"] if averaged.specs else []),
        *([] if manifest.local is None else [f"  personal    {names_of(manifest.local.table)}, never sent"]),
        f"  batch size  {manifest.batch_size}{_others(manifest)}",
        f"  model       {kind_of(manifest)}",
        *([] if manifest.privacy_floor == NO_FLOOR else [f"  floor       {floor_text(manifest.privacy_floor)}"]),
        *([] if manifest.lengths is None else [_lengths_line(manifest.lengths)]),
        *([f"  optimizer   {settings}"] if settings else []),
        *(
            f"  int8 slots  {name}: {len(slots)} {dict(Counter(str(slot.kind) for slot in slots))}"
            for name, slots in manifest.slots.items()
        ),
        *(_port_lines(row) if manifest.signatures else ()),
        "  signatures",
        *(
            f"    {name:10} {counted(len(signature.inputs), 'input')}, {counted(len(signature.outputs), 'output')}, "
            f"{', '.join(f'{kind}: {file}' for kind, file in signature.graphs.items())}"
            for name, signature in manifest.signatures.items()
        ),
        "  artifacts (digests verified)",
        *(
            f"    {name:24} {artifact.size_bytes:>10} bytes  {artifact.sha256}"
            for name, artifact in manifest.artifacts.items()
        ),
    ]
    return "\n".join(lines) + "\n"
