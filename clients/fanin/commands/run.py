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
    QuietOption,
    ServerOption,
    StateOption,
    TokenOption,
    connect,
    progress,
    publisher_key,
    run_command,
    write_json,
)
from fanin.edge.bundles.bundle import Bundle, open_folder
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.control import RunState
from fanin.protos.plans import read_plan

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
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run until it has ended.")] = False,
    max_int8_drop: Annotated[
        float | None,
        typer.Option("--max-int8-drop", help="What int8 may cost where an App is exported, as fanin export has it."),
    ] = None,
    quiet: QuietOption = False,
    json: JsonOption = "",
) -> int:
    """Start a run from a plan: publish its bundle, sign version 0, delegate the run's key."""
    wanted = read_plan(plan)
    publisher = publisher_key(key)
    line, operator = connect(state, server, ca, token_file)
    with progress("run", quiet=quiet) as step, tempfile.TemporaryDirectory(prefix="fanin-bundle-") as scratch:
        if wanted.bundle:
            bundle = open_folder(plan.parent / wanted.bundle, trusted=(publisher.public,))
        else:
            step(f"exporting the App {wanted.app}")
            bundle = _export(wanted.app, Path(scratch), publisher, max_int8_drop)
        step("publishing the bundle")
        operator.publish_bundle(bundle)
        step("starting the run")
        info = operator.start_run(
            run_id or f"{wanted.plan.name[:MAX_PLAN_CHARS]}-{secrets.token_hex(4)}", wanted.plan, bundle, publisher
        )
    if not json:
        sys.stdout.write(f"run {info.run_id} started; devices trust {key.with_suffix('.pub')}\n")
    elif not watch:
        write_json(json, run_row(info))
    outcome = follow(operator.watch(info.run_id), json, run_row(info)) if watch else RunState.RUNNING
    line.close()
    return int(outcome in (RunState.FAILED, RunState.STOPPED))


def _export(app: str, out: Path, publisher: SigningKey, max_int8_drop: float | None) -> Bundle:
    """The Bundle of an App, with what the export has to say about it."""
    from fanin.edge.export import export, load_app

    made = export(load_app(app), out, publisher, max_drop=max_int8_drop)
    for note in made.notes:
        sys.stderr.write(f"note: {note}\n")
    return made.bundle
