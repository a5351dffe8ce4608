"""The documents of the project: the change log, the decisions, and the targets of links, commands and imports."""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from house.tree import ROOT, module_names, package_modules, tracked_names, tracked_pages

from fanin.commands.main import SUBCOMMANDS

DECISIONS = tracked_pages(ROOT / "docs/decisions")
SECTIONS = ["Context", "Decision", "Consequences"]
STATUS = re.compile(r"^Status: (accepted|superseded by \d{4})$", re.MULTILINE)
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
"""The kinds of changes in Keep a Changelog 1.1.0."""
FOLDERS = [ROOT / "docs", *(ROOT / "docs" / name for name in sorted(tracked_names(ROOT / "docs") - {"decisions"}))]
DOCS = [path for folder in FOLDERS if folder.is_dir() for path in tracked_pages(folder)]
PAGES = [ROOT / "README.md", *DOCS]
ALL_PAGES = [*tracked_pages(ROOT), *DOCS]
CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"\bfrom (fanin[\w.]*) import (\([^)]*\)|[\w, ]+)")


def headings(path: Path, level: int) -> list[str]:
    return re.findall(rf"^#{{{level}}} (.+)$", path.read_text(), re.MULTILINE)


def test_the_change_log_has_unreleased_first() -> None:
    path = ROOT / "CHANGELOG.md"
    assert headings(path, 2)[0] == "[Unreleased]"
    assert set(headings(path, 3)) <= KINDS


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.name)
def test_a_decision_has_a_context_and_consequences(path: Path) -> None:
    assert re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", path.name)
    assert len(headings(path, 1)) == 1
    assert headings(path, 1)[0].startswith(f"{path.name[:4]} ")
    assert len(STATUS.findall(path.read_text())) == 1
    assert headings(path, 2) == SECTIONS


def test_decisions_are_numbered_without_a_gap() -> None:
    assert [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))


CONFLICT = re.compile(r"^(<{7} |>{7} )", re.MULTILINE)
"""The markers that git writes into a file with a merge conflict."""


def test_no_document_contains_a_merge_conflict() -> None:
    assert CONFLICT.search("a\n" + "<" * 7 + " HEAD\nb") is not None
    pages = [*ALL_PAGES, *DECISIONS]
    assert [page.name for page in pages if CONFLICT.search(page.read_text())] == []


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, formed as GitHub forms them."""
    prose = CODE_BLOCK.sub("", text)
    slugs: list[str] = []
    for heading in re.findall(r"^#+ +(.+?) *$", prose, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        slugs.append(slug)
    return {
        slug if not (earlier := slugs[:index].count(slug)) else f"{slug}-{earlier}" for index, slug in enumerate(slugs)
    }


def broken_links(path: Path, text: str) -> list[str]:
    """Return the relative links of a page whose file or anchor does not exist."""

    def resolves(link: str) -> bool:
        name, _, anchor = link.partition("#")
        target = path.parent / name
        if name and not target.exists():
            return False
        return not anchor or anchor in anchors(target.read_text() if name else text)

    links = re.findall(r"\]\(([^)\s:]+)\)", CODE_BLOCK.sub("", text))
    return [link for link in links if not resolves(link)]


@pytest.mark.parametrize("path", [*ALL_PAGES, *DECISIONS], ids=lambda path: path.name)
def test_every_relative_link_and_anchor_resolves(path: Path) -> None:
    assert broken_links(path, path.read_text()) == []


def test_a_link_without_a_target_is_detected() -> None:
    text = """# A `title`, with marks

## Twice

## Twice

[a](#a-title-with-marks) [b](#twice-1) [c](reference/commands.md#commands) [d](decisions/0001-source-roots.md) [e](https://host/x)
[f](#twice-2) [g](nowhere.md) [h](reference/commands.md#nowhere)
"""
    assert broken_links(ROOT / "docs" / "new.md", text) == ["#twice-2", "nowhere.md", "reference/commands.md#nowhere"]


def test_the_front_page_of_the_docs_links_every_page() -> None:
    front = ROOT / "docs/index.md"
    linked = re.findall(r"\]\(([^)#:]+)", front.read_text())
    assert {str(path.relative_to(front.parent)) for path in DOCS} - {*linked, front.name} == set()


def test_the_navigation_of_the_site_has_every_page() -> None:
    named = set(re.findall(r'"([\w/-]+\.md)"', (ROOT / "docs/zensical.toml").read_text()))
    assert {str(path.relative_to(ROOT / "docs")) for path in DOCS} - named == set()


def test_the_readme_is_short_and_starts_with_a_program() -> None:
    from support.outside import python_blocks  # not above: this file is light

    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= 90 and text.count("](") <= 8
    assert lines.index("```python") < 40
    assert python_blocks(text) == python_blocks((ROOT / "docs/index.md").read_text())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_in_the_documents_exists(path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    assert {name for block in blocks for name in re.findall(r"\bfanin ([a-z]+)", block)} <= {*SUBCOMMANDS, "hello"}
    scripts = re.findall(r"\bpython ((?:benchmarks|examples|tests)/\S+\.py)", "".join(blocks))
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_the_page_of_commands_lists_every_subcommand() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert [name for name in SUBCOMMANDS if f"`fanin {name}" not in page and f"`{name}`" not in page] == []


def test_every_target_of_make_that_the_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (*tracked_pages(ROOT), *DECISIONS):
        named = set(re.findall(r"`make ([a-z-]+)", path.read_text()))
        assert sorted(named - targets) == [], path.name


def test_the_map_of_rooms_is_complete() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    map_ = text[text.index("## Find the room") : text.index("## Add an extension")]
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


def exported_names(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that the top level of a module defines, imports or lists in ``__all__``."""
    for statement in statements:
        match statement:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name for alias in aliases)
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=items) | ast.Tuple(elts=items)):
                yield from (item.value for item in items if isinstance(item, ast.Constant))
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def unresolved_imports(text: str) -> list[str]:
    """Return the imports from fanin in a text that name a module or an object that does not exist."""
    sources = {module.name: module for module in package_modules()}
    modules = module_names()
    wrong = []
    for name, imported in IMPORT.findall(text):
        known = set(exported_names(sources[name].tree().body)) if name in sources else set()
        objects = [
            re.split(r"\s+as\s+", item.strip())[0] for item in imported.strip("() \n").split(",") if item.strip()
        ]
        wrong += [f"{name}: {item}" for item in objects if item not in known and f"{name}.{item}" not in modules]
    return wrong


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_import_in_the_documents_resolves(path: Path) -> None:
    assert unresolved_imports(path.read_text()) == []


def test_an_import_of_a_name_that_does_not_exist_is_detected() -> None:
    text = """
from fanin.edge.export import App
from fanin.datacenter.checkpoints.progress import StatusLine, Progress
from fanin.simulation import (
    Scenario,
    missing as other,
)
from fanin.nowhere import something
"""
    assert unresolved_imports(text) == [
        "fanin.datacenter.checkpoints.progress: StatusLine",
        "fanin.simulation: missing",
        "fanin.nowhere: something",
    ]
