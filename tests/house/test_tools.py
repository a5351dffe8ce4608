"""Tests, examples and benchmarks import existing names. A benchmark runs too seldom to detect a missing one."""

import ast

from house.tree import GENERATED, Module, module_names, package_modules, tool_modules


def defined(module: Module) -> set[str]:
    """Return the names that a module defines: at its top level, and in the blocks that run there."""
    found = set()
    for node in ast.walk(module.tree()):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=asname):
                found.add(asname or name.partition(".")[0])
    return found


def missing(tools: tuple[Module, ...], package: tuple[Module, ...], known: frozenset[str]) -> list[str]:
    """Return the names that tools import from fanin's modules and that do not exist."""
    names = {module.name: defined(module) for module in package}
    found = []
    for tool in tools:
        for node in ast.walk(tool.tree()):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("fanin."):
                continue
            where = str(node.module)
            found += [
                f"{tool.path}:{node.lineno}: {where} has no {alias.name}"
                for alias in node.names
                if GENERATED not in where + alias.name
                and alias.name not in names.get(where, ())
                and f"{where}.{alias.name}" not in known
            ]
    return found


def test_what_tools_import_from_the_package_is_there() -> None:
    assert missing(tool_modules(), package_modules(), module_names()) == []


def test_what_is_not_there_is_found() -> None:
    package = (Module(path="a.py", name="fanin.a", text="from b import c\nX: int = 1\ndef f() -> None: ...\n"),)
    text = "from fanin.a import X, c, f\nfrom fanin.a import gone\nfrom fanin import a\nfrom fanin.d import e\n"
    tool = Module(path="t.py", name="", text=text)
    assert missing((tool,), package, frozenset()) == ["t.py:2: fanin.a has no gone", "t.py:4: fanin.d has no e"]
