"""The table of operators in docs/howto/operators.md agrees with exports."""

from collections.abc import Sequence
from typing import Final

import pytest
from golden.operator_table import ALL, FORMATS, PAGE, TRAINS, rows_of, state, train_together

COMMAND: Final = "PYTHONPATH=tests python tests/golden/operator_table.py"
IN_CI: Final = ("hypot", "argmax", "cumsum")
ROWS: Final = rows_of(PAGE.read_text())
TOGETHER: Final = 4
"""Number of operators in one export. An export takes seconds even for a small module."""
TRAINED: Final = [name for name, states in ROWS.items() if name in ALL and set(states) == {TRAINS}]
OTHERS: Final = [name for name in ALL if name not in TRAINED]


def test_the_page_has_a_row_for_each_operator() -> None:
    assert list(ROWS) == list(ALL), f"run {COMMAND}"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "names",
    [TRAINED[start : start + TOGETHER] for start in range(0, len(TRAINED), TOGETHER)],
    ids=lambda names: names[0],
)
def test_operators_that_train_in_all_formats_are_exported(names: Sequence[str]) -> None:
    train_together(names, FORMATS)


# CI exports to ONNX only, which takes less time.
@pytest.mark.parametrize("name", IN_CI)
def test_a_row_agrees_with_an_export_to_onnx(name: str) -> None:
    assert state(name, FORMATS[0]) == ROWS[name][0], f"run {COMMAND}, or repair the export of {name}"


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_a_row_agrees_with_exports_to_all_formats(name: str) -> None:
    states = tuple(state(name, graph_format) for graph_format in FORMATS)
    assert states == ROWS[name], f"run {COMMAND}, or repair the export of {name}"
