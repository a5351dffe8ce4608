"""Patterns that the source must not contain: silenced rules, catch-alls without a reason, unfinished work."""

import ast
import re
from collections.abc import Callable, Iterator

import pytest
from house.tree import Module, package_modules, tool_modules

# The patterns are joined from halves, so that this file does not match them.
LATER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
NOQA = re.compile(r"#\s*(no" + r"qa|ruff:\s*no" + r"qa|mypy:\s*ignore-errors)")
BARE_IGNORE = re.compile(r"#\s*type:\s*ig" + r"nore(?!\[)")
PATCHES = re.compile(r"\b(mock\s*\.\s*pa" + r"tch|(from|import) unit" + r"test|monkeypatch\s*\.\s*seta" + r"ttr)\b")
BROAD = ("Exception", "BaseException")
PRINTING = "fanin.commands"
GRAPH_FORMATS = ("onnx", "tflite")

Faults = Iterator[str]


def unfinished_work(module: Module) -> Faults:
    """Yield marks of unfinished work."""
    yield from _lines(module, LATER)


def silenced_rules(module: Module) -> Faults:
    """Yield comments that silence a rule."""
    yield from _lines(module, NOQA)
    yield from _lines(module, BARE_IGNORE)


def patches(module: Module) -> Faults:
    """Yield patches of fanin's own code: pass a fake as an argument instead (fanin.simulation.federation has some)."""
    yield from _lines(module, PATCHES)


def missing_docstring(module: Module) -> Faults:
    """Yield a module without a docstring. An empty ``__init__`` needs none."""
    if module.text.strip() and ast.get_docstring(module.tree()) is None:
        yield f"{module.path}: got no module docstring, expected what it is and the rule it keeps"


def broad_handlers(module: Module) -> Faults:
    """Yield handlers that catch all exceptions without a comment on their line or the next that gives the reason.

    A handler that ends by raising the same exception again needs no comment.
    """
    lines = module.text.splitlines()
    handlers = (node for node in module.nodes() if isinstance(node, ast.ExceptHandler))
    for handler in handlers:
        last = handler.body[-1]
        keeps = _is_broad(handler.type) and not (isinstance(last, ast.Raise) and last.exc is None)
        if keeps and not any("#" in line for line in lines[handler.lineno - 1 : handler.lineno + 1]):
            yield f"{module.path}:{handler.lineno}: got a handler of everything, expected a comment that says why"


def prints(module: Module) -> Faults:
    """Yield calls of ``print`` in a room that has no terminal."""
    if module.name.startswith(PRINTING):
        return
    for node in module.nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{module.path}:{node.lineno}: got print, expected a logger or a return value"


def any_types(module: Module) -> Faults:
    """Yield public signatures and fields with the type Any."""
    for node in module.nodes():
        for annotation in _public_annotations(node):
            names = {
                part.id if isinstance(part, ast.Name) else getattr(part, "attr", "") for part in ast.walk(annotation)
            }
            if "Any" in names:
                yield f"{module.path}:{annotation.lineno}: got Any, expected a type"


def format_comparisons(module: Module) -> Faults:
    """Yield comparisons with a graph format's name in fanin.edge: the format's record holds the differences."""
    comparisons = (node for node in module.nodes() if isinstance(node, ast.Compare))
    for node in comparisons if module.name.startswith("fanin.edge.") else ():
        for constant in (part for each in (node.left, *node.comparators) for part in ast.walk(each)):
            if isinstance(constant, ast.Constant) and constant.value in GRAPH_FORMATS:
                yield f"{module.path}:{node.lineno}: got a comparison with {constant.value!r}, expected a record"


def _public_annotations(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
        signature = node.args
        arguments = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs, signature.vararg, signature.kwarg]
        yield from (argument.annotation for argument in arguments if argument is not None and argument.annotation)
        if node.returns is not None:
            yield node.returns
    elif isinstance(node, ast.ClassDef):
        yield from (field.annotation for field in node.body if isinstance(field, ast.AnnAssign))


def _is_broad(kind: ast.expr | None) -> bool:
    if kind is None:
        return True
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(isinstance(each, ast.Name) and each.id in BROAD for each in kinds)


def _lines(module: Module, pattern: re.Pattern[str]) -> Faults:
    # The whole text first: most files have no match, and a search of each line takes several times as long.
    lines = module.text.splitlines() if pattern.search(module.text) else []
    for number, line in enumerate(lines, start=1):
        if match := pattern.search(line):
            yield f"{module.path}:{number}: got {match.group()!r}"


EVERYWHERE = (unfinished_work, silenced_rules, patches, missing_docstring, broad_handlers)
IN_THE_PACKAGE = (prints, any_types, format_comparisons)


@pytest.mark.parametrize("rule", EVERYWHERE)
def test_no_file_breaks_a_rule(rule: Callable[[Module], Faults]) -> None:
    assert [line for module in (*package_modules(), *tool_modules()) for line in rule(module)] == []


@pytest.mark.parametrize("rule", IN_THE_PACKAGE)
def test_no_module_of_the_package_breaks_a_rule(rule: Callable[[Module], Faults]) -> None:
    assert [line for module in package_modules() for line in rule(module)] == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (unfinished_work, "x = 1  # TO" + "DO: y"),
        (silenced_rules, "x = 1  # no" + "qa: E501"),
        (silenced_rules, "x = 1  # type: ig" + "nore"),
        (patches, "with mock" + ".patch('x'):"),
        (patches, "monkeypatch" + ".setattr(x, 'y', 1)"),
        (missing_docstring, "x = 1"),
        (broad_handlers, "try:\n    x()\nexcept Exception:\n    pass"),
        (broad_handlers, "try:\n    x()\nexcept:\n    pass"),
        (broad_handlers, "try:\n    x()\nexcept (ValueError, BaseException):\n    pass"),
        (prints, "print(1)"),
        (any_types, "def f(x: Any): ..."),
        (any_types, "async def f() -> dict[str, typing.Any]: ..."),
        (any_types, "class C:\n    x: list[Any]"),
    ],
)
def test_each_rule_detects_its_case(rule: Callable[[Module], Faults], text: str) -> None:
    assert len(list(rule(Module(path="x.py", name="fanin.server.x", text=text)))) == 1


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (silenced_rules, "x = 1  # type: ig" + "nore[arg-type]"),
        (missing_docstring, ""),
        (broad_handlers, "try:\n    x()\nexcept Exception:  # why\n    pass"),
        (broad_handlers, "try:\n    x()\nexcept BaseException:\n    # why\n    pass"),
        (broad_handlers, "try:\n    x()\nexcept BaseException:\n    y()\n    raise"),
        (broad_handlers, "try:\n    x()\nexcept ValueError:\n    pass"),
        (any_types, "def _f(x: Any): ..."),
    ],
)
def test_each_rule_accepts_the_rest(rule: Callable[[Module], Faults], text: str) -> None:
    assert list(rule(Module(path="x.py", name="fanin.server.x", text=text))) == []


@pytest.mark.parametrize(("name", "number"), [("fanin.edge.x", 2), ("fanin.clients.x", 0)])
def test_a_comparison_with_the_name_of_a_graph_format_is_detected(name: str, number: int) -> None:
    text = "x == 'onnx'\ny in ('tflite',)\nz = {'onnx': 1}"
    assert len(list(format_comparisons(Module(path="x.py", name=name, text=text)))) == number
