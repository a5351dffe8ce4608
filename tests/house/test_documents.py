"""The documents that a reader counts on: the change log, the decisions, and what they point at."""

import re
from pathlib import Path

import pytest
from house.tree import ROOT

from fanin.commands.main import SUBCOMMANDS

DECISIONS = sorted((ROOT / "docs/decisions").iterdir())
SECTIONS = ["Context", "Decision", "Consequences"]
STATUS = re.compile(r"^Status: (accepted|superseded by \d{4})$", re.MULTILINE)
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
"""Of Keep a Changelog 1.1.0."""


def headings(path: Path, level: int) -> list[str]:
    return re.findall(rf"^#{{{level}}} (.+)$", path.read_text(), re.MULTILINE)


def test_the_change_log_has_unreleased_first() -> None:
    path = ROOT / "CHANGELOG.md"
    assert headings(path, 2)[0] == "[Unreleased]"
    assert set(headings(path, 3)) <= KINDS


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.name)
def test_a_decision_says_why_and_what_follows(path: Path) -> None:
    assert re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", path.name)
    assert len(headings(path, 1)) == 1
    assert headings(path, 1)[0].startswith(f"{path.name[:4]} ")
    assert len(STATUS.findall(path.read_text())) == 1
    assert headings(path, 2) == SECTIONS


def test_decisions_are_numbered_without_a_gap() -> None:
    assert [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/commands.md", "docs/demo.md"]
)
def test_links_within_the_repository_lead_somewhere(name: str) -> None:
    path = ROOT / name
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_the_readme_is_short_and_starts_with_a_program() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert lines.index("```python") < 40


def test_every_command_in_the_readme_exists() -> None:
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    named = {name for block in blocks for name in re.findall(r"bin/fanin ([a-z]+)", block)}
    assert {"join", "run", "serve"} <= named <= set(SUBCOMMANDS)
    scripts = re.findall(r"bin/python (\S+\.py)", "".join(blocks))
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_the_page_of_commands_lists_every_subcommand() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in SUBCOMMANDS if f"`fanin {name}" not in page and f"`{name}`" not in page] == []


def test_every_target_of_make_that_the_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (*ROOT.glob("*.md"), *DECISIONS):
        named = set(re.findall(r"`make ([a-z-]+)", path.read_text()))
        assert sorted(named - targets) == [], path.name


def test_the_map_of_rooms_is_complete() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    map_ = text[text.index("## Find the room") : text.index("## Tests")]
    rooms = [
        path.name
        for package in (
            "server/fanin/server",
            "edge/fanin/edge",
            "datacenter/fanin/datacenter",
            "clients/fanin/clients",
        )
        for path in (ROOT / package).iterdir()
        if (path / "__init__.py").is_file()
    ]
    assert [room for room in rooms if f"{room}/" not in map_] == []
