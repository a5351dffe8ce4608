"""Every supported layer as a train graph in every runtime, against eager torch: autograd and ``optim.SGD``."""

from functools import cache

import numpy as np
import pytest
from support.layer_parity import Course
from support.layers import CASES
from support.nightly import in_ci

TOLERANCE = 1e-5
FORMATS = in_ci(("onnx", "tflite"), ("onnx",))
"""TFLite's converter takes seconds a case. The graphs run in both TFLite runtimes."""


@cache
def course_of(case: str) -> Course:
    """Return the case, which eager torch has trained once."""
    return Course(case)


@pytest.mark.parametrize("case", in_ci(CASES, ("attention",)))
@pytest.mark.parametrize("graph_format", FORMATS)
def test_twenty_steps_end_where_eager_torch_ends(graph_format: str, case: str) -> None:
    course = course_of(case)
    errors = course.errors(graph_format)
    failures = {
        f"{runtime}: {name}": f"{error:.1e}"
        for runtime, differences in errors.items()
        for name, error in differences.items()
        if not error <= TOLERANCE
    }
    assert not failures
    movements = [np.abs(course.expected[name] - value).max() for name, value in course.initial.items()]
    assert np.median(movements) > 1e-3
