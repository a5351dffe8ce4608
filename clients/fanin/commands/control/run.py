"""``fanin run``: publish the Bundle of a Plan and start a Run."""

import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fanin.clients.planfile import PlanFile, check_overrides, named_sources, read_plan
from fanin.commands.administration.verbs import administrator
from fanin.commands.console.show import run_row
from fanin.commands.console.terminal import (
    DEFAULT_KEY,
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    QuietOption,
    ServerOption,
    StateOption,
    TokenOption,
    VerboseOption,
    check_max_drop,
    connect,
    prints_text,
    publisher_key,
    run_command,
    write_json,
)
from fanin.commands.console.usage import wrong_usage
from fanin.commands.control.private import claim_notes, population_notes
from fanin.commands.display.bars import byte_bar
from fanin.commands.display.follow import Watched, follow
from fanin.commands.display.screen import print_notes
from fanin.commands.display.steps import progress
from fanin.edge.bundles.bundle import Bundle, open_folder, read_signed_manifest
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.clipped import slack_notes
from fanin.edge.codecs.grid import first_change_notes
from fanin.protos.chunks import short
from fanin.protos.errors import InvalidBundle, InvalidInput, NotFound
from fanin.protos.messages import RunState
from fanin.protos.names import check_run_id
from fanin.protos.plans import EXPORT, PLAIN_PROTOCOL, Plan

if TYPE_CHECKING:
    from fanin.clients.operator import Operator

MAX_PLAN_CHARS = 48
"""Characters of the Plan's name in a Run's id; an id has at most 64."""


def main(argv: Sequence[str]) -> int:
    """Run ``fanin run``."""
    return run_command(run, argv)


def run(
    plan: Annotated[Path, typer.Argument(help="The plan, a TOML file.")],
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    key: Annotated[
        Path,
        typer.Option("--key", help="The key that signed the bundle; created if the plan has an App, with a .pub file."),
    ] = DEFAULT_KEY,
    run_id: Annotated[
        str,
        typer.Option(
            "--run-id", help="Name of the run; repeating the command with the same name starts no second run."
        ),
    ] = "",
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a key of the plan, as in cohort.concurrency=8; may be repeated.",
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run until it ends.")] = False,
    max_int8_drop: Annotated[
        float | None,
        typer.Option("--max-int8-drop", help="Allowed loss of int8 when an App is exported; see fanin export."),
    ] = None,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
    json: JsonOption = "",
) -> int:
    """Start a run from a plan: publish its bundle, sign version 0 and delegate to the run's key."""
    with wrong_usage():
        check_overrides(overrides)
        check_max_drop(max_int8_drop)
        if run_id:
            check_run_id(run_id)
    source = read_plan(plan, overrides or ())
    folder, app = plan.parent / source.bundle, _app_of(source.app, plan.parent)
    if source.bundle and not key.exists():
        # A key that is created here has not signed the Bundle.
        raise InvalidInput(
            f"--key {key}: no such file, expected the key that signed {folder}; pass it with --key", code="FN-1016"
        )
    print_notes(source.plan.notes)
    publisher = publisher_key(key)
    with connect(state, server, ca, token_file, byte_bar) as operator:
        with progress("run", quiet=quiet) as step, tempfile.TemporaryDirectory(prefix="fanin-bundle-") as scratch:
            # An export takes minutes: a coordinator that cannot be reached, lacks a part, or has another Run of this
            # id, and a token that may not start Runs, are reported before.
            with named_sources(source.sources):
                operator.check_plan(source.plan)
            if run_id:
                _check_free(run_id, source.plan, operator)
            if source.bundle:
                bundle = _open(folder, publisher, key)
                if not bundle.manifest.signatures:
                    print_notes(first_change_notes(source.plan.codec))
            else:
                step(f"exporting the App {app}")
                bundle = _export(replace(source, app=app), Path(scratch), publisher, max_int8_drop)
            print_notes(slack_notes(source.plan.privacy, source.plan.codec, bundle.manifest.table.num_values))
            step("publishing the bundle")
            operator.publish_bundle(bundle)
            if source.plan.privacy:
                with administrator(state, server, ca, token_file) as records:
                    known = tuple(records.populations())
                print_notes((*claim_notes(source.plan), *population_notes(source.plan, known)))
            step("starting the run")
            run_id = run_id or f"{source.plan.name[:MAX_PLAN_CHARS]}-{secrets.token_hex(4)}"
            info = operator.start_run(run_id, source.plan, bundle, publisher)
        if prints_text(json):
            is_new = info.state is RunState.RUNNING and not info.version
            what = "started" if is_new else f"is already there: {info.state.value}, version {info.version}"
            sys.stdout.write(f"run {info.run_id} {what}; devices trust {key.with_suffix('.pub')}\n")
        if json and not watch:
            write_json(json, run_row(info))
        outcome = RunState.RUNNING
        if watch:
            watched = Watched(json_target=json, verbose=verbose)
            outcome = follow(operator.watch_live(info.run_id), watched, run_row(info))
    return int(outcome in (RunState.FAILED, RunState.STOPPED))


