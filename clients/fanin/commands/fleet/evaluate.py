"""``fanin evaluate``: a Version of a Run on the validation parts of some devices, without training."""

import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fanin.clients.planfile import check_overrides
from fanin.commands.console.terminal import (
    DEFAULT_KEY,
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    QuietOption,
    RunArgument,
    ServerOption,
    StateOption,
    TokenOption,
    connect,
    prints_text,
    publisher_key,
    run_command,
    write_json,
)
from fanin.commands.console.usage import wrong_usage
from fanin.commands.display.steps import progress
from fanin.protos.errors import InvalidInput
from fanin.protos.names import check_run_id


def main(argv: Sequence[str]) -> int:
    """Run ``fanin evaluate``."""
    return run_command(evaluate, argv)


def evaluate(
    run_id: RunArgument,
    devices: Annotated[int, typer.Option("--devices", min=1, help="Number of devices that evaluate.")],
    version: Annotated[int | None, typer.Option("--version", min=0, help="The version; default: the newest.")] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME", help="A metric of devices, as macro_f1 or recall_3; may be repeated."),
    ] = None,
    evaluation_id: Annotated[
        str, typer.Option("--run-id", help="Name of the evaluation run; repeating it starts no second one.")
    ] = "",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the plan, as in round.protocol=secagg."),
    ] = None,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    key: Annotated[Path, typer.Option("--key", help="The publisher's key, which signed the bundle.")] = DEFAULT_KEY,
    quiet: QuietOption = False,
    json: JsonOption = "",
) -> None:
    """Evaluate a version of a run on some devices. No device trains, and the run is not changed."""
    with wrong_usage():
        check_overrides(overrides)
        if evaluation_id:
            check_run_id(evaluation_id)
    # Imported late: the help of the command needs no connection.
    from fanin.clients.statistics import evaluation_plan, read_evaluation, start_evaluation

    with connect(state, server, ca, token_file) as operator:
        if not key.exists():
            raise InvalidInput(
                f"--key {key}: no such file, expected the key that signed the run's bundle", code="FN-1016"
            )
        plan = evaluation_plan(devices, metrics or (), overrides or ())
        evaluation_id = evaluation_id or f"{plan.name}-{secrets.token_hex(4)}"
        with progress("evaluate", quiet=quiet) as step:
            operator.check_plan(plan)
            start_evaluation(operator, evaluation_id, (run_id, version), plan, publisher_key(key))
            step(f"run {evaluation_id}: waiting for {devices} devices")
            result = read_evaluation(operator, evaluation_id)
    if json:
        write_json(json, asdict(result) | {"of_run": run_id, "of_version": version})
    if prints_text(json):
        sys.stdout.write(f"{result.num_devices} devices, {result.num_examples} validation examples\n")
        for name, value in result.values.items():
            text = "none: no device determines it" if value is None else f"{value:.6g}"
            sys.stdout.write(f"  {name}  {text}\n")
