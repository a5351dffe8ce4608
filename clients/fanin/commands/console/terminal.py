"""Helpers of the typer commands: shared options, progress, JSON output, and the operator's connection."""

import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import click
import typer
from typer.core import TyperCommand

from fanin.clients.textfiles import read_text, read_token
from fanin.clients.transfers import Transfers, unshown
from fanin.commands.console.show import finite
from fanin.commands.console.usage import WrongUsage, check_target, has_json, is_no_file, report_usage, wrong_usage
from fanin.edge.bundles.keys import SigningKey, load_or_create_key
from fanin.edge.files import is_held
from fanin.protos.addresses import check_remote
from fanin.protos.errors import InvalidInput, Unavailable

if TYPE_CHECKING:
    from fanin.clients.operator import Operator

DEFAULT_STATE: Final = Path("fanin-state")
UNREACHABLE: Final = "FN-0811"
"""The code of an address at which nothing answers."""
ADDRESS_FILE: Final = "address"
OPERATOR_TOKEN: Final = Path("tokens") / "operator.token"
DEFAULT_KEY: Final = Path("publisher.key")
DEVICE_TOKEN: Final = Path("tokens") / "device.token"
CA_FILE: Final = Path("tls") / "ca.pem"

StateOption = Annotated[
    Path, typer.Option("--state", help="The coordinator's folder, if it is on this machine.", show_default=True)
]
ServerOption = Annotated[str, typer.Option("--server", help="HOST:PORT of the coordinator; default: from --state.")]
CaOption = Annotated[Path | None, typer.Option("--ca", help="Certificate of its authority; default: from --state.")]
TokenOption = Annotated[
    Path | None, typer.Option("--token-file", help="File with the token of a person; default: from --state.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Print no progress on standard error.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", help="Print a line for each event, with digests, spreads and all else.")
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run; fanin runs lists them.")]
RoundsOption = Annotated[int, typer.Option("--rounds", min=0, help="Number of rounds to run afterwards.")]


def check_json_target(target: str) -> str:
    """Return the value of ``--json``. Raises WrongUsage, before the work starts, if its file cannot be written."""
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
        "--json",
        metavar="FILE",
        callback=check_json_target,
        help="JSON: to standard output instead of the text, or to FILE.",
    ),
]


class _Command(TyperCommand):
    """A command with plain-text help. typer escapes brackets for rich, which does not print this help."""

    def get_help(self, ctx: click.Context) -> str:
        """Return the help without escaped brackets."""
        return super().get_help(ctx).replace("\\[", "[")


def run_command(
    function: Callable[..., int | None],
    argv: Sequence[str],
    name: str = "",
    program: str = "fanin",
    defaults: Callable[[click.Command, Sequence[str]], Mapping[str, object]] | None = None,
) -> int:
    """Run a function with typer options as a command. Wrong usage prints one line, like every error.

    Args:
        function: The command; it returns its exit status, or None for 0.
        argv: The arguments after the subcommand.
        name: The subcommand in messages; default: the function's name.
        program: The program in messages.
        defaults: Returns the values of options that the command line omits, by the names of the parameters.

    Returns:
        The exit status.
    """
    words = json_words(argv)
    command = name or function.__name__
    try:
        parser = typer_command(function)
        # The help must be there for a user whose defaults are wrong.
        values = None if defaults is None or "--help" in words else defaults(parser, words)
        outcome = parser.main(words, f"{program} {command}", standalone_mode=False, default_map=values)
    except click.ClickException as exc:
        return report_usage(command, WrongUsage(exc.format_message()), argv, program)
    except WrongUsage as exc:
        return report_usage(command, exc, argv, program)
    return int(outcome or 0)


def typer_command(function: Callable[..., int | None]) -> click.Command:
    """Return a function with typer options as a command of click."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=_Command)(function)
    return typer.main.get_command(app)


def json_words(argv: Sequence[str]) -> list[str]:
    """Return a command line in which ``--json`` has a value: without one it means standard output."""
    return [
        # click has no options with an optional value.
        "--json=-" if word == "--json" and is_no_file(after) else word
        for word, after in zip_longest(argv, argv[1:], fillvalue="")
    ]


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
        Unavailable: No coordinator has served from the folder yet.
        WrongUsage: ``server`` is not HOST:PORT.
    """
    if server:
        with wrong_usage():
            check_remote("--server", server)
    if not server and (state / "fanin.db").exists() and not (state / ADDRESS_FILE).exists():
        raise Unavailable(f"{state}: {not_serving(state)}", code="FN-1497")
    address = server or _read(state / ADDRESS_FILE, "--server").strip()
    ca_certificate = _read(ca or state / CA_FILE, "--ca").encode()
    token_path = token_file or state / OPERATOR_TOKEN
    # A file named by --token-file must exist. The default file may be missing: the variable then supplies the token.
    token = read_token(token_path if token_file or token_path.exists() else None, "FANIN_OPERATOR_TOKEN")
    return Credentials(address=address, ca_certificate=ca_certificate, token=token)


def not_serving(state: Path) -> str:
    """Return the text about a folder from which no coordinator serves."""
    return f"no coordinator serves from this folder; start it: fanin serve --state {shlex.quote(str(state))}"


@contextmanager
def naming_start(state: Path, server: str) -> Iterator[None]:
    """Name the command that starts the coordinator of a folder, if an error within this context is that none serves."""
    try:
        yield
    except Unavailable as exc:
        if server or exc.code != UNREACHABLE or is_held(state):
            raise
        raise Unavailable(f"{state}: {not_serving(state)} ({exc})", code="FN-1497") from exc


@contextmanager
def connect(
    state: Path,
    server: str = "",
    ca: Path | None = None,
    token_file: Path | None = None,
    transfers: Transfers = unshown,
) -> "Iterator[Operator]":
    """Connect to a coordinator as an operator; the connection closes when the context ends. See ``credentials``.

    Args:
        state, server, ca, token_file: See ``credentials``.
        transfers: Shows the progress of uploads and downloads.
    """
    # Imported here: the commands that need no coordinator would pay for grpc.
    from fanin.clients.operator import Operator

    known = credentials(state, server, ca, token_file)
    with (
        naming_start(state, server),
        Operator.connect(known.address, known.ca_certificate, known.token, transfers) as operator,
    ):
        yield operator


def check_max_drop(points: float | None) -> None:
    """Raise InvalidInput unless ``--max-int8-drop`` is a number of at least 0."""
    if points is not None and not 0.0 <= points < math.inf:
        raise InvalidInput(f"--max-int8-drop: got {points:g}, expected a number of at least 0", code="FN-0709")


def publisher_key(path: Path) -> SigningKey:
    """Return the publisher's key, created on first use, and write its public half to a ``.pub`` file for devices."""
    key = load_or_create_key(path)
    path.with_suffix(".pub").write_text(key.public + "\n", encoding="utf-8")
    return key


def prints_text(json_target: str) -> bool:
    """Return whether a command prints its text: only a JSON object on standard output replaces it."""
    return json_target != "-"


def write_json(target: str, value: object) -> None:
    """Write one JSON object to a file, or to standard output for ``-``. Numbers that are not finite become null."""
    text = json.dumps(finite(value), indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


def _read(path: Path, option: str) -> str:
    try:
        return read_text(path, option)
    except InvalidInput as exc:
        raise InvalidInput(f"{exc}; give {option}, or --state of a coordinator", code="FN-1012") from exc
