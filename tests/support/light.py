"""Light test files: their imports reach no heavy library, process or coordinator.

``make quick`` runs only the light files. A file is light if no top-level import of it, or of any module that it
imports, is in ``HEAVY``. Imports inside functions, and under a top-level ``if`` or ``try``, do not count.
``test_light`` collects the light files to check that none of them loads a heavy library.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
TESTS: Final = ROOT / "tests"
PATH: Final = tuple(ROOT / name for name in ("tests", "server", "clients", "edge", "datacenter", "protos"))
"""Search path of this project's modules, in this order."""

LIBRARIES: Final = frozenset(
    ("ai_edge_litert", "litert_torch", "onnx", "onnxruntime", "onnxscript", "tflite_runtime", "torch", "transformers")
)
"""Libraries whose import takes a second or more, or that only a device has."""

HEAVY: Final = LIBRARIES | {"multiprocessing", "sqlalchemy", "subprocess", "support.processes"}
"""Imports that make a file heavy: such a library, a child process, or a coordinator with its database."""


def is_light(path: Path) -> bool:
    """Return whether a test file and all its imports are free of ``HEAVY``."""
    return not any(_heavy(path))


def heavy_imports(path: Path) -> frozenset[str]:
    """Return the names in ``HEAVY`` that an import of the file at ``path`` loads."""
    return frozenset(_heavy(path))


def _heavy(path: Path) -> Iterator[str]:
    """Yield the names in ``HEAVY`` in the order of the search. A name may occur several times."""
    pending, visited = [path], {path}
    while pending:
        for name in _imports(pending.pop()):
            yield from {name, name.partition(".")[0]} & HEAVY
            files = set(_files(name)) - visited
            visited |= files
            pending += files


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """Return the dotted names that a module's top level imports; ``from a import b`` gives ``a`` and ``a.b``."""
    return tuple(_names(ast.parse(path.read_text())))


def _names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)


@cache
def _files(name: str) -> tuple[Path, ...]:
    """Return the project's files that an import of ``name`` runs: packages, the module, and a lazy name's owner."""
    parent, _, leaf = name.rpartition(".")
    stems = [root.joinpath(*name.split(".")) for root in PATH]
    candidates = (path for stem in stems for path in (stem.with_suffix(".py"), stem / "__init__.py"))
    packages = _files(parent) if parent else ()
    owners = (
        path
        for package in packages
        if package.name == "__init__.py" and leaf in (lazy := _lazy_names(package))
        for path in _files(lazy[leaf])
    )
    return (*packages, *(path for path in candidates if path.is_file()), *owners)


@cache
def _lazy_names(package: Path) -> Mapping[str, str]:
    """Return the module of each lazy name of a package, which lists them under ``if TYPE_CHECKING``."""
    return {
        row.name: node.module
        for block in ast.parse(package.read_text()).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for row in node.names
    }
