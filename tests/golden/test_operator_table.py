"""The table of operators in docs/operators.md is what exports say."""

import pytest
from golden.operator_table import ALL, FORMATS, PAGE, rows_of, state

COMMAND = "python tests/golden/operator_table.py"
IN_CI = ("hypot", "argmax", "cumsum")
ROWS = rows_of(PAGE.read_text())


def test_the_page_has_a_row_for_each_operator() -> None:
    assert list(ROWS) == list(ALL), f"run {COMMAND}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.nightly) for name in ALL]
)
def test_a_row_says_what_can_be_exported(name: str) -> None:
    # CI exports to ONNX alone, which takes less time.
    formats = FORMATS[:1] if name in IN_CI else FORMATS
    found = tuple(state(name, graph_format) for graph_format in formats)
    assert found == ROWS[name][: len(formats)], f"run {COMMAND}, or repair the export of {name}"
