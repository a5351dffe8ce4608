"""docs/simulation.md: its example runs as it stands, and prints what is printed there."""

import re
import subprocess
import sys

from house.tree import ROOT

TEXT = (ROOT / "docs" / "simulation.md").read_text()


def test_the_example_prints_what_the_page_says() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    (expected,) = re.findall(r"^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected
    assert expected.endswith("True\n")
