"""Selection of a test's cases for CI and for the nightly suite."""

from collections.abc import Collection, Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def in_ci(cases: Iterable[Case], ci_cases: Collection[Case]) -> list[object]:
    """Return parameters of a test: the cases in ``ci_cases`` run in CI, and all others are marked nightly."""
    cases = list(cases)
    assert set(ci_cases) <= set(cases), f"ci_cases: got {set(ci_cases) - set(cases)}, expected names of cases"
    return [case if case in ci_cases else pytest.param(case, marks=pytest.mark.nightly) for case in cases]
