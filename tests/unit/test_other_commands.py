"""Subcommands of other packages: their mistakes are one line that names the package."""

from pathlib import Path

import pytest
from house.tree import ROOT
from support.commands import Fanin, fanin_in_process, uncoded
from support.outside import install, install_code

SOURCE = """
import absent_if_named

def status(argv):
    return int(argv[0])

def text(argv):
    return "done"

def nothing(argv):
    pass

def raises(argv):
    return {}["x"]

def refuses(argv):
    from fanin.protos.errors import InvalidInput
    raise InvalidInput("x: got 1, expected 2")

word = "no function"
"""
STATUS = "an exit status from 0 to 255; correct that package"
FUNCTION = "a function (argv) -> exit status; correct that package"
NAMES = ("status", "text", "nothing", "raises", "refuses", "word")


def package(folder: Path, name: str = "own_package", source: str = "") -> None:
    """Install a package whose subcommands are ``own-NAME``."""
    entries = "".join(f"own-{each} = {name}:{each}\n" for each in NAMES)
    install_code(folder, name, source or SOURCE.replace("import absent_if_named", ""), f"[fanin.commands]\n{entries}")


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fanin:
    """The command line, in a process that can import packages in ``tmp_path``."""
    monkeypatch.syspath_prepend(tmp_path)
    return fanin_in_process(capsys, monkeypatch)


def test_the_documented_subcommand_runs(fanin: Fanin, tmp_path: Path) -> None:
    install(tmp_path, (ROOT / "docs" / "reference" / "commands.md").read_text(), "fanin.commands")
    outcome = fanin("hello", "world")
    assert (outcome.status, outcome.out, uncoded(outcome.err)) == (0, "hello world\n", "")


@pytest.mark.parametrize("status", [0, 3])
def test_the_exit_status_is_that_of_the_function(fanin: Fanin, tmp_path: Path, status: int) -> None:
    package(tmp_path, f"own_status_{status}")
    outcome = fanin("own-status", str(status))
    assert (outcome.status, outcome.out, uncoded(outcome.err)) == (status, "", "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("text", "the package own_faults returned 'done', expected an exit status from 0 to 255; correct that package"),
        (
            "nothing",
            "the package own_faults returned None, expected an exit status from 0 to 255; correct that package",
        ),
        ("raises", "the package own_faults raised KeyError: 'x' (own_faults.py, line 14); correct that package"),
        ("refuses", "x: got 1, expected 2"),
        ("word", f"own_faults:word of the package own_faults is str, expected {FUNCTION}"),
    ],
)
def test_a_mistake_of_a_package_is_one_line_with_its_name(fanin: Fanin, tmp_path: Path, name: str, text: str) -> None:
    package(tmp_path, "own_faults")
    outcome = fanin(f"own-{name}")
    assert (outcome.status, outcome.out, uncoded(outcome.err)) == (1, "", f"fanin own-{name}: {text}\n")


def test_a_package_that_cannot_be_imported_is_named(fanin: Fanin, tmp_path: Path) -> None:
    package(tmp_path, "own_absent", SOURCE)
    outcome = fanin("own-text")
    problem = "own_absent:text cannot be imported from the package own_absent"
    reason = "ModuleNotFoundError: No module named 'absent_if_named'"
    assert outcome.status == 1
    assert uncoded(outcome.err) == f"fanin own-text: {problem} ({reason}); repair that package\n"


def test_two_packages_with_one_subcommand_are_refused(fanin: Fanin, tmp_path: Path) -> None:
    package(tmp_path, "own_first")
    package(tmp_path, "own_second")
    outcome = fanin("own-status", "0")
    problem = "subcommand: 'own-status' is in each of the packages ['own_first', 'own_second'], expected one of them"
    assert (outcome.status, uncoded(outcome.err)) == (1, f"fanin own-status: {problem}; uninstall the others\n")


@pytest.mark.parametrize(("word", "name"), [("own-statsu", "own-status"), ("simulat", "simulate")])
def test_an_unknown_subcommand_has_the_nearest_name(fanin: Fanin, tmp_path: Path, word: str, name: str) -> None:
    package(tmp_path, "own_near")
    outcome = fanin(word)
    assert outcome.status == 2
    assert outcome.err.startswith(f"fanin: got subcommand {word!r}, expected one of demo, ")
    assert uncoded(outcome.err).endswith(f"; did you mean {name}?\n")
