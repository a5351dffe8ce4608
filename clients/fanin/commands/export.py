"""``fanin export``: an App becomes a signed Bundle, or is only looked at (``--check``)."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fanin.commands.terminal import (
    DEFAULT_KEY,
    JsonOption,
    QuietOption,
    progress,
    publisher_key,
    run_command,
    write_json,
)
from fanin.edge.export import App, Exported, check_app, load_app
from fanin.edge.export import export as export_bundle
from fanin.edge.export.check import Finding
from fanin.edge.export.formats import FORMATS
from fanin.protos.errors import InvalidInput


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
        float | None,
        typer.Option(
            "--max-int8-drop",
            help="What int8 may cost on the validation data: points of accuracy (default 1), or percent of the squared "
            "error of a model of values (default 10).",
        ),
    ] = None,
    quiet: QuietOption = False,
    json: JsonOption = "",
) -> int:
    """Trace, quantize, verify and sign an App, for every runtime."""
    formats = list(dict.fromkeys(graph_format or FORMATS))
    if unknown := sorted(set(formats) - set(FORMATS)):
        raise InvalidInput(f"--format: got {unknown}, expected some of {sorted(FORMATS)}")
    if max_int8_drop is not None and not 0.0 <= max_int8_drop < math.inf:
        raise InvalidInput(f"--max-int8-drop: got {max_int8_drop:g}, expected a number of at least 0")
    if check:
        with progress("export", quiet=quiet) as step:
            step(f"checking the App {app}")
            return _check(load_app(app), formats, json)
    if out is None:
        raise InvalidInput("--out: expected a folder for the bundle, or --check to write none")
    if out.exists() and any(out.iterdir()):
        raise InvalidInput(f"--out: {out} is not empty, expected a new folder")
    with progress("export", quiet=quiet) as step:
        step(f"loading the App {app}")
        made = export_bundle(load_app(app), out, publisher_key(key), formats, max_int8_drop)
    if json:
        write_json(json, exported_row(made))
    else:
        sys.stdout.write(_text(made, out))
    return 0


def exported_row(made: Exported) -> dict[str, object]:
    """What an export gave, for programs."""
    manifest, measured, compared = made.bundle.manifest, made.measured.items(), made.compared.items()
    return {
        "bundle": made.bundle.sha256,
        "num_parameters": manifest.table.num_values,
        "size_bytes": {name: artifact.size_bytes for name, artifact in manifest.artifacts.items()},
        "notes": list(made.notes),
        "int8_drop_points": {name: found.drop_points for name, found in measured if found.num_predictions},
        "int8_rise_percent": {name: found.rise_percent for name, found in measured if not found.num_predictions},
        "int8_agreement": {name: found.agreement for name, found in compared if manifest.num_classes},
        "int8_relative_error": {name: found.relative_error for name, found in compared if not manifest.num_classes},
    }


def _text(made: Exported, out: Path) -> str:
    manifest = made.bundle.manifest
    sizes = ", ".join(f"{name} {artifact.size_bytes} bytes" for name, artifact in manifest.artifacts.items())
    lines = [
        f"bundle {made.bundle.sha256} in {out}",
        f"  parameters that travel  {manifest.table.num_values}",
        f"  artifacts               {sizes}",
        *(f"  {name:22}  {found}" for name, found in {**made.measured, **made.compared}.items()),
        *(f"  note: {note}" for note in made.notes),
    ]
    return "\n".join(lines) + "\n"


def _check(app: App, formats: Sequence[str], json: str) -> int:
    findings = check_app(app, formats)
    if json:
        write_json(json, {"app": app.name, "formats": list(formats), "findings": [_row(found) for found in findings]})
    elif findings:
        sys.stdout.write("".join(_line(found) for found in findings))
    else:
        sys.stdout.write(f"App {app.name}: every part of it trains and infers in {', '.join(formats)}\n")
    return int(bool(findings))


def _line(found: Finding) -> str:
    where = f"module {found.module or 'itself'} ({found.kind})"
    if found.call:
        where = f"{where} calls {found.call} between its layers, which"
    operator = f" uses {found.operator}, which" if found.operator else ""
    lacking = (
        f"has no form in {' and '.join(found.runtimes)}" if found.runtimes else "cannot be exported for any runtime"
    )
    return f"{where}{operator} {lacking}\n  {found.reason}\n  what to do: {found.advice}\n"


def _row(found: Finding) -> dict[str, object]:
    return {
        "module": found.module,
        "kind": found.kind,
        "graph_format": found.graph_format,
        "runtimes": list(found.runtimes),
        "call": found.call,
        "operator": found.operator,
        "reason": found.reason,
        "advice": found.advice,
    }
