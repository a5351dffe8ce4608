"""Helpers of the typer commands: shared options, progress, JSON output, and the operator's connection."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import click
import typer
from typer.core import TyperCommand

from fanin.clients.textfiles import read_text, read_token
from fanin.commands.console.show import finite
from fanin.commands.console.usage import WrongUsage, check_target, has_json, is_no_file, report_usage, wrong_usage
from fanin.edge.bundles.keys import SigningKey, load_or_create_key
from fanin.protos.addresses import check_remote
from fanin.protos.errors import InvalidInput

if TYPE_CHECKING:
    from fanin.clients.operator import Operator

DEFAULT_STATE: Final = Path("fanin-state")
ADDRESS_FILE: Final = "address"
OPERATOR_TOKEN: Final = Path("tokens") / "operator.token"
DEFAULT_KEY: Final = Path("publisher.key")
DEVICE_TOKEN: Final = Path("tokens") / "device.token"
CA_FILE: Final = Path("tls") / "ca.pem"
STEP_LOGGERS: Final = ("fanin.edge.export", "fanin.simulation.progress")
"""Loggers whose records are steps of a command."""

StateOption = Annotated[
    Path, typer.Option("--state", help="The coordinator's folder, if it is on this machine.", show_default=True)
]
ServerOption = Annotated[str, typer.Option("--server", help="HOST:PORT of the coordinator; default: from --state.")]
CaOption = Annotated[Path | None, typer.Option("--ca", help="Certificate of its authority; default: from --state.")]
TokenOption = Annotated[
    Path | None, typer.Option("--token-file", help="File with the token of a person; default: from --state.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Print no progress on standard error.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run; fanin runs lists them.")]
RoundsOption = Annotated[int, typer.Option("--rounds", min=0, help="Number of rounds to run afterwards.")]


def _writable(target: str) -> str:
    """Check before the work starts that its result can be written to a file."""
    with wrong_usage():
        check_target("--json", target)
        if target not in ("", "-") and Path(target).is_file() and not has_json(Path(target)):
            raise InvalidInput(
                f"--json: {target} exists and has no JSON, and would be overwritten; if it is an argument of the "
                "command, write it before --json, or write --json -",
                code="FN-1005",
            )
    return target


JsonOption = Annotated[
    str,
    typer.Option(
        "--json", metavar="FILE", callback=_writable, help="JSON: to standard output instead of the text, or to FILE."
    ),
]


class _Command(TyperCommand):
    """A command with plain-text help. typer escapes brackets for rich, which does not print this help."""

    def get_help(self, ctx: click.Context) -> str:
        """Return the help without escaped brackets."""
        return super().get_help(ctx).replace("\\[", "[")


def run_command(
    function: Callable[..., int | None], argv: Sequence[str], name: str = "", program: str = "fanin"
) -> int:
    """Run a function with typer options as a command. Wrong usage prints one line, like every error.

    Args:
        function: The command; it returns its exit status, or None for 0.
        argv: The arguments after the subcommand.
        name: The subcommand in messages; default: the function's name.
        program: The program in messages.

    Returns:
        The exit status.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=_Command)(function)
    words = [
        # ``--json`` without a value means standard output; click has no options with an optional value.
        "--json=-" if word == "--json" and is_no_file(after) else word
        for word, after in zip_longest(argv, argv[1:], fillvalue="")
    ]
    command = name or function.__name__
    try:
        outcome = typer.main.get_command(app).main(words, prog_name=f"{program} {command}", standalone_mode=False)
    except click.ClickException as exc:
        return report_usage(command, WrongUsage(exc.format_message()), argv, program)
    except WrongUsage as exc:
        return report_usage(command, exc, argv, program)
    return int(outcome or 0)


@contextmanager
def progress(command: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Print the steps of a command on standard error, each with the seconds since the command began.

    Yields a function that prints one step. The log records of an export or a simulation are printed, too.
    """
    began_s = time.monotonic()

    def step(text: str) -> None:
        if not quiet:
            sys.stderr.write(f"fanin {command}: {time.monotonic() - began_s:5.1f} s: {text}\n")
            sys.stderr.flush()

    with ExitStack() as stack:
        for name in STEP_LOGGERS:
            stack.enter_context(_shown(logging.getLogger(name), _Steps(step)))
        yield step


@contextmanager
def _shown(logger: logging.Logger, handler: logging.Handler) -> Iterator[None]:
    """Pass the records of a logger to a handler alone."""
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # The exporter's libraries configure the root logger, which would repeat each line.
    logger.propagate = False
    try:
        yield
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a command needs to call a coordinator: its address, the certificate of its authority, and a token."""

    address: str
    ca_certificate: bytes
    token: str


def credentials(state: Path, server: str = "", ca: Path | None = None, token_file: Path | None = None) -> Credentials:
    """Return the credentials of a person for a coordinator.

    Args:
        state: The folder of a coordinator on this machine. It supplies the omitted arguments.
        server: HOST:PORT.
        ca: File with the certificate of the coordinator's authority.
        token_file: File with the token. The variable FANIN_OPERATOR_TOKEN is used last.

    Raises:
        InvalidInput: An address, a certificate or a token is missing.
        WrongUsage: ``server`` is not HOST:PORT.
    """
    if server:
        with wrong_usage():
            check_remote("--server", server)
    address = server or _read(state / ADDRESS_FILE, "--server").strip()
    ca_certificate = _read(ca or state / CA_FILE, "--ca").encode()
    token_path = token_file or state / OPERATOR_TOKEN
    # A file named by --token-file must exist. The default file may be missing: the variable then supplies the token.
    token = read_token(token_path if token_file or token_path.exists() else None, "FANIN_OPERATOR_TOKEN")
    return Credentials(address=address, ca_certificate=ca_certificate, token=token)


@contextmanager
def connect(
    state: Path, server: str = "", ca: Path | None = None, token_file: Path | None = None
) -> "Iterator[Operator]":
    """Connect to a coordinator as an operator; the connection closes when the context ends. See ``credentials``."""
    # Imported here: the commands that need no coordinator would pay for grpc.
    from fanin.clients.operator import Operator

    known = credentials(state, server, ca, token_file)
    with Operator.connect(known.address, known.ca_certificate, known.token) as operator:
        yield operator


def check_max_drop(points: float | None) -> None:
    """Raise InvalidInput unless ``--max-int8-drop`` is a number of at least 0."""
    if points is not None and not 0.0 <= points < math.inf:
        raise InvalidInput(f"--max-int8-drop: got {points:g}, expected a number of at least 0", code="FN-0709")


def publisher_key(path: Path) -> SigningKey:
    """Return the publisher's key, created on first use, and write its public half to a ``.pub`` file for devices."""
    key = load_or_create_key(path)
    path.with_suffix(".pub").write_text(key.public + "\n")
    return key


def prints_text(json_target: str) -> bool:
    """Return whether a command prints its text: only a JSON object on standard output replaces it."""
    return json_target != "-"


def print_notes(notes: Iterable[str]) -> None:
    """Print notes on standard error, one a line."""
    sys.stderr.write("".join(f"note: {note}\n" for note in notes))


def write_json(target: str, value: object) -> None:
    """Write one JSON object to a file, or to standard output for ``-``. Numbers that are not finite become null."""
    text = json.dumps(finite(value), indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text)


def _read(path: Path, option: str) -> str:
    try:
        return read_text(path, option)
    except InvalidInput as exc:
        raise InvalidInput(f"{exc}; give {option}, or --state of a coordinator", code="FN-1012") from exc
