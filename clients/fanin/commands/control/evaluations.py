"""``fanin evaluations``: the metrics of a Run's Versions on held-out data, as text, JSON, CSV or TensorBoard files."""

import csv
import sys
from collections.abc import Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Annotated, Final

import typer

from fanin.commands.console.show import evaluation_row, evaluation_text
from fanin.commands.console.terminal import (
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    RunArgument,
    ServerOption,
    StateOption,
    TokenOption,
    connect,
    prints_text,
    run_command,
    write_json,
)
from fanin.commands.console.usage import check_target, wrong_usage
from fanin.protos.errors import RuntimeMissing
from fanin.protos.messages import VersionEvaluation

TENSORBOARD: Final = "tensorboardX"
"""It needs only numpy and protobuf, which are installed anyway. It is no requirement, because the CSV has the same."""
FACTS: Final = ("version", "data", "data_sha256", "num_examples", "runtime", "seconds", "time_s", "problem")
"""The columns of a CSV file before the metrics."""


def main(argv: Sequence[str]) -> int:
    """Run ``fanin evaluations``."""
    return run_command(evaluations, argv)


def evaluations(
    run_id: RunArgument,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write a CSV file with a row for each version and a column a metric.")
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", help="Write TensorBoard event files into this folder; needs tensorboardX."),
    ] = None,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Show the metrics of a run's versions on held-out data, oldest version first."""
    with wrong_usage():
        check_target("--csv", "" if csv_file is None else str(csv_file))
    with connect(state, server, ca, token_file) as operator:
        rows = list(operator.evaluations(run_id))
    if csv_file is not None:
        write_csv(csv_file, rows)
    if tensorboard is not None:
        write_tensorboard(tensorboard, rows)
    if json:
        write_json(json, {"run_id": run_id, "evaluations": [evaluation_row(row) for row in rows]})
    if prints_text(json):
        lines = [evaluation_text(row) for row in rows] or [f"run {run_id} has no evaluated version"]
        sys.stdout.write("\n".join(lines) + "\n")


def write_csv(path: Path, rows: Sequence[VersionEvaluation]) -> None:
    """Write evaluations as a CSV file: the columns ``FACTS``, then one for each metric."""
    metrics = list(dict.fromkeys(name for row in rows for name in row.values))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*FACTS, *metrics])
        writer.writeheader()
        for row in rows:
            facts = evaluation_row(row)
            writer.writerow({name: facts[name] for name in FACTS} | dict(row.values))


def write_tensorboard(folder: Path, rows: Sequence[VersionEvaluation]) -> None:
    """Write evaluations as TensorBoard event files: a scalar ``held_out/NAME`` for each metric, by Version.

    Raises:
        RuntimeMissing: tensorboardX is not installed.
    """
    try:
        library = import_module(TENSORBOARD)
    except ModuleNotFoundError as exc:
        raise RuntimeMissing(
            f"--tensorboard: {TENSORBOARD} is not installed here; pip install {TENSORBOARD}", code="FN-1054"
        ) from exc
    with closing(library.SummaryWriter(str(folder))) as writer:
        for row in rows:
            for name, value in row.values.items():
                writer.add_scalar(f"held_out/{name}", value, row.version, walltime=row.time)
