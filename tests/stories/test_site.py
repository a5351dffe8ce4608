"""The site of the docs is built without a warning, and loads nothing from another host."""

import re
import subprocess
import sys

import pytest
from house.tree import ROOT

LOADED = re.compile(r'<(?:script|img|iframe)[^>]*src="https?:|<link[^>]*rel="?stylesheet"?[^>]*href="https?:')


@pytest.mark.nightly
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_another_host() -> None:
    pytest.importorskip("zensical", reason="make docs installs it")
    command = [sys.executable, "docs/build.py"]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    pages = sorted((ROOT / "build/site").rglob("*.html"))
    assert len(pages) > 100
    assert [page.name for page in pages if LOADED.search(page.read_text())] == []
