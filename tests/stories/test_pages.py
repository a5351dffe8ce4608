"""Every Python and shell block of README, the tutorials and the how-tos runs, page by page in the order of the page."""

import shutil
import subprocess
from pathlib import Path

import pytest
from house.tree import ROOT
from support.pages import blocks_of, run_page

PAGES = [
    "README.md",
    *(
        str(path.relative_to(ROOT))
        for kind in ("tutorials", "howto")
        for path in sorted((ROOT / "docs" / kind).iterdir())
    ),
]
ENVIRONMENTS = (".venv", ".venv-device", ".venv-device-litert", ".venv-device-tflite", "dist")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the tracked files, with links to the environments: what a reader has after ``make``."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folder = tmp_path / "fanin"
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    for name in ENVIRONMENTS:
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("page", [page for page in PAGES if any(block.runs for block in blocks_of(page))])
def test_the_blocks_of_a_page_run_in_their_order(checkout: Path, page: str) -> None:
    run_page(page, checkout)
