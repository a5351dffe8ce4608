"""The store of docs/howto/stores.md, from outside the package."""

import subprocess
import sys
from pathlib import Path

import pytest
from house.tree import ROOT
from support.outside import python_blocks

EXAMPLE, *PROGRAMS = python_blocks((ROOT / "docs/howto/stores.md").read_text())
USE = """
from fanin.server.storage.records import Role
token = registry.new_token(Role.OPERATOR)
assert registry.has_token(token, Role.OPERATOR)
assert state.devices._tokens, "the registry asks another store"
"""


@pytest.mark.parametrize("program", PROGRAMS, ids=["contract", "composition"])
def test_the_example_is_shorter_than_40_lines_and_works(tmp_path: Path, program: str) -> None:
    assert len(EXAMPLE.splitlines()) < 40
    (tmp_path / "dict_devices.py").write_text(EXAMPLE)
    code = program + (USE if "Registry" in program else "")
    command = [sys.executable, "-c", code]
    completed = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr) == (0, "")


def test_an_example_that_breaks_the_contract_is_detected(tmp_path: Path) -> None:
    code = EXAMPLE.replace("(sha256, role) in self._tokens", "bool(self._tokens)")
    assert code != EXAMPLE
    (tmp_path / "dict_devices.py").write_text(code)
    command = [sys.executable, "-c", PROGRAMS[0]]
    completed = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert "AssertionError: has_token: a device's token counts as an operator's" in completed.stderr
