"""Text files are UTF-8 in every locale: each call that reads or writes one names the encoding."""

import ast
from collections.abc import Iterable

from house.tree import Module, package_modules

NUM_ARGUMENTS = {"read_text": 0, "write_text": 1}
"""The positional arguments before the encoding."""


def without_encoding(modules: Iterable[Module]) -> list[str]:
    """Return the places of calls that depend on the locale."""
    return [
        f"{module.path}:{node.lineno}"
        for module in modules
        for node in module.nodes()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in NUM_ARGUMENTS
        and len(node.args) <= NUM_ARGUMENTS[node.func.attr]
        and not any(word.arg == "encoding" for word in node.keywords)
    ]


def test_each_text_file_has_an_encoding() -> None:
    assert without_encoding(package_modules()) == []


def test_a_call_without_an_encoding_is_detected() -> None:
    text = "path.read_text()\npath.read_text('utf-8')\npath.write_text(text, encoding='utf-8')\npath.write_text(text)\n"
    assert without_encoding([Module(path="x.py", name="x", text=text)]) == ["x.py:1", "x.py:4"]
