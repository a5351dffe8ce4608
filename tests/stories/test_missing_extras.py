"""A subcommand without a library it needs prints one line, which names all missing extras."""

import subprocess
import sys

import pytest

from fanin.commands.main import extras_for

CODE = """
import sys
sys.modules |= {sys.argv[1]: None}
from fanin.commands.main import main
sys.exit(main(sys.argv[2:]))
"""
CASES = [
    ("typer", ("runs",), "server"),
    ("sqlalchemy", ("serve",), "server"),
    ("rich", ("demo",), "server,export,datacenter,onnx"),
    ("torch", ("export", "nothing:app", "--check"), "server,export"),
    ("onnx", ("export", "nothing:app", "--check"), "server,export"),
    ("torch", ("plan", "--model", "nothing.toml"), "server,datacenter"),
    ("typer", ("run", "nothing.toml"), "server"),
    *(
        pytest.param(*case, marks=pytest.mark.nightly)
        for case in (
            ("click", ("inspect", "nothing"), "server"),
            ("alembic", ("serve",), "server"),
            ("grpc_health", ("serve",), "server"),
            ("typer", ("export", "nothing:app"), "server,export"),
            ("flatbuffers", ("export", "nothing:app", "--check"), "server,export"),
            ("typer", ("train",), "server,export,datacenter"),
        )
    ),
]
"""A missing library, the command that needs it at once, and all extras of the command."""


@pytest.mark.parametrize(
    ("library", "words", "extras"), CASES, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_all_extras_are_named_at_once(library: str, words: tuple[str, ...], extras: str) -> None:
    command = [sys.executable, "-c", CODE, library, *words]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    message = f"fanin {words[0]}: {library} is not installed here; pip install 'fanin[{extras}]'"
    message += ", or 'fanin[server,export]' for a plan with an App" if words[0] == "run" else ""
    assert (completed.returncode, completed.stdout, completed.stderr) == (1, "", f"{message} [FN-0025]\n")


def test_an_app_of_a_run_needs_the_extra_that_exports_it() -> None:
    assert extras_for("run", "torch") == ("export",)
