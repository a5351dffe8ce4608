"""Selection of a test's cases for CI and for the nightly suite."""

from collections.abc import Collection, Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def nightly_but(cases: Iterable[Case], kept: Collection[Case]) -> list[object]:
    """Return parameters of a test: the cases in ``kept`` run in CI, and all others are marked nightly."""
    cases = list(cases)
    assert set(kept) <= set(cases), f"kept: got {set(kept) - set(cases)}, expected names of cases"
    return [case if case in kept else pytest.param(case, marks=pytest.mark.nightly) for case in cases]
