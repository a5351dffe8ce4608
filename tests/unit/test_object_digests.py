"""The digest of an object: code and values count, and names of files, comments and the process do not."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
from support.coded import HELPERS, MODULE, value_of

from fanin.simulation.studies.digests import digest_of


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x * SCALE", "x + SCALE"),
        ("SCALE = 2.0", "SCALE = 2.5"),
        ("width = 3", "width = 4"),
        ('"b": frozenset({"x", ', '"b": frozenset({'),
        ("math.sqrt", "math.exp"),
        ("else x", "else -x"),
        ("weight * (output", "weight + (output"),
        ("loss_of(4.0)", "loss_of(4.5)"),
        ("margin=0.5", "margin=0.25"),
        ("helper, x=1", "helper, x=2"),
        ("self.me = self", "self.me = None"),
    ],
)
def test_code_and_values_count(before: str, after: str) -> None:
    assert before in MODULE
    assert digest_of(value_of(MODULE.replace(before, after))) != digest_of(value_of(MODULE))


def test_code_of_a_module_that_a_function_reads_counts() -> None:
    assert digest_of(value_of(MODULE, HELPERS.replace("+ 1", "+ 2"))) != digest_of(value_of(MODULE))


def test_comments_lines_and_functions_that_are_not_read_do_not_count() -> None:
    text = "# A comment.\n\nROUNDS = 100\n\ndef other():\n    return ROUNDS\n" + MODULE
    assert digest_of(value_of(text)) == digest_of(value_of(MODULE))


def test_arrays_count_by_type_shape_and_values() -> None:
    arrays = [np.zeros(4, np.float32), np.zeros(4, np.int32), np.zeros((2, 2), np.float32), np.ones(4, np.float32)]
    digests = [digest_of({"x": array}) for array in arrays]
    assert len(set(digests)) == len(digests)
    shared = np.zeros(4, np.float32)
    assert digest_of([shared, shared]) == digest_of([arrays[0], arrays[0].copy()])


def test_a_decorated_function_counts() -> None:
    def decorated(number: int) -> Callable[[], int]:
        return functools.lru_cache(lambda: number)

    assert digest_of(decorated(1)) == digest_of(decorated(1)) != digest_of(decorated(2))
