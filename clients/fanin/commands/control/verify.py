"""``fanin verify``: recompute the Versions of a Run from a coordinator's folder."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fanin.commands.console.terminal import DEFAULT_STATE, JsonOption, StateOption, prints_text, run_command, write_json
from fanin.commands.console.usage import data_sets, wrong_usage
from fanin.commands.display.screen import Screen
from fanin.commands.evaluator import JobEvaluator
from fanin.protos.errors import InvalidInput, NotFound
from fanin.protos.messages import BundleRef, Version
from fanin.protos.texts import counted
from fanin.server.aggregation.auxiliary import MeasureAgain
from fanin.server.aggregation.verify import Verdict, verify_run
from fanin.server.evaluation.datasets import measured_of
from fanin.server.evaluation.jobs import EvaluationJob
from fanin.server.folder import BLOBS_FOLDER, open_archive
from fanin.server.storage.records import MeasuredRanges
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
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="NAME=PATH of the .npz file on which the coordinator measured ranges of activations, to measure them "
            "again; repeatable.",
        ),
    ] = None,
    json: JsonOption = "",
) -> int:
    """Recompute every version from its parent and its closed set of updates. Exit status 1 if one differs.

    The parameters of a Flower strategy are recomputed if the plan declares it pure. Ranges of activations that the
    coordinator measured are measured again on the file of --data.
    """
    with wrong_usage():
        strategies = Strategies(Path.cwd(), checked_strategies(strategy or ()))
        paths = data_sets(data or ())
    if not (state / "fanin.db").exists():
        raise NotFound(f"{state}: not a coordinator's folder, fanin.db is missing; give --state", code="FN-1012")
    verdicts: list[Verdict] = []
    screen = Screen(sys.stdout if prints_text(json) else sys.stderr)
    with closing(strategies), screen.busy("recomputing"):
        measure = _again(state / BLOBS_FOLDER, paths) if paths else None
        for verdict in verify_run(open_archive(state), run_id, strategies, measure):
            verdicts.append(verdict)
            if prints_text(json):
                # At once: a large Version takes minutes.
                screen.line(_line(verdict), "red" if verdict.problem else "")
    good = not any(verdict.problem for verdict in verdicts)
    if json:
        write_json(json, {"run_id": run_id, "verified": good, "versions": [asdict(verdict) for verdict in verdicts]})
    if paths and good and not any(verdict.has_recomputed_ranges for verdict in verdicts):
        raise InvalidInput(
            f"--data: got {', '.join(sorted(paths))}, on which no ranges were recomputed, expected the data set "
            "and the digest that the output names; give that file, or leave --data out",
            code="FN-1491",
        )
    return int(not good)


def _again(blobs: Path, paths: Mapping[str, Path]) -> MeasureAgain:
    """Return the function that measures recorded ranges again, on the files of these data sets."""
    evaluator = JobEvaluator()

    def measure(recorded: MeasuredRanges, bundle: BundleRef, version: Version) -> MeasuredRanges:
        path = paths.get(recorded.data)
        if path is None:
            return MeasuredRanges(data=recorded.data, problem=f"--data has {', '.join(sorted(paths))}")
        job = EvaluationJob(blobs=blobs, data=path, bundle=bundle, best="", version=version, measures=True)
        return measured_of(recorded.data, evaluator.reply(job))

    return measure


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
    if verdict.from_sum and not verdict.problem:
        result = f"verified from the recorded noised sum; {verdict.from_sum}"
    result += f"; ranges: {verdict.ranges}" if verdict.ranges else ""
    return f"version {verdict.version} {digest} ({origin}): {result}"
