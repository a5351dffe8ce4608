"""``fanin export``: an App becomes a signed Bundle, or is only looked at (``--check``)."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from fanin.commands.terminal import DEFAULT_KEY, JsonOption, publisher_key, run_command, write_json
from fanin.edge.export import App, Exported, check_app, export_app, load_app
from fanin.edge.export.check import Finding
from fanin.edge.export.formats import FORMATS
from fanin.edge.measure import MAX_DROP_POINTS
from fanin.protos.errors import InvalidInput

WHAT_TO_DO: Final = (
    "replace the operator, or keep that part out of the training: requires_grad_(False) on it, or a recipe that "
    "trains 'head' or adapters"
)


def main(argv: Sequence[str]) -> int:
    """The command."""
    return run_command(export, argv)


def export(
    app: Annotated[str, typer.Argument(help="The App: package.module:name or path/to/file.py:name.")],
    out: Annotated[Path | None, typer.Option("--out", help="The bundle's folder; it must not hold one yet.")] = None,
    key: Annotated[
        Path, typer.Option("--key", help="The publisher's key; made on first use, its public half beside it.")
    ] = DEFAULT_KEY,
    graph_format: Annotated[
        list[str] | None, typer.Option("--format", help="A graph format to write, onnx or tflite; default: both.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only tell which part of the model has no form in which runtime.")
    ] = False,
    max_int8_drop: Annotated[
        float, typer.Option("--max-int8-drop", help="Points of accuracy that int8 may cost on the validation data.")
    ] = MAX_DROP_POINTS,
    json: JsonOption = "",
) -> int:
    """Trace, quantize, verify and sign an App, for every runtime."""
    formats = list(dict.fromkeys(graph_format or FORMATS))
    if unknown := sorted(set(formats) - set(FORMATS)):
        raise InvalidInput(f"--format: got {unknown}, expected some of {sorted(FORMATS)}")
    if check:
        return _check(load_app(app), formats, json)
    if out is None:
        raise InvalidInput("--out: expected a folder for the bundle, or --check to write none")
    if out.exists() and any(out.iterdir()):
        raise InvalidInput(f"--out: {out} is not empty, expected a new folder")
    made = export_app(load_app(app), out, publisher_key(key), formats, max_int8_drop)
    if json:
        write_json(json, exported_row(made))
    else:
        sys.stdout.write(_text(made, out))
    return 0


def exported_row(made: Exported) -> dict[str, object]:
    """What an export gave, for programs."""
    manifest = made.bundle.manifest
    return {
        "bundle": made.bundle.sha256,
        "num_parameters": manifest.table.num_values,
        "size_bytes": {name: artifact.size_bytes for name, artifact in manifest.artifacts.items()},
        "notes": list(made.notes),
        "int8_drop_points": {name: found.drop_points for name, found in made.measured.items()},
    }


def _text(made: Exported, out: Path) -> str:
    manifest = made.bundle.manifest
    sizes = ", ".join(f"{name} {artifact.size_bytes} bytes" for name, artifact in manifest.artifacts.items())
    lines = [
        f"bundle {made.bundle.sha256} in {out}",
        f"  parameters that travel  {manifest.table.num_values}",
        f"  artifacts               {sizes}",
        *(f"  {name:22}  {found}" for name, found in made.measured.items()),
        *(f"  note: {note}" for note in made.notes),
    ]
    return "\n".join(lines) + "\n"


def _check(app: App, formats: Sequence[str], json: str) -> int:
    findings = check_app(app, formats)
    if json:
        write_json(json, {"app": app.name, "formats": list(formats), "findings": [_row(found) for found in findings]})
    elif findings:
        sys.stdout.write("".join(_line(found) for found in findings) + f"what to do: {WHAT_TO_DO}\n")
    else:
        sys.stdout.write(f"App {app.name}: every part of it trains and infers in {', '.join(formats)}\n")
    return int(bool(findings))


def _line(found: Finding) -> str:
    where = f"module {found.module} ({found.kind})" if found.module else f"the code between the layers of {found.kind}"
    operator = f" uses {found.operator}, which" if found.operator else ""
    lacking = " and ".join(found.runtimes)
    said = f"{where}{operator} has no form in {lacking}" if operator else f"{where} has no form in {lacking}"
    return f"{said}\n  {found.reason}\n"


def _row(found: Finding) -> dict[str, object]:
    return {
        "module": found.module,
        "kind": found.kind,
        "graph_format": found.graph_format,
        "runtimes": list(found.runtimes),
        "operator": found.operator,
        "reason": found.reason,
    }
