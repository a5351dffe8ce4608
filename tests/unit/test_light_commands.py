"""Help and mistakes in the options come before torch, whose import takes seconds."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from fanin.commands.main import main

try:
    status = main(sys.argv[1:])
except SystemExit as exc:
    status = exc.code
print("torch" in sys.modules, file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["export", "--help"], 0),
        (["export", "app.py:app", "--formats", "onnx"], 2),
        (["export", "app.py:app"], 1),
        (["export", "app.py:app", "--check", "--pretrain", "digits"], 1),
        (["export", "app.py:app", "--out", "bundle", "--max-int8-drop", "nan"], 1),
        (["train", "--help"], 0),
        (["train", "job.toml", "--nodes", "two"], 1),
        (["simulate", "--help"], 0),
        (["serve", "--help"], 0),
    ],
)
def test_a_command_answers_without_torch(words: list[str], status: int) -> None:
    process = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=False)
    assert process.returncode == status, process.stderr
    assert process.stderr.splitlines()[-1] == "False"
