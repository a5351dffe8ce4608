"""A subcommand that lacks a library: one line, which says the extra that brings it."""

import subprocess
import sys

import pytest

from fanin.commands.main import EXTRA_OF

CODE = """
import sys
sys.modules |= {sys.argv[1]: None}
from fanin.commands.main import main
sys.exit(main(sys.argv[2:]))
"""
ASKED = {
    "typer": ("runs",),
    "click": ("inspect", "nothing"),
    "sqlalchemy": ("serve",),
    "alembic": ("serve",),
    "rich": ("demo",),
    "torch": ("export", "nothing:app", "--check"),
    "onnx": ("export", "nothing:app", "--check"),
    "flatbuffers": ("export", "nothing:app", "--check"),
}
"""What asks for each library at once, by the library."""


@pytest.mark.parametrize("library", ASKED)
def test_the_extra_is_named(library: str) -> None:
    command = [sys.executable, "-c", CODE, library, *ASKED[library]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    name = ASKED[library][0]
    said = f"fanin {name}: {library} is not installed here; pip install 'fanin[{EXTRA_OF[library]}]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
