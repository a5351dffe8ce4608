"""``fanin verify``: recompute the Versions of a Run from a coordinator's folder."""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fanin.commands.console.terminal import DEFAULT_STATE, JsonOption, StateOption, prints_text, run_command, write_json
from fanin.commands.console.usage import wrong_usage
from fanin.commands.display.screen import Screen
from fanin.protos.errors import NotFound
from fanin.protos.texts import counted
from fanin.server.aggregation.verify import Verdict, verify_run
from fanin.server.folder import open_archive
from fanin.server.strategies.process import Strategies, checked_strategies


def main(argv: Sequence[str]) -> int:
    """Run ``fanin verify``."""
    return run_command(verify, argv)


def verify(
    run_id: Annotated[str, typer.Argument(help="The run; fanin runs lists them.")],
    state: StateOption = DEFAULT_STATE,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            help="MODULE:NAME of a Flower strategy that may run here, besides those of flwr, imported from the "
            "working directory; repeatable.",
        ),
    ] = None,
    json: JsonOption = "",
) -> int:
    """Recompute every version from its parent and its closed set of updates. Exit status 1 if one differs.

    The parameters of a Flower strategy are recomputed if the plan declares it pure.
    """
    with wrong_usage():
        strategies = Strategies(Path.cwd(), checked_strategies(strategy or ()))
    if not (state / "fanin.db").exists():
        raise NotFound(f"{state}: not a coordinator's folder, fanin.db is missing; give --state", code="FN-1012")
    verdicts: list[Verdict] = []
    screen = Screen(sys.stdout if prints_text(json) else sys.stderr)
    with closing(strategies), screen.busy("recomputing"):
        for verdict in verify_run(open_archive(state), run_id, strategies):
            verdicts.append(verdict)
            if prints_text(json):
                # At once: a large Version takes minutes.
                screen.line(_line(verdict), "red" if verdict.problem else "")
    good = not any(verdict.problem for verdict in verdicts)
    if json:
        write_json(json, {"run_id": run_id, "verified": good, "versions": [asdict(verdict) for verdict in verdicts]})
    return int(not good)


def _outside(verdict: Verdict) -> str:
    """Return the origin of a Version that no Round published."""
    return "published by an operator" if verdict.version else "the publisher's initial version"


def _line(verdict: Verdict) -> str:
    origin = f"round {verdict.round}, {counted(verdict.num_updates, 'update')}" if verdict.round else _outside(verdict)
    digest = verdict.version_sha256 or "of an unknown digest"
    limit = f"not reproducible: {verdict.not_reproducible}; the rest of its record is verified"
    result = verdict.problem or (limit if verdict.not_reproducible else "verified")
    if verdict.digest_only and not verdict.problem:
        result = f"signature and record verified; {verdict.digest_only}"
    return f"version {verdict.version} {digest} ({origin}): {result}"
