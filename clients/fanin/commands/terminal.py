"""What the commands for people share: typed options, output as text or JSON, and the way to a coordinator."""

import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Final

import click
import typer
from typer.core import TyperCommand

from fanin.clients.operator import Operator
from fanin.clients.textfiles import read_text, read_token
from fanin.clients.transport import Line
from fanin.commands.show import finite, run_row
from fanin.edge.bundles.keys import SigningKey, load_or_create_key
from fanin.protos.control import Adopt, Command, Pause, Resume, Stop
from fanin.protos.errors import InvalidInput

DEFAULT_STATE: Final = Path("fanin-state")
ADDRESS_FILE: Final = "address"
OPERATOR_TOKEN: Final = Path("tokens") / "operator.token"
DEFAULT_KEY: Final = Path("publisher.key")
DEVICE_TOKEN: Final = Path("tokens") / "device.token"
CA_FILE: Final = Path("tls") / "ca.pem"

StateOption = Annotated[
    Path, typer.Option("--state", help="The coordinator's folder, if it is on this machine.", show_default=True)
]
ServerOption = Annotated[str, typer.Option("--server", help="HOST:PORT of the coordinator; default: from --state.")]
CaOption = Annotated[Path | None, typer.Option("--ca", help="Its authority's certificate; default: from --state.")]
TokenOption = Annotated[
    Path | None, typer.Option("--token-file", help="File with an operator's token; default: from --state.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Print no progress on standard error.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run; fanin runs lists them.")]
RoundsOption = Annotated[int, typer.Option("--rounds", min=0, help="How many rounds to run from there.")]


def _writable(target: str) -> str:
    """A file that cannot be written is told before the work whose outcome it is to hold."""
    if target in ("", "-"):
        return target
    path = Path(target)
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder, name a file")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{path} cannot be written, {path.parent} is not a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written, permission is denied")
    return target


JsonOption = Annotated[
    str,
    typer.Option(
        "--json", metavar="FILE", callback=_writable, help="JSON instead of text, to standard output or to FILE."
    ),
]


class _Command(TyperCommand):
    """A command whose help is plain text: typer escapes brackets for rich, which does not print this."""

    def get_help(self, ctx: click.Context) -> str:
        """The help, as it is meant."""
        return super().get_help(ctx).replace("\\[", "[")


def run_command(function: Callable[..., int | None], argv: Sequence[str], name: str = "") -> int:
    """Run a function with typed options as a command; its exit status. ``name`` says how it is called, where that is
    not as the function is. Wrong usage is told in one line, as every error is."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=_Command)(function)
    words = [
        # ``--json`` alone means standard output; click has no option whose value may be left out.
        "--json=-" if word == "--json" and (after == "" or after.startswith("--")) else word
        for word, after in zip_longest(argv, argv[1:], fillvalue="")
    ]
    called = name or function.__name__.rstrip("_").replace("_", "-")
    try:
        outcome = typer.main.get_command(app).main(words, prog_name=f"fanin {called}", standalone_mode=False)
    except click.ClickException as exc:
        said = " ".join(exc.format_message().split()).rstrip(".")
        sys.stderr.write(f"fanin {called}: {said}; fanin {called} --help says more\n")
        return exc.exit_code
    return int(outcome or 0)


@contextmanager
def progress(command: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Print a command's steps on standard error, each with the seconds since the command began.

    The steps are those passed to the function that this yields, and those that an export logs.
    """
    began_s = time.monotonic()

    def step(text: str) -> None:
        if not quiet:
            sys.stderr.write(f"fanin {command}: {time.monotonic() - began_s:5.1f} s: {text}\n")
            sys.stderr.flush()

    handler, logger = _Steps(step), logging.getLogger("fanin.edge.export")
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # The exporter's libraries configure the root logger, which would repeat each line.
    logger.propagate = False
    try:
        yield step
    finally:
        logger.level, logger.propagate = before
        logger.removeHandler(handler)


class _Steps(logging.Handler):
    """Passes each record's text to a function."""

    def __init__(self, step: Callable[[str], None]) -> None:
        super().__init__()
        self._step = step

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        self._step(record.getMessage())


def connect(state: Path, server: str, ca: Path | None, token_file: Path | None) -> tuple[Line, Operator]:
    """A line to a coordinator and an operator on it, from options or from a folder on this machine.

    Raises InvalidInput if something is neither given nor found.
    """
    address = server or _read(state / ADDRESS_FILE, "--server").strip()
    ca_path = ca or state / CA_FILE
    line = Line(address, _read(ca_path, "--ca").encode())
    token_path = token_file or state / OPERATOR_TOKEN
    # A file that was asked for must be there; that of --state may stand back for the variable.
    found = token_path if token_file or token_path.exists() else None
    return line, Operator(line, read_token(found, "FANIN_OPERATOR_TOKEN"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Which coordinator, as the options say."""

    state: Path
    server: str
    ca: Path | None
    token_file: Path | None


def command_run(where: Where, run_id: str, what: Pause | Resume | Stop | Adopt, json: str) -> None:
    """Have a coordinator carry out a command, and tell where the Run stands then."""
    line, operator = connect(where.state, where.server, where.ca, where.token_file)
    info = operator.command(Command(command_id=secrets.token_hex(16), run_id=run_id, what=what))
    line.close()
    if json:
        write_json(json, run_row(info))
    else:
        reason = f" ({info.reason})" if info.reason else ""
        sys.stdout.write(f"run {info.run_id} is {info.state.value}{reason}, its newest version is {info.version}\n")


def publisher_key(path: Path) -> SigningKey:
    """The publisher's key, with its public half written beside it for devices."""
    key = load_or_create_key(path)
    path.with_suffix(".pub").write_text(key.public + "\n")
    return key


def write_json(target: str, value: object) -> None:
    """One JSON object to a file, or to standard output for ``-``; null for a number that is not finite."""
    text = json.dumps(finite(value), indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text)


def _read(path: Path, option: str) -> str:
    try:
        return read_text(path, option)
    except InvalidInput as exc:
        raise InvalidInput(f"{exc}; give {option}, or --state of a coordinator") from exc
