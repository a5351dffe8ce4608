"""``fanin report``: a Run or a simulation as one HTML file with curves and tables."""

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from fanin.commands.console.terminal import (
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    ServerOption,
    StateOption,
    TokenOption,
    connect,
    prints_text,
    run_command,
    write_json,
)
from fanin.commands.console.usage import check_target, wrong_usage
from fanin.commands.display.bars import bar
from fanin.commands.report.content import Content
from fanin.commands.report.of_run import ReportedRun, Verified, content_of_run, events_so_far
from fanin.commands.report.of_simulation import content_of_simulation, find_result
from fanin.commands.report.page import MARK, page_html
from fanin.protos.errors import Conflict, NotFound
from fanin.protos.messages import MAX_DESCRIBED_ROUNDS

HEAD_BYTES = 200
"""The mark of a report is within its first bytes."""


def main(argv: Sequence[str]) -> int:
    """Run ``fanin report``."""
    return run_command(report, argv)


def report(
    what: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The run; or the JSON file of fanin simulate --json, or a folder that has it."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", help="The report; default: RUN.html.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Recompute every version of the run; needs the folder of --state.")
    ] = False,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Write one HTML file with curves and tables. It needs no other file and no script."""
    result = find_result(Path(what))
    target = out or Path(f"{what if result is None else result.stem}.html")
    with wrong_usage():
        check_target("--out", str(target))
    _check_replaced(target)
    if result is not None:
        content = content_of_simulation(result)
    else:
        with connect(state, server, ca, token_file) as operator:
            description = operator.describe(what, MAX_DESCRIBED_ROUNDS)
            record = ReportedRun(
                description=description,
                events=events_so_far(description.run, operator.watch(what)),
                evaluations=list(operator.evaluations(what)),
                verified=_verified(state, what, description.run.version) if verify else None,
            )
        content = content_of_run(record)
    target.write_text(page_html(content, time.time()), encoding="utf-8")
    if json:
        write_json(json, _row(content, target))
    if prints_text(json):
        sys.stdout.write(f"{target}\n")


def _row(content: Content, target: Path) -> dict[str, object]:
    figures = {name: value for name, value, _ in content.figures}
    return {"report": str(target), "name": content.name, "state": content.state, "figures": figures}


def _check_replaced(target: Path) -> None:
    """Raise Conflict if the file is there and is no report."""
    if target.exists():
        with target.open("rb") as file:
            if MARK.encode() not in file.read(HEAD_BYTES):
                raise Conflict(
                    f"{target}: something else is there; name another --out, or move it away", code="FN-1013"
                )


def _verified(state: Path, run_id: str, num_versions: int) -> Verified:
    from fanin.server.aggregation.verify import verify_run
    from fanin.server.folder import open_archive
    from fanin.server.strategies.process import Strategies

    if not (state / "fanin.db").exists():
        raise NotFound(
            f"--verify: {state} is not a coordinator's folder, fanin.db is missing; give --state", code="FN-1012"
        )
    num, problems = 0, []
    with closing(Strategies(Path.cwd(), ())) as strategies, bar("verifying", num_versions + 1) as advance:
        for verdict in verify_run(open_archive(state), run_id, strategies):
            num += 1
            advance(1)
            if verdict.problem:
                problems.append(f"version {verdict.version}: {verdict.problem}")
    return Verified(num_versions=num, problems=problems)
