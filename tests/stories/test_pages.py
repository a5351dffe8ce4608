"""Every Python and shell block of README, the tutorials and the how-tos runs, page by page in the order of the page."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from house.tree import ROOT
from support.pages import NOT_RUN, OUTPUT, OWN_TERMINAL, blocks_of, run_page

PAGES = [
    "README.md",
    *(
        str(path.relative_to(ROOT))
        for kind in ("tutorials", "howto")
        for path in sorted((ROOT / "docs" / kind).iterdir())
    ),
]
LINKS = {
    "dist": ROOT / "dist",
    **{f".venv{name}": Path(sys.prefix + name) for name in ("", "-device", "-device-litert", "-device-tflite")},
}
"""What a checkout has after ``make``. Its environments are those of the Python that runs the tests."""

PRINTED = {
    "README.md": r"^0\.[789]\d+$",
    "docs/howto/batch-losses.md": r"^training loss 4\.\d to 3\.\d$",
    "docs/howto/export.md": r"^onnx float 9\d\.\d\d %, int8 9\d\.\d\d %, agreeing .* labels$",
    "docs/howto/inputs.md": r"^\(44 more;",
    "docs/howto/local.md": r"^accuracy in int8 0\.[89]\d$",
    "docs/tutorials/from-pytorch.md": r"^0\.9\d+$",
    "docs/tutorials/first-federation.md": r"^version 5 .*: verified$",
    "docs/tutorials/operating.md": r"^version 1 .*: verified$",
}
"""A pattern for a line that the blocks of a page print."""


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
    for name, target in LINKS.items():
        if target.exists():
            (folder / name).symlink_to(target)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("page", [page for page in PAGES if any(block.runs for block in blocks_of(page))])
def test_the_blocks_of_a_page_run_in_their_order(checkout: Path, page: str) -> None:
    output = "\n".join(run_page(page, checkout).values())
    assert re.search(PRINTED.get(page, ""), output, re.MULTILINE), output


def test_every_block_of_python_and_shell_runs_or_says_why_not() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page)]
    skipped = [block for block in blocks if block.marker.startswith(NOT_RUN)]
    assert [block for block in skipped if not block.marker.removeprefix(NOT_RUN)] == []
    assert 8 * len(skipped) < sum(block.runs for block in blocks), "a block that does not run is rare"


@pytest.mark.parametrize("page", PAGES)
def test_the_fences_of_a_page_have_a_language_and_a_known_marker(page: str) -> None:
    text = (ROOT / page).read_text()
    assert len(blocks_of(page)) == len(re.findall(r"^```\w", text, re.MULTILINE)), (
        "a fence without a language or an end"
    )
    markers = re.findall(r"<!-- (.*?) -->", text, re.DOTALL)
    known = (NOT_RUN, OWN_TERMINAL, "operators: made by", "end of operators")
    assert [marker for marker in markers if not marker.startswith(known)] == []
    titles = [block.title for block in blocks_of(page) if block.title and block.title != OUTPUT]
    assert len(titles) == len(set(titles))


def test_a_block_that_fails_ends_its_page(tmp_path: Path) -> None:
    page = """<!-- in its own terminal, until ready -->
```sh
echo ready; sleep 100
```

```python title="number.py"
NUMBER = 1
```

```python
from number import NUMBER
print(NUMBER + 1)
```

```text title="Output"
2
```

```sh
test -f number.py
NAME=fanin
```

```sh
test $NAME = fanin
%s
```
"""
    (tmp_path / "page.md").write_text(page % "true")
    assert list(run_page("page.md", tmp_path, root=tmp_path).values()) == ["", "2\n", "", ""]
    (tmp_path / "page.md").write_text(page % "false\ntrue")
    with pytest.raises(AssertionError, match=r"page.md:25: the session ended"):
        run_page("page.md", tmp_path, root=tmp_path)
    (tmp_path / "page.md").write_text((page % "true").replace("+ 1", "+ 2"))
    with pytest.raises(AssertionError, match=r"page.md:16: got\n3\nexpected\n2\n"):
        run_page("page.md", tmp_path, root=tmp_path)
