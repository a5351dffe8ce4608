"""``fanin export``: export an App as a signed Bundle, or only check it (``--check``)."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fanin.commands.console.terminal import (
    DEFAULT_KEY,
    JsonOption,
    QuietOption,
    check_max_drop,
    prints_text,
    publisher_key,
    run_command,
    write_json,
)
from fanin.commands.console.usage import wrong_usage
from fanin.commands.display.screen import Screen
from fanin.commands.display.steps import progress
from fanin.edge.files import new_folder
from fanin.edge.parameter_files import read_parameters
from fanin.edge.tensors import TensorTable
from fanin.protos.errors import InvalidInput
from fanin.simulation.data.loading import NAMES, LoadedData, check_name, load_data

if TYPE_CHECKING:
    from fanin.datacenter.training.pretraining import Pretraining
    from fanin.edge.export import App, Exported
    from fanin.edge.export.refusals import Finding


def main(argv: Sequence[str]) -> int:
    """Run ``fanin export``."""
    return run_command(export, argv)


def export(
    app: Annotated[str, typer.Argument(help="The App: package.module:name or path/to/file.py:name.")],
    out: Annotated[Path | None, typer.Option("--out", help="A new folder for the bundle.")] = None,
    key: Annotated[
        Path,
        typer.Option("--key", help="The publisher's key; created on first use, with its public half in a .pub file."),
    ] = DEFAULT_KEY,
    graph_format: Annotated[
        list[str] | None, typer.Option("--format", help="A graph format to write, onnx or tflite; default: both.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Run all steps and write nothing; list the parts of the model that fail."),
    ] = False,
    max_int8_drop: Annotated[
        float | None,
        typer.Option(
            "--max-int8-drop",
            help="Allowed loss of int8 on the validation data: points of accuracy (default 1), or, for regression, "
            "percent of the squared error (default 10).",
        ),
    ] = None,
    parameters: Annotated[
        Path | None,
        typer.Option(
            "--parameters",
            help="Trained parameters of the App: checkpoints, parameters.bin or a .safetensors file of fanin train, or "
            "what fanin fetch wrote; default: those of the App.",
        ),
    ] = None,
    pretrain: Annotated[
        str,
        typer.Option(
            "--pretrain",
            help=f"Train the App first, on {', '.join(NAMES)} or an .npz file with the App's inputs and y.",
        ),
    ] = "",
    epochs: Annotated[int | None, typer.Option("--epochs", help="Epochs of --pretrain; default: 5.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", help="Learning rate of --pretrain; default: 0.01.")
    ] = None,
    quiet: QuietOption = False,
    json: JsonOption = "",
) -> int:
    """Trace, quantize, verify and sign an App for every runtime."""
    # Importing torch takes seconds, so most mistakes in the options are reported before it.
    with wrong_usage():
        check_max_drop(max_int8_drop)
        _check_pretraining(pretrain, check=check, is_set=epochs is not None or learning_rate is not None)
        _check_target(out, check=check)
    from fanin.edge.export import check_app, load_app
    from fanin.edge.export import export as export_bundle

    with wrong_usage():
        formats = _formats(graph_format)
        training = _pretraining(epochs, learning_rate) if pretrain else None
    with progress("export", quiet=quiet) as step:
        step(f"loading the App {app}")
        loaded = load_app(app)
        if parameters is not None:
            _load_trained(loaded, parameters)
        if out is None:
            findings = check_app(loaded, formats, max_int8_drop)
            return _report(loaded.name, formats, findings, json)
        if training is not None:
            loaded = _pretrained(loaded, load_data(pretrain), training, step)
        exported = export_bundle(loaded, out, publisher_key(key), formats, max_int8_drop)
    if json:
        write_json(json, exported_row(exported))
    if prints_text(json):
        Screen(sys.stdout).line(_text(exported, out).rstrip("\n"))
    return 0


def _check_target(out: Path | None, *, check: bool) -> None:
    """Raise InvalidInput unless there is either a new folder or ``--check``."""
    if check and out is not None:
        raise InvalidInput("--out: got --check too, which writes nothing; expected one of them", code="FN-1003")
    if not check:
        if out is None:
            raise InvalidInput("--out: expected a folder for the bundle, or --check to write none", code="FN-1006")
        new_folder("--out", out)


def _check_pretraining(data: str, *, check: bool, is_set: bool) -> None:
    """Raise InvalidInput for wrong data of ``--pretrain``, or options that do not go with it."""
    if not data and is_set:
        raise InvalidInput("--epochs and --learning-rate: expected --pretrain DATA with them", code="FN-1004")
    if check and data:
        raise InvalidInput("--pretrain: got --check too, which does not train; expected one of them", code="FN-1003")
    if data:
        check_name(data)


def _formats(names: Sequence[str] | None) -> list[str]:
    """Return the formats to write, each once. Raises InvalidInput."""
    from fanin.edge.export.formats.graphs import FORMATS

    formats = list(dict.fromkeys(names or FORMATS))
    if unknown := sorted(set(formats) - set(FORMATS)):
        raise InvalidInput(f"--format: got {unknown}, expected some of {sorted(FORMATS)}", code="FN-0708")
    return formats


def _pretraining(epochs: int | None, learning_rate: float | None) -> "Pretraining":
    from fanin.datacenter.training.pretraining import Pretraining

    default = Pretraining()
    return Pretraining(
        epochs=default.epochs if epochs is None else epochs,
        learning_rate=default.learning_rate if learning_rate is None else learning_rate,
    )


def _pretrained(app: "App", data: LoadedData, training: "Pretraining", step: Callable[[str], None]) -> "App":
    """Return the App after a training. Without validation data, it gets the test part of the data."""
    from fanin.datacenter.training.pretraining import fitting_data, pretrain

    trained = pretrain(app, data.train, training, step)
    return trained if app.validation is not None else replace(trained, validation=fitting_data(app, data.test))


def _load_trained(app: "App", path: Path) -> None:
    """Load parameters into the App's module. Raises InvalidInput if they are not this App's."""
    from fanin.datacenter.checkpoints.trained import read_trained
    from fanin.datacenter.checkpoints.weights import load_weights
    from fanin.datacenter.config.settings import SAFETENSORS
    from fanin.datacenter.training.parameters import load_parameters, parameter_table
    from fanin.edge.export.module.norms import running_statistics

    if app.recipe.trains != "full":
        raise InvalidInput(
            f"--parameters: got an App that trains {app.recipe.trains!r}, expected 'full': other weights of its "
            "Bundle are frozen; publish the parameters as a Version of a Run",
            code="FN-1021",
        )
    if path.is_dir():
        tensors = read_trained(path).of_model([spec.name for spec in parameter_table(app.module).specs])
        table = TensorTable.of({name: each.shape for name, each in tensors.items()})
        load_parameters(app.module, table, table.flatten(tensors))
        return
    if path.suffix != SAFETENSORS:
        load_parameters(app.module, *read_parameters(path))
        return
    if running_statistics(app.module):
        raise InvalidInput(
            f"--parameters: got {path} for an App with running statistics, which the file does not have; expected the "
            "parameters.bin that fanin train leaves in --state",
            code="FN-1021",
        )
    load_weights(app.module, path)


def exported_row(exported: "Exported") -> dict[str, object]:
    """Return the JSON row of an export."""
    manifest, measured, compared = exported.bundle.manifest, exported.measured.items(), exported.compared.items()
    return {
        "bundle": exported.bundle.sha256,
        "num_parameters": manifest.table.num_values,
        "num_local": 0 if manifest.local is None else manifest.local.table.num_values,
        "size_bytes": {name: artifact.size_bytes for name, artifact in manifest.artifacts.items()},
        "notes": _notes(exported),
        "int8_drop_points": {name: each.drop_points for name, each in measured if each.num_predictions},
        "int8_rise_percent": {name: each.rise_percent for name, each in measured if not each.num_predictions},
        "int8_loss_rise": {name: each.loss_rise for name, each in measured if each.loss_rise is not None},
        "int8_agreement": {name: each.agreement for name, each in compared if manifest.num_classes},
        "int8_relative_error": {name: each.relative_error for name, each in compared if not manifest.num_classes},
    }


def _text(exported: "Exported", out: Path) -> str:
    manifest = exported.bundle.manifest
    sizes = ", ".join(f"{name} {artifact.size_bytes} bytes" for name, artifact in manifest.artifacts.items())
    lines = [
        f"bundle {exported.bundle.sha256} in {out}",
        f"  parameters that travel  {manifest.table.num_values}",
        *([] if manifest.local is None else [f"  parameters that stay    {manifest.local.table.num_values}"]),
        f"  artifacts               {sizes}",
        *(f"  {name:22}  {each}" for name, each in {**exported.measured, **exported.compared}.items()),
        *(f"  note: {note}" for note in _notes(exported)),
    ]
    return "\n".join(lines) + "\n"


def _notes(exported: "Exported") -> list[str]:
    return [note for note in (*exported.notes, exported.advice) if note]


def _report(name: str, formats: Sequence[str], findings: "Sequence[Finding]", json: str) -> int:
    """Print the findings of ``--check``, and return the exit status."""
    if json:
        write_json(json, {"app": name, "formats": list(formats), "findings": [_row(finding) for finding in findings]})
    if prints_text(json):
        good = f"App {name}: every part of it trains and infers in {', '.join(formats)}\n"
        sys.stdout.write("".join(_line(finding) for finding in findings) or good)
    return int(bool(findings))


FAULTS: Final = MappingProxyType(
    {
        "form": "has no form in {}",
        "run": "does not compute in {} what torch computes",
        "int8": "loses too much by int8 in {}",
    }
)
"""The headline of a finding, by the step that fails."""


def _line(finding: "Finding") -> str:
    subject = "the loss" if finding.kind == "loss" else f"module {finding.module or 'itself'} ({finding.kind})"
    subject += f" at {finding.line}" if finding.line else ""
    if finding.call:
        subject = f"{subject} calls {finding.call} between its layers, which"
    operator = f" uses {finding.operator}, which" if finding.operator else ""
    fault = "cannot be exported for any runtime"
    if finding.runtimes:
        fault = FAULTS[finding.step].format(" and ".join(finding.runtimes))
    advice = f"  what to do: {finding.advice}\n" if finding.advice else ""
    return f"{subject}{operator} {fault}\n  {finding.reason}\n{advice}"


def _row(finding: "Finding") -> dict[str, object]:
    return {
        "module": finding.module,
        "kind": finding.kind,
        "step": finding.step,
        "graph_format": finding.graph_format,
        "runtimes": list(finding.runtimes),
        "call": finding.call,
        "line": finding.line,
        "operator": finding.operator,
        "reason": finding.reason,
        "advice": finding.advice,
    }
