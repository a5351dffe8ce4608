"""Tests, examples and benchmarks import existing names. A benchmark runs too seldom to detect a missing one."""

import ast

from house.tree import GENERATED, Module, module_names, package_modules, tool_modules


def defined_names(module: Module) -> set[str]:
    """Return the names that a module defines: at its top level, and in the blocks that run there."""
    names = set()
    for node in module.nodes():
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name=name, asname=asname):
                names.add(asname or name.partition(".")[0])
    return names


def missing_names(tools: tuple[Module, ...], package: tuple[Module, ...], known: frozenset[str]) -> list[str]:
    """Return the names that tools import from fanin's modules and that do not exist."""
    names = {module.name: defined_names(module) for module in package}
    faults = []
    for tool in tools:
        for node in tool.nodes():
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("fanin."):
                continue
            where = str(node.module)
            faults += [
                f"{tool.path}:{node.lineno}: {where} has no {alias.name}"
                for alias in node.names
                if GENERATED not in where + alias.name
                and alias.name not in names.get(where, ())
                and f"{where}.{alias.name}" not in known
            ]
    return faults


def test_every_import_of_the_tools_from_the_package_exists() -> None:
    assert missing_names(tool_modules(), package_modules(), module_names()) == []


def test_a_missing_name_is_detected() -> None:
    package = (Module(path="a.py", name="fanin.a", text="from b import c\nX: int = 1\ndef f() -> None: ...\n"),)
    text = "from fanin.a import X, c, f\nfrom fanin.a import gone\nfrom fanin import a\nfrom fanin.d import e\n"
    tool = Module(path="t.py", name="", text=text)
    assert missing_names((tool,), package, frozenset()) == ["t.py:2: fanin.a has no gone", "t.py:4: fanin.d has no e"]
