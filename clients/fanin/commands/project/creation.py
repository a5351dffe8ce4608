"""``fanin init``: write the files of a new project."""

import re
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

import typer

from fanin.commands.console.terminal import JsonOption, prints_text, run_command, write_json
from fanin.commands.console.usage import check_place, wrong_usage
from fanin.protos.errors import InvalidInput

TEMPLATE: Final = files("fanin.commands.project") / "template"
SUFFIX: Final = ".in"
"""Suffix of the files of the template, which are no modules of this package."""
NAME: Final = "@NAME@"
DEFAULT_NAME: Final = "project"
MAX_NAME_CHARS: Final = 40


def main(argv: Sequence[str]) -> int:
    """Run ``fanin init``."""
    return run_command(init, argv)


def init(
    folder: Annotated[Path, typer.Argument(metavar="NAME", help="The new folder; its name is that of the project.")],
    json: JsonOption = "",
) -> None:
    """Write a project that runs: an App, a plan, the split of its data, a test and a README."""
    with wrong_usage():
        _check(folder)
    name = project_name(folder)
    folder.mkdir(exist_ok=True)
    written = []
    for source in sorted(TEMPLATE.iterdir(), key=lambda each: each.name):
        target = folder / source.name.removesuffix(SUFFIX)
        target.write_text(source.read_text("utf-8").replace(NAME, name), encoding="utf-8")
        written.append(target.name)
    if json:
        write_json(json, {"folder": str(folder), "name": name, "files": written})
    if prints_text(json):
        sys.stdout.write(f"{folder}: {', '.join(written)}\nnext: follow {folder / 'README.md'}\n")


def project_name(folder: Path) -> str:
    """Return the name of the project in a folder: lower case letters, digits and hyphens, as Plans and Runs allow."""
    words = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    return words[:MAX_NAME_CHARS].strip("-") or DEFAULT_NAME


def _check(folder: Path) -> None:
    """Raise InvalidInput unless the folder is new or empty, and can be written."""
    if folder.is_file():
        raise InvalidInput(f"NAME: {folder} is a file; name a new folder", code="FN-1013")
    if folder.is_dir():
        entry = next(folder.iterdir(), None)
        if entry is not None:
            raise InvalidInput(f"NAME: {folder} is not empty, it has {entry.name}; name a new folder", code="FN-1013")
    else:
        check_place("NAME", folder)
