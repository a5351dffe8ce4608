"""``fanin pause``, ``resume``, ``stop``, ``rollback``, ``promote`` and ``reclaim``: commands that change a Run.

Each sends one command to the coordinator, then prints the state of the Run. The command carries a random id, so a
repeated transmission has no further effect. ``reclaim`` is the only one that needs the publisher's key.
"""

import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fanin.commands.console.show import count_text, run_row
from fanin.commands.console.streams import printable
from fanin.commands.console.terminal import (
    DEFAULT_KEY,
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    RoundsOption,
    RunArgument,
    ServerOption,
    StateOption,
    TokenOption,
    connect,
    prints_text,
    run_command,
    write_json,
)
from fanin.commands.console.usage import wrong_usage
from fanin.edge.bundles.keys import SigningKey, load_or_create_key
from fanin.protos.errors import FaninError, InvalidInput, Unavailable
from fanin.protos.messages import Adopt, Command, Pause, Resume, RunInfo, Stop

if TYPE_CHECKING:
    from fanin.clients.operator import Operator

OTHER_PUBLISHER: Final = "FN-1015"
"""The code of a Run whose Bundle another key signed."""


def pause(argv: Sequence[str]) -> int:
    """Run ``fanin pause``."""
    return run_command(pause_run, argv, "pause")


def resume(argv: Sequence[str]) -> int:
    """Run ``fanin resume``."""
    return run_command(resume_run, argv, "resume")


def stop(argv: Sequence[str]) -> int:
    """Run ``fanin stop``."""
    return run_command(stop_run, argv, "stop")


def rollback(argv: Sequence[str]) -> int:
    """Run ``fanin rollback``."""
    return run_command(rollback_run, argv, "rollback")


def promote(argv: Sequence[str]) -> int:
    """Run ``fanin promote``."""
    return run_command(promote_version, argv, "promote")


def reclaim(argv: Sequence[str]) -> int:
    """Run ``fanin reclaim``."""
    return run_command(reclaim_run, argv, "reclaim")


def pause_run(
    run_id: RunArgument,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Pause a run. Active devices may finish, no new device is selected, and deadlines stop counting."""
    with connect(state, server, ca, token_file) as operator:
        _send(operator, run_id, Pause(), json)


def resume_run(
    run_id: RunArgument,
    rounds: RoundsOption = 0,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Resume a run that is paused or has failed; with --rounds also a run that has finished or was stopped."""
    with connect(state, server, ca, token_file) as operator:
        _send(operator, run_id, Resume(rounds=rounds), json)


def stop_run(
    run_id: RunArgument,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """End a run, or acknowledge that it failed. An open round fails; a round in its fold still becomes a version."""
    with connect(state, server, ca, token_file) as operator:
        _send(operator, run_id, Stop(), json)


def rollback_run(
    run_id: RunArgument,
    number: Annotated[int, typer.Argument(min=0, help="The version to return to.")],
    rounds: RoundsOption = 0,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Make an older version of a run its newest. The run must be paused or have ended."""
    with connect(state, server, ca, token_file) as operator:
        _send(operator, run_id, Adopt(number=number, rounds=rounds), json)


def promote_version(
    from_run: Annotated[str, typer.Argument(metavar="FROM", help="The run that has the version.")],
    number: Annotated[int, typer.Argument(min=0, help="The version's number in that run.")],
    run_id: RunArgument,
    rounds: RoundsOption = 0,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Make a version of one run the newest of another run of the same bundle, which must be paused or have ended."""
    with connect(state, server, ca, token_file) as operator:
        _send(operator, run_id, Adopt(from_run_id=from_run, number=number, rounds=rounds), json)


def reclaim_run(
    run_id: Annotated[str, typer.Argument(metavar="[RUN]", help="The run; fanin runs lists them.")] = "",
    every: Annotated[
        bool, typer.Option("--all", help="Every run of this publisher that waits since a restore.")
    ] = False,
    key: Annotated[Path, typer.Option("--key", help="The publisher's key, which signed the bundle.")] = DEFAULT_KEY,
    version: Annotated[
        int | None, typer.Option("--version", min=0, help="The version to continue from; default: the newest.")
    ] = None,
    rounds: RoundsOption = 0,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> int:
    """Take a run back: replace its run key, and publish a version again in a new epoch. Devices refuse earlier ones."""
    with wrong_usage():
        if bool(run_id) is every:
            named = f"{run_id} and --all" if every else "neither RUN nor --all"
            raise InvalidInput(f"RUN: got {named}, expected one of them", code="FN-1471")
        if every and version is not None:
            raise InvalidInput("--version: it is that of one run, so --all excludes it", code="FN-1003")
    with connect(state, server, ca, token_file) as operator:
        if not key.exists():
            raise InvalidInput(
                f"--key {key}: no such file, expected the key that signed the run's bundle", code="FN-1016"
            )
        publisher = load_or_create_key(key)
        if every:
            return _reclaim_all(operator, publisher, rounds, json)
        info = operator.reclaim(run_id, publisher, version, rounds)
    _print(info, json, f", in epoch {info.epoch}")
    return 0


def _reclaim_all(operator: "Operator", publisher: SigningKey, num_rounds: int, json: str) -> int:
    """Reclaim the Runs that wait for their publisher. Return the exit status: 1 if one of this publisher failed."""
    infos: list[RunInfo] = []
    problems: dict[str, FaninError] = {}
    for waiting in operator.runs():
        if waiting.waits_for_publisher:
            try:
                info = operator.reclaim(waiting.run_id, publisher, None, num_rounds)
            except Unavailable:
                raise
            except FaninError as exc:
                # The other Runs do not depend on this one.
                problems[waiting.run_id] = exc
                text = f"not reclaimed: {printable(str(exc))}\n"
            else:
                infos.append(info)
                text = _line(info, f", in epoch {info.epoch}")
            if prints_text(json):
                sys.stdout.write(text)
    if json:
        rows = {run_id: {"problem": str(problem), "code": problem.code} for run_id, problem in problems.items()}
        write_json(json, {"runs": [run_row(info) for info in infos], "not_reclaimed": rows})
    if prints_text(json) and not infos and not problems:
        sys.stdout.write("no run waits for its publisher\n")
    return int(any(problem.code != OTHER_PUBLISHER for problem in problems.values()))


def _send(operator: "Operator", run_id: str, command: Pause | Resume | Stop | Adopt, json: str) -> None:
    """Send a command about a Run, then print the Run's new state."""
    _print(operator.command(Command(command_id=secrets.token_hex(16), run_id=run_id, what=command)), json)


def _print(info: RunInfo, json: str, suffix: str = "") -> None:
    if json:
        write_json(json, run_row(info))
    if prints_text(json):
        sys.stdout.write(_line(info, suffix))


def _line(info: RunInfo, suffix: str) -> str:
    reason = f" ({info.reason})" if info.reason else ""
    version = count_text(info, info.version)
    return f"run {info.run_id} is {info.state.value}{reason}, its newest version is {version}{suffix}\n"
