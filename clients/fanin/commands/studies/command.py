"""``fanin study``: runs the study of a TOML file, and prints its table."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, cast

import typer

from fanin.commands.console.terminal import JsonOption, QuietOption, prints_text, run_command, write_json
from fanin.commands.console.usage import check_place, wrong_usage
from fanin.commands.studies.files import StudyFile, read_study
from fanin.simulation.grids.results import checked_direction
from fanin.simulation.host import interrupted_by_sigterm

if TYPE_CHECKING:
    from fanin.simulation import StudyResult

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C. The points that have ended are kept, and are still written."""
FAILED: Final = 1
"""Exit status if a point has failed. The others are complete."""


def main(argv: Sequence[str]) -> int:
    """Run ``fanin study``."""
    return run_command(_study, argv, "study")


def _study(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="The study; docs/howto/studies.md has the keys.")],
    processes: Annotated[int, typer.Option("--processes", min=1, help="Processes that train clients.")] = 1,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a figure of the best points.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write a row for each point to a CSV file.")] = None,
    quiet: QuietOption = False,
    json: JsonOption = "",
) -> int:
    """Run the simulations of a study that have not ended yet, and print the best of each method."""
    with wrong_usage():
        if csv is not None:
            check_place("--csv", csv)
        if plot is not None:
            from fanin.simulation.data.figures import check_figure_file

            check_figure_file(plot)
    study = read_study(file)
    checked_direction(study.column, study.higher_is_better, {})
    with interrupted_by_sigterm():
        result = _result(study, processes, quiet)
    target = None if study.target is None else (study.column, study.target)
    if csv is not None:
        result.write_csv(csv, target=target, higher_is_better=study.higher_is_better)
    if plot is not None and result.curves:
        result.plot(plot, study.column, higher_is_better=study.higher_is_better)
    rows = _table(study, result) if result.curves else []
    if json:
        points = [asdict(point) for point in result.points]
        write_json(json, {"is_complete": result.is_complete, "best": rows, "points": points})
    if prints_text(json):
        sys.stdout.write("".join(f"{_line(study, row)}\n" for row in rows))
    for point in result.failures:
        sys.stderr.write(f"fanin study: {point.method} {dict(point.values)}, seed {point.seed} failed: {point.error}\n")
    if not result.is_complete:
        sys.stderr.write(f"fanin study: stopped after {len(result.points)} points; {study.folder} has them\n")
        return INTERRUPTED
    return FAILED if result.failures else 0


def _result(study: StudyFile, processes: int, quiet: bool) -> "StudyResult":
    from fanin.edge.export import load_app
    from fanin.simulation import Method, SimulationSettings, Study, StudyData

    apps = {name: load_app(name) for name in {study.app, *(each.app for each in study.methods.values())} if name}
    sets = {}
    for name, (split, seed) in study.data.items():
        loaded, parts = split.load(seed)
        sets[name] = StudyData(clients=parts, test=loaded.test)
    settings = SimulationSettings(
        plan=study.plan, validation_fraction=study.validation, engine=study.engine, quiet=quiet
    )
    methods = {
        name: Method(plan=each.plan, app=apps.get(each.app), work=each.work) for name, each in study.methods.items()
    }
    # Study refuses values that are no sequence, and names their key.
    grid = cast("Mapping[str, Sequence[object]]", study.grid)
    plans = Study(folder=study.folder, grid=grid, seeds=study.seeds, methods=methods, processes=processes)
    clients = sets[""] if list(sets) == [""] else sets
    return plans.run(apps[study.app], clients, cohort=study.cohort, rounds=study.rounds, settings=settings)


def _table(study: StudyFile, result: "StudyResult") -> list[dict[str, object]]:
    """Return a row for each data set and method: its best values, and the Rounds to the target."""
    rows: list[dict[str, object]] = []
    direction = study.higher_is_better
    for data in result.data:
        part = result.of(data)
        fastest = {}
        if study.target is not None:
            several = part.rounds_to(study.column, study.target, higher_is_better=direction)
            fastest = {each.curve.method: each for each in several}
        for method, curve in part.best(study.column, higher_is_better=direction).items():
            row: dict[str, object] = {"data": data, "method": method, "values": dict(curve.values)}
            row |= {study.column: curve.mean(study.column), "num_seeds": len(curve.points)}
            if method in fastest:
                to = fastest[method]
                row["rounds_to"] = {
                    "target": study.target,
                    "values": dict(to.curve.values),
                    # JSON has no infinity: null is a seed that never reaches the target.
                    "rounds": [number if math.isfinite(number) else None for number in to.rounds],
                    "median": to.median if math.isfinite(to.median) else None,
                    "mean": to.mean if math.isfinite(to.mean) else None,
                    "text": str(to),
                }
            rows.append(row)
    return rows


def _line(study: StudyFile, row: dict[str, object]) -> str:
    text = f"{row['data']}{': ' if row['data'] else ''}{row['method']}{_values(row['values'])}: "
    text += f"{study.column} {row[study.column]:.4g} (mean of {row['num_seeds']} seeds)"
    to = row.get("rounds_to")
    if isinstance(to, dict):
        text += f"; rounds to {study.target:g}{_values(to['values'])}: {to['text']}"
    return text


def _values(values: object) -> str:
    return "".join(f", {key} {value}" for key, value in values.items()) if isinstance(values, dict) else ""
