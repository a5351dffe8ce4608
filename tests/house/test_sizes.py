"""Limits on the size of files, functions and parameter lists."""

import ast
from collections.abc import Iterator

import pytest
from house.tree import Module, package_modules, tool_modules

MAX_FILE_LINES = 400
MAX_BODY_LINES = 60
MAX_PARAMETERS = 5
OPERATOR_FORMS = (
    "fanin.edge.export.graph.decompositions.",
    "fanin.edge.export.module.adapters",
    "fanin.edge.export.module.plain.",
    "fanin.edge.export.graph.attention",
)
"""Public functions here replace operators or layers of torch, so torch determines their number of parameters."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(module: Module) -> Iterator[tuple[str, Function]]:
    """Yield each function of a module with its place for the error message."""
    for node in module.nodes():
        if isinstance(node, Function):
            yield f"{module.path}:{node.lineno} {node.name}", node


def body_lines(function: Function) -> int:
    """Return the number of lines from the first statement after the docstring to the last; 0 for a docstring alone."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or body[-1].lineno) - body[0].lineno + 1 if body else 0


def parameters(function: Function) -> int:
    """Return the number of parameters, without ``self``, ``cls`` and a command's flags, which only typer passes."""
    arguments = function.args
    members = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    members += [star for star in (arguments.vararg, arguments.kwarg) if star is not None]
    return sum(argument.arg not in ("self", "cls") and not is_flag(argument) for argument in members)


def is_flag(argument: ast.arg) -> bool:
    """Return whether an annotation declares a flag: ``Annotated[..., typer.Option(...)]`` or a shared name for one."""
    text = "" if argument.annotation is None else ast.unparse(argument.annotation)
    return "typer." in text or text.endswith(("Option", "Argument"))


def is_operator_form(module: Module, function: Function) -> bool:
    """Return whether a function replaces one of torch's. Tests of the forms compare the signatures."""
    is_public = not function.name.startswith("_") or function.name == "__call__"
    return module.name.startswith(OPERATOR_FORMS) and is_public


def long_files(modules: tuple[Module, ...]) -> list[str]:
    sizes = ((module.path, len(module.text.splitlines())) for module in modules)
    return [
        f"{path}: got {lines} lines, expected {MAX_FILE_LINES} or fewer"
        for path, lines in sizes
        if lines > MAX_FILE_LINES
    ]


def long_functions(modules: tuple[Module, ...]) -> list[str]:
    sizes = ((place, body_lines(each)) for module in modules for place, each in functions(module))
    return [
        f"{place}: got {size} lines, expected {MAX_BODY_LINES} or fewer"
        for place, size in sizes
        if size > MAX_BODY_LINES
    ]


def wide_functions(modules: tuple[Module, ...]) -> list[str]:
    counts = (
        (place, parameters(each))
        for module in modules
        for place, each in functions(module)
        if not is_operator_form(module, each)
    )
    return [
        f"{place}: got {count} parameters, expected {MAX_PARAMETERS}"
        for place, count in counts
        if count > MAX_PARAMETERS
    ]


def test_files_are_short() -> None:
    assert long_files((*package_modules(), *tool_modules())) == []


def test_functions_are_short() -> None:
    assert long_functions(package_modules()) == []


def test_functions_take_few_parameters() -> None:
    assert wide_functions(package_modules()) == []


def function_of(lines: int, signature: str = "self") -> tuple[Module, ...]:
    body = "".join(f"    x{number} = {number}\n" for number in range(lines))
    return (Module(path="x.py", name="x", text=f'def f({signature}):\n    """Not counted."""\n{body}'),)


@pytest.mark.parametrize(("lines", "number"), [(0, 0), (MAX_BODY_LINES, 0), (MAX_BODY_LINES + 1, 1)])
def test_a_long_function_is_detected(lines: int, number: int) -> None:
    assert len(long_functions(function_of(lines))) == number


FLAGS = ", ".join(f"{name}: Annotated[int, typer.Option('--{name}')]" for name in "abcdef")


@pytest.mark.parametrize(
    ("signature", "number"),
    [("self, a, b, /, c, *, d, e", 0), ("a, *b, c, d, e, **f", 1), ("cls, a, b, c, d, e", 0), (FLAGS, 0)],
)
def test_a_wide_function_is_detected(signature: str, number: int) -> None:
    assert len(wide_functions(function_of(1, signature))) == number


@pytest.mark.parametrize(("lines", "number"), [(MAX_FILE_LINES, 0), (MAX_FILE_LINES + 1, 1)])
def test_a_long_file_is_detected(lines: int, number: int) -> None:
    assert len(long_files((Module(path="x.py", name="x", text="#\n" * lines),))) == number
