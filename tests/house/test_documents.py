"""The documents that a reader counts on: the change log, the decisions, and what they point at."""

import re
from pathlib import Path

import pytest
from house.tree import ROOT

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


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_within_the_repository_lead_somewhere(name: str) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text())
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_target_of_make_that_the_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (*ROOT.glob("*.md"), *DECISIONS):
        named = set(re.findall(r"`make ([a-z-]+)", path.read_text()))
        assert sorted(named - targets) == [], path.name
