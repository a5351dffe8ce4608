"""``fanin run``: from a Plan to a Run."""

import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fanin.commands.show import follow, run_row
from fanin.commands.terminal import (
    DEFAULT_KEY,
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    ServerOption,
    StateOption,
    TokenOption,
    connect,
    publisher_key,
    run_command,
    write_json,
)
from fanin.edge.bundle import Bundle, open_folder
from fanin.edge.keys import SigningKey
from fanin.protos.plans import PlanFile, read_plan
from fanin.protos.runs import RunState

MAX_PLAN_CHARS = 48
"""Of a plan's name that goes into the id of a run, which may have 64 characters."""


def main(argv: Sequence[str]) -> int:
    """The command."""
    return run_command(run, argv)


def run(
    plan: Annotated[Path, typer.Argument(help="The plan, a TOML file.")],
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    key: Annotated[
        Path, typer.Option("--key", help="The publisher's key; made on first use, its public half beside it.")
    ] = DEFAULT_KEY,
    run_id: Annotated[str, typer.Option("--run-id", help="Name of the run; the same name starts it only once.")] = "",
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run until it rests.")] = False,
    json: JsonOption = "",
) -> int:
    """Start a run from a plan: publish its bundle, sign version 0, delegate the run's key."""
    wanted = read_plan(plan)
    publisher = publisher_key(key)
    line, operator = connect(state, server, ca, token_file)
    with tempfile.TemporaryDirectory(prefix="fanin-bundle-") as scratch:
        bundle = _bundle(wanted, plan.parent, Path(scratch), publisher)
        operator.publish_bundle(bundle)
        info = operator.start_run(
            run_id or f"{wanted.plan.name[:MAX_PLAN_CHARS]}-{secrets.token_hex(4)}", wanted.plan, bundle, publisher
        )
    if json:
        write_json(json, run_row(info))
    else:
        sys.stdout.write(f"run {info.run_id} started; devices trust {key.with_suffix('.pub')}\n")
    outcome = follow(operator.watch(info.run_id), json) if watch else RunState.RUNNING
    line.close()
    return int(outcome is RunState.FAILED)


def _bundle(wanted: PlanFile, here: Path, scratch: Path, publisher: SigningKey) -> Bundle:
    """The Plan's Bundle, opened from its folder, or exported from its App; paths are relative to the Plan."""
    if wanted.bundle:
        return open_folder(here / wanted.bundle, trusted=(publisher.public,))
    from fanin.edge.export import export_app, load_app

    return export_app(load_app(wanted.app), scratch, publisher).bundle
