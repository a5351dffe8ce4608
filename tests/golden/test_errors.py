"""Each error has a code with an entry. docs/reference/errors.md and errors.txt equal the output of their generator."""

import ast
import re
from typing import Final

from golden.errors import PAGE, TEXTS, code_of, errors_in, literal_code, page, texts
from house.tree import Module, package_modules

from fanin.protos import codes

COMMAND: Final = "python tests/golden/errors.py"


def test_the_page_equals_the_entries() -> None:
    assert PAGE.read_text() == page(), f"run {COMMAND}"


def test_the_texts_equal_the_source() -> None:
    assert TEXTS.read_text() == texts(), f"run {COMMAND} and read what changes"


def test_each_error_has_a_code() -> None:
    assert [place for module in package_modules() for place in uncoded(module)] == []


def test_the_check_finds_an_error_without_a_code() -> None:
    module = Module(path="x.py", name="x", text='raise InvalidInput("a")\nraise InvalidPlan("b", code="FN-0001")\n')
    assert uncoded(module) == ["x.py:1"]


def uncoded(module: Module) -> list[str]:
    """Return the places of errors that would get the code of their class."""
    return [f"{module.path}:{call.lineno}" for call, _ in errors_in(module) if code_of(call) is None]


def test_each_code_in_the_source_has_an_entry_and_the_reverse() -> None:
    used = {code for module in package_modules() for code in re.findall(r'"(FN-[0-9]{4})"', module.text)}
    assert used == set(codes.entries())


def test_a_code_is_a_literal_or_that_of_another_error() -> None:
    given = [(module.path, code_of(call)) for module in package_modules() for call, _ in errors_in(module)]
    odd = [
        (path, ast.unparse(code))
        for path, code in given
        if not isinstance(code, ast.Constant | ast.Attribute | ast.Name | ast.Call)
    ]
    assert odd == []
    assert all(
        re.fullmatch(r"FN-\d{4}", literal_code(call) or "FN-0000")
        for m in package_modules()
        for call, _ in errors_in(m)
    )


def test_entries_are_sorted_and_no_two_are_alike() -> None:
    assert list(codes.entries()) == sorted(codes.entries())
    meanings = [entry.meaning for entry in codes.entries().values()]
    assert len(meanings) == len(set(meanings))