def _app_of(app: str, folder: Path) -> str:
    """Return the name of an App, with the path of its file from the folder of the Plan's file."""
    source, _, name = app.rpartition(":")
    if not source.endswith(".py"):
        return app
    path = folder / source
    if not path.is_file() and Path(source).is_file():
        raise InvalidInput(
            f"app: got {app!r}, a file of the working directory, expected a path relative to the plan's file; "
            f'write app = "{os.path.relpath(source, folder)}:{name}"',
            code="FN-1512",
        )
    return f"{path}:{name}"


def _check_free(run_id: str, plan: Plan, operator: "Operator") -> None:
    """Raise Conflict if a Run of another Plan has the id. A repeated command finds its own Run."""
    from fanin.server.runs.recorded_setup import plan_problems, taken_by

    with suppress(NotFound):
        known = operator.run(run_id).plan
        if known is not None and (problems := plan_problems(known, plan)):
            raise taken_by(run_id, problems)


def _open(folder: Path, publisher: SigningKey, key: Path) -> Bundle:
    """Open the Bundle of a Plan. Raises InvalidBundle, also if another key signed it."""
    signer = read_signed_manifest(folder).public_key
    if signer != publisher.public:
        raise InvalidBundle(
            f"{folder}: signed by key {short(signer)}, but {key} has key {short(publisher.public)}; pass the key that "
            "signed it with --key, or export the bundle again",
            code="FN-1015",
        )
    return open_folder(folder, trusted=(publisher.public,))


def _export(source: PlanFile, out: Path, publisher: SigningKey, max_int8_drop: float | None) -> Bundle:
    """Export the App of a Plan, print the notes of the export, and return the Bundle.

    The coordinator checks the complete Plan with the Bundle. What the App alone decides is refused before the export.
    """
    from fanin.edge.export import export, load_app
    from fanin.edge.metrics.metric import metrics_of
    from fanin.server.evaluation.metrics import check_best
    from fanin.server.rounds.targets import check_target
    from fanin.server.runs.admission import check_training
    from fanin.simulation.arguments import facts_of

    app, plan = load_app(source.app), source.plan
    # Stages may be installed on the coordinator alone, so it checks those of SCAFFOLD.
    with named_sources(source.sources):
        check_training("plan", plan, {}, facts_of(app))
        if plan.evaluation.data:
            names = [each.name for each in plan.evaluation.metrics]
            sets = [each.name for each in plan.evaluation.sets]
            check_best(plan.evaluation.best, names, sets=sets, has_labels=bool(app.num_classes))
            check_target(plan, metrics_of(names))
    exported = export(app, out, publisher, max_drop=max_int8_drop)
    print_notes(exported.notes)
    takes_ranges = plan.round.protocol == PLAIN_PROTOCOL and not plan.privacy
    if exported.advice and plan.int8.ranges == EXPORT and takes_ranges:
        print_notes((exported.advice,))
    return exported.bundle
