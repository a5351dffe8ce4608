"""The example of docs/inputs.md, outside the package: an App with several inputs, its data, and ``fanin infer``."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from house.tree import ROOT

EXAMPLE, *_ = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/inputs.md").read_text(), re.MULTILINE | re.DOTALL)
(OUTPUT,) = re.findall(r"^```text\n(.*?)^```$", (ROOT / "docs/inputs.md").read_text(), re.MULTILINE | re.DOTALL)
INFER = ("-m", "fanin.commands.main", "infer", "bundle", "--data", "device-0.npz", "--json")


def run(folder: Path, *words: str) -> str:
    command = [sys.executable, *words]
    completed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.mark.nightly
def test_the_example_is_shorter_than_40_lines_and_works(tmp_path: Path) -> None:
    assert len(EXAMPLE.splitlines()) < 40
    assert run(tmp_path, "-c", EXAMPLE) == OUTPUT
    row = json.loads(run(tmp_path, *INFER))
    assert row["outputs"]["logits"]["shape"] == [64, 3] and len(row["predictions"]) == 64
