"""The source tree on disk and in pyproject.toml: the facts that the house tests check.

A check accepts a text or a tree and returns its faults, so that a test can also pass it a faulty one.
"""

import ast
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
SOURCE_ROOTS: Final = ("server", "clients", "edge", "datacenter", "protos")
CONSTRAINTS: Final = ROOT / ".ci/constraints.txt"
TOOLS: Final = ("tests", "examples", "benchmarks")
GENERATED: Final = "_pb2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One Python file of the project: its path, its dotted name ("" outside the package) and its text."""

    path: str
    name: str
    text: str

    def tree(self) -> ast.Module:
        """Return the syntax tree."""
        return _parsed(self.text, self.path)

    def nodes(self) -> tuple[ast.AST, ...]:
        """Return all nodes of the syntax tree, in the order of ``ast.walk``."""
        return _nodes(self.text, self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """One import contract: its id, and every module or library that it names."""

    id: str
    names: frozenset[str]
    sources: tuple[str, ...]


@cache
def _parsed(text: str, path: str) -> ast.Module:
    """Parse a file. The result is cached for all rules, and no rule changes the tree."""
    return ast.parse(text, path)


@cache
def _nodes(text: str, path: str) -> tuple[ast.AST, ...]:
    """Walk a tree. The result is cached like the tree, because a walk over all files takes half a second."""
    return tuple(ast.walk(_parsed(text, path)))


@cache
def package_modules() -> tuple[Module, ...]:
    """Return the modules in the wheel, without generated code."""
    return tuple(module for root in SOURCE_ROOTS for module in _modules(root, ROOT / root))


@cache
def tool_modules() -> tuple[Module, ...]:
    """Return the modules of tests, examples and benchmarks."""
    return tuple(module for folder in TOOLS for module in _modules(folder, None))


def module_names() -> frozenset[str]:
    """Return the names of all importable modules and packages of fanin, including generated code."""
    names = set()
    for root in SOURCE_ROOTS:
        for path in sorted((ROOT / root).rglob("*.py")):
            names.add(_dotted(path.relative_to(ROOT / root)))
    return frozenset(names)


def portions() -> Mapping[str, Path]:
    """Return the portions of the namespace: the dotted name and the folder of each package directly under ``fanin``."""
    return {
        f"fanin.{folder.name}": folder
        for root in SOURCE_ROOTS
        for folder in sorted((ROOT / root / "fanin").iterdir())
        if folder.is_dir() and folder.name != "__pycache__"
    }


def root_packages() -> tuple[str, ...]:
    """Return the packages that the import contracts cover."""
    return tuple(_pyproject()["tool"]["importlinter"]["root_packages"])


def typed_packages() -> tuple[str, ...]:
    """Return the packages that mypy checks."""
    return tuple(_pyproject()["tool"]["mypy"]["packages"])


def contracts() -> tuple[Contract, ...]:
    """Return the import contracts."""
    return tuple(
        Contract(
            id=table["id"],
            names=frozenset(_names_in(table)),
            sources=tuple(table.get("source_modules", ())),
        )
        for table in _pyproject()["tool"]["importlinter"]["contracts"]
    )


def exceptions_in_contracts() -> tuple[str, ...]:
    """Return the ids of contracts with exceptions."""
    return tuple(
        table["id"] for table in _pyproject()["tool"]["importlinter"]["contracts"] if "ignore_imports" in table
    )


def requirements() -> Mapping[str, tuple[str, ...]]:
    """Return the requirements of each extra; the core requirements are under ""."""
    project = _pyproject()["project"]
    extras = {name: tuple(needs) for name, needs in project["optional-dependencies"].items()}
    return {"": tuple(project["dependencies"]), **extras}


def tracked_names(folder: Path) -> frozenset[str]:
    """Return the names of the entries of a folder that git tracks. An editor's folder or a note is nobody's concern."""
    import subprocess  # not above: the files that import this module are light

    command = ["git", "-C", str(folder), "ls-files", "-z"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {path.partition("/")[0] for path in listing.split("\0") if path}
    return frozenset(name for name in names if (folder / name).exists())


def tracked_pages(folder: Path) -> list[Path]:
    """Return the tracked Markdown pages of a folder."""
    return [folder / name for name in sorted(tracked_names(folder)) if name.endswith(".md")]


def _pyproject() -> Mapping[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _names_in(table: Mapping[str, Any]) -> Iterator[str]:
    for key in ("layers", "modules", "protected_modules", "allowed_importers", "source_modules", "forbidden_modules"):
        for entry in table.get(key, ()):
            # A layer may contain siblings.
            yield from (name.strip() for name in entry.split("|"))


def _modules(folder: str, base: Path | None) -> Iterator[Module]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        if GENERATED not in path.name:
            name = _dotted(path.relative_to(base)) if base else ""
            yield Module(path=str(path.relative_to(ROOT)), name=name, text=path.read_text())


def _dotted(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
