"""Wrong usage of a command: a mistake on the command line itself, reported with exit status 2 before any work.

Wrong usage is what the words of the command line alone decide: an unknown option, a value out of range, options that
exclude each other. So is the target of a result that cannot be written, which would cost the work. A file that is
missing or has wrong content is an error of the command, with exit status 1.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Final, NoReturn

from fanin.protos.errors import InvalidInput

WRONG_USAGE: Final = 2
"""Exit status of a command that was called in a wrong way."""


WRONG_USAGE_CODE: Final = "FN-0023"


class WrongUsage(Exception):
    """The command line is wrong. The message names the option."""

    def __init__(self, message: str, code: str = WRONG_USAGE_CODE) -> None:
        super().__init__(message)
        self.code = code


class Parser(argparse.ArgumentParser):
    """A parser of the core install, which has no typer. It reports mistakes as the commands of typer do."""

    def parsed(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the options of a command line. Raises WrongUsage, for an unknown option with the nearest one."""
        for word in argv:
            name = word.partition("=")[0]
            # A value with a space, such as several settings of an app, may begin with dashes.
            if name.startswith("--") and " " not in word and name not in self._option_string_actions:
                near = get_close_matches(name, self._option_string_actions, n=1)
                raise WrongUsage(f"No such option: {name}{f' Did you mean {near[0]}?' if near else ''}")
        return self.parse_args(argv)

    def error(self, message: str) -> NoReturn:
        """Raise WrongUsage."""
        raise WrongUsage(message)


@dataclass(frozen=True, slots=True)
class CommandFailure:
    """The error of a command: its message, its code and its class (``WrongUsage``; "" for an error of the system)."""

    message: str
    _: KW_ONLY
    code: str
    kind: str = ""


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Report the mistakes in this context as wrong usage. Raises WrongUsage."""
    try:
        yield
    except InvalidInput as exc:
        raise WrongUsage(str(exc), exc.code) from exc


def report_usage(command: str, error: WrongUsage, words: Sequence[str], program: str = "fanin") -> int:
    """Print wrong usage as one line, and return the exit status. ``words`` are the command line."""
    line = " ".join(str(error).split()).rstrip(".")
    report(
        f"{program} {command}",
        CommandFailure(f"{line}; see {program} {command} --help", code=error.code, kind="WrongUsage"),
        words,
    )
    return WRONG_USAGE


def report(command: str, failure: CommandFailure, words: Sequence[str]) -> None:
    """Print the error of a command as one line; also as a line of JSON, if ``--json`` names standard output."""
    # The errors of a library function begin with its name, which is often also the command's.
    message = failure.message.removeprefix(f"{command.rpartition(' ')[2]}: ")
    sys.stderr.write(f"{command}: {message} [{failure.code}]\n")
    to_output = (after == "-" or is_no_file(after) for word, after in pairwise([*words, ""]) if word == "--json")
    if "--json=-" in words or any(to_output):
        row = {"code": failure.code, "kind": failure.kind, "message": message}
        sys.stdout.write(json.dumps({"error": row}) + "\n")


def is_no_file(after: str) -> bool:
    """Return whether the word after ``--json`` is no file: there is none, or it is another option."""
    return after == "" or after.startswith("--")


def has_json(path: Path) -> bool:
    """Return whether a file is empty, or has a JSON value or JSON lines."""
    with suppress(OSError, ValueError):
        text = path.read_text(encoding="utf-8")
        for part in (text, text.partition("\n")[0]):
            with suppress(ValueError):
                json.loads(part or "null")
                return True
    return False


def check_target(option: str, target: str) -> None:
    """Raise InvalidInput unless a result can be written to a file; "" and "-" name none."""
    if target in ("", "-"):
        return
    path = Path(target)
    if path.is_dir():
        raise InvalidInput(f"{option}: {path} is a folder, name a file", code="FN-1001")
    if not path.exists():
        check_place(option, path)
    elif not os.access(path, os.W_OK):
        raise InvalidInput(f"{option}: {path} cannot be written, permission is denied", code="FN-1001")


def check_place(option: str, path: Path) -> None:
    """Raise InvalidInput unless the folder of a result exists, and entries can be added to it."""
    if not path.parent.is_dir():
        raise InvalidInput(
            f"{option}: {path} cannot be written, {path.parent} is not a folder; create it", code="FN-1001"
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InvalidInput(f"{option}: {path} cannot be written, permission is denied in {path.parent}", code="FN-1001")


def data_sets(texts: Sequence[str]) -> dict[str, Path]:
    """Return the data sets of ``--data``. Raises InvalidInput."""
    paths: dict[str, Path] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not path or name in paths:
            problem = "the name a second time" if name in paths else "no path"
            raise InvalidInput(
                f"--data {text}: got {problem}, expected NAME=PATH with a name for each file", code="FN-1008"
            )
        paths[name] = Path(path).absolute()
    return paths
