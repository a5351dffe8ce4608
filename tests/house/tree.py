"""What stands in the source tree, as it is on disk and as pyproject.toml says: the facts that the house tests judge.

A test here takes a text or a tree and returns what is wrong with it, so that it can also be shown something wrong.
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
    """One Python file of ours: where it is, its dotted name ("" outside the package) and its text."""

    path: str
    name: str
    text: str

    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return _parsed(self.text, self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """One import contract: its id, and every module or library that it names."""

    id: str
    names: frozenset[str]
    sources: tuple[str, ...]


@cache
def _parsed(text: str, path: str) -> ast.Module:
    """Parse a file once for all rules: no rule changes the tree."""
    return ast.parse(text, path)


@cache
def package_modules() -> tuple[Module, ...]:
    """The modules that the wheel carries, generated code left out."""
    return tuple(module for root in SOURCE_ROOTS for module in _modules(root, ROOT / root))


@cache
def tool_modules() -> tuple[Module, ...]:
    """Tests, examples and benchmarks."""
    return tuple(module for folder in TOOLS for module in _modules(folder, None))


def module_names() -> frozenset[str]:
    """Every module and package of ours that can be imported, generated code among them."""
    names = set()
    for root in SOURCE_ROOTS:
        for path in sorted((ROOT / root).rglob("*.py")):
            names.add(_dotted(path.relative_to(ROOT / root)))
    return frozenset(names)


def portions() -> Mapping[str, Path]:
    """The namespace's portions on disk: the dotted name and the folder of each package directly under ``fanin``."""
    return {
        f"fanin.{folder.name}": folder
        for root in SOURCE_ROOTS
        for folder in sorted((ROOT / root / "fanin").iterdir())
        if folder.is_dir() and folder.name != "__pycache__"
    }


def root_packages() -> tuple[str, ...]:
    """The packages that the import contracts look at."""
    return tuple(_pyproject()["tool"]["importlinter"]["root_packages"])


def typed_packages() -> tuple[str, ...]:
    """The packages that mypy looks at."""
    return tuple(_pyproject()["tool"]["mypy"]["packages"])


def contracts() -> tuple[Contract, ...]:
    """The import contracts."""
    return tuple(
        Contract(
            id=table["id"],
            names=frozenset(_names_in(table)),
            sources=tuple(table.get("source_modules", ())),
        )
        for table in _pyproject()["tool"]["importlinter"]["contracts"]
    )


def exceptions_in_contracts() -> tuple[str, ...]:
    """The ids of contracts that let something through."""
    return tuple(
        table["id"] for table in _pyproject()["tool"]["importlinter"]["contracts"] if "ignore_imports" in table
    )


def requirements() -> Mapping[str, tuple[str, ...]]:
    """What each extra requires; the core is under ""."""
    project = _pyproject()["project"]
    extras = {name: tuple(needs) for name, needs in project["optional-dependencies"].items()}
    return {"": tuple(project["dependencies"]), **extras}


def ignored_names() -> tuple[str, ...]:
    """The patterns of .gitignore, without their slashes."""
    return tuple(line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line)


def _pyproject() -> Mapping[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _names_in(table: Mapping[str, Any]) -> Iterator[str]:
    for key in ("layers", "modules", "protected_modules", "allowed_importers", "source_modules", "forbidden_modules"):
        for entry in table.get(key, ()):
            # A layer may hold siblings.
            yield from (name.strip() for name in entry.split("|"))


def _modules(folder: str, base: Path | None) -> Iterator[Module]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        if GENERATED not in path.name:
            name = _dotted(path.relative_to(base)) if base else ""
            yield Module(path=str(path.relative_to(ROOT)), name=name, text=path.read_text())


def _dotted(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
