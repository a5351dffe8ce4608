"""``fanin`` commands in the test's process: their output and exit status."""

import re
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fanin.commands.main import main


@dataclass(frozen=True)
class Outcome:
    """The result of a command."""

    status: int
    out: str
    err: str


Fanin = Callable[..., Outcome]
STEP = re.compile(r"^fanin \w+: +\d+\.\d s: (.*)\n", re.MULTILINE)
"""A progress line."""
CODE = re.compile(r" \[FN-\d{4}\]$", re.MULTILINE)
"""The code at the end of an error."""


def fanin_in_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """Return a function that runs a subcommand without tokens from the environment."""
    for variable in ("FANIN_DEVICE_TOKEN", "FANIN_OPERATOR_TOKEN"):
        monkeypatch.delenv(variable, raising=False)

    def run(*words: object) -> Outcome:
        try:
            status = main([str(word) for word in words])
        except SystemExit as exc:
            # argparse raises SystemExit with a number.
            assert isinstance(exc.code, int)
            status = exc.code
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


def script_in_process(script: Path, capsys: pytest.CaptureFixture[str]) -> Fanin:
    """Return a function that runs the ``main`` of a script, whose folder is on the import path."""
    main_of_script = runpy.run_path(str(script))["main"]

    def run(*words: object) -> Outcome:
        status = main_of_script([str(word) for word in words])
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


def uncoded(text: str) -> str:
    """Return the output of a command without the codes at the ends of its lines."""
    return CODE.sub("", text)


def usage_line(outcome: Outcome, command: str, program: str = "fanin") -> str:
    """Return the error of a command that was called in a wrong way: one line that names the help."""
    assert (outcome.status, outcome.out) == (2, ""), outcome
    before, after = f"{program} {command}: ", f"; see {program} {command} --help\n"
    err = uncoded(outcome.err)
    assert err.count("\n") == 1 and err.startswith(before) and err.endswith(after) and err != outcome.err, outcome.err
    return err.removeprefix(before).removesuffix(after)


def one_line(outcome: Outcome, command: str) -> str:
    """Return the error of a failed command: it is one line after the progress, and standard output is empty."""
    assert outcome.status == 1, outcome
    assert outcome.out == ""
    err = uncoded(STEP.sub("", outcome.err))
    assert CODE.search(outcome.err), outcome.err
    assert err.count("\n") == 1, outcome.err
    assert err.startswith(f"fanin {command}: ")
    text = err.removeprefix(f"fanin {command}: ").rstrip("\n")
    assert not text.startswith(f"{command}: "), err
    return text
