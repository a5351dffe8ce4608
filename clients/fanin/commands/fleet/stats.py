"""``fanin stats``: ask a fleet for statistics of its examples, or show those of a Run."""

import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fanin.clients.planfile import check_overrides
from fanin.clients.textfiles import read_public_key
from fanin.commands.console.terminal import (
    DEFAULT_KEY,
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    QuietOption,
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
from fanin.edge.queries.files import read_query
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import RunState
from fanin.protos.names import check_run_id
from fanin.protos.plans import SECAGG_PROTOCOL

if TYPE_CHECKING:
    from fanin.clients.statistics import StatisticsResult
    from fanin.edge.queries import FeatureStatistics

WITHHELD = "withheld"
MAX_SHOWN = 40
"""Features that the text has; --json has all."""


def main(argv: Sequence[str]) -> int:
    """Run ``fanin stats``."""
    return run_command(stats, argv)


def stats(
    query: Annotated[Path | None, typer.Argument(help="What is asked, a TOML file; without it, show --run-id.")] = None,
    devices: Annotated[
        int, typer.Option("--devices", min=0, help="Number of devices that answer; each round needs all of them.")
    ] = 0,
    secagg: Annotated[
        bool, typer.Option("--secagg", help="Hide the counts of each device in the sum, by secure aggregation.")
    ] = False,
    run_id: Annotated[str, typer.Option("--run-id", help="Name of the run; repeating it starts no second run.")] = "",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the plan, as in cohort.quorum=15."),
    ] = None,
    publisher: Annotated[
        Path | None, typer.Option("--publisher", help="Public key that must have signed the query of --run-id.")
    ] = None,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    key: Annotated[
        Path, typer.Option("--key", help="The publisher's key, which devices trust; created with a .pub file.")
    ] = DEFAULT_KEY,
    quiet: QuietOption = False,
    json: JsonOption = "",
) -> int:
    """Ask devices for counts, means, variances, histograms and quantiles of their examples."""
    with wrong_usage():
        check_overrides(overrides)
        if run_id:
            check_run_id(run_id)
        if not (devices if query is not None else run_id and not devices):
            raise InvalidInput(
                f"got {'a query without --devices' if query else 'neither a query nor --run-id'}, expected QUERY with "
                "--devices N, or --run-id RUN of a run that exists",
                code="FN-1867",
            )
    # Imported late: the help of the command needs no connection.
    from fanin.clients.statistics import plan_of, read_statistics, start_statistics

    trusted = "" if publisher is None else read_public_key(publisher)
    with connect(state, server, ca, token_file) as operator:
        if query is not None:
            asked = read_query(query, devices)
            settings = [f"round.protocol={SECAGG_PROTOCOL}"] if secagg else []
            plan = plan_of(asked, [*settings, *(overrides or ())])
            signer = publisher_key(key)
            run_id = run_id or f"{plan.name}-{secrets.token_hex(4)}"
            with progress("stats", quiet=quiet) as step:
                operator.check_plan(plan)
                start_statistics(operator, run_id, asked, plan, signer)
                step(f"run {run_id}: waiting for {devices} devices")
                for _ in operator.watch(run_id):
                    pass
        info = operator.run(run_id)
        result = read_statistics(operator, run_id, trusted)
    if json:
        write_json(json, {**result.row(), "state": info.state.value, "reason": info.reason})
    if prints_text(json):
        sys.stdout.writelines(f"{line}\n" for line in _lines(result))
        if info.state is not RunState.FINISHED:
            sys.stderr.write(f"note: run {run_id} is {info.state.value} {info.reason}\n")
    return int(info.state in (RunState.FAILED, RunState.STOPPED))


def _lines(result: "StatisticsResult") -> Iterator[str]:
    """Yield the statistics as lines for people."""
    yield (
        f"run {result.run_id}, version {result.version} of {result.num_versions}, exact sums over at most "
        f"{result.query.num_devices} devices; cells of fewer than {result.query.min_devices} are withheld"
    )
    for feature in result.features[:MAX_SHOWN]:
        yield from _feature(feature)
    if len(result.features) > MAX_SHOWN:
        yield f"and {len(result.features) - MAX_SHOWN} more features; --json has all"


def _feature(feature: "FeatureStatistics") -> Iterator[str]:
    def shown(value: float | None) -> str:
        return WITHHELD if value is None else f"{value:.10g}"

    yield (
        f"{feature.input} {feature.name}: {shown(feature.count)} values of {shown(feature.devices)} devices, mean "
        f"{shown(feature.mean)}, standard deviation {shown(feature.std)}"
    )
    yield (
        f"  out of range: {shown(feature.below)} below, {shown(feature.above)} above, {shown(feature.missing)} no "
        "numbers"
    )
    yield f"  histogram from {feature.edges[0]:g} to {feature.edges[-1]:g}: {' '.join(map(shown, feature.histogram))}"
    for quantile in feature.quantiles:
        is_exact = quantile.low == quantile.high
        value = shown(quantile.low) if is_exact else f"{shown(quantile.low)} to {shown(quantile.high)}"
        changed = "; the examples of a device changed between rounds" if quantile.has_changed else ""
        yield f"  quantile {quantile.quantile:g}: {value}{changed}"
