"""Assertions on the text of an error."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raises(kind: type[Exception], text: str) -> Iterator[None]:
    """Check that the block raises exactly this class with exactly this text."""
    with pytest.raises(kind) as excinfo:
        yield
    assert type(excinfo.value) is kind
    assert str(excinfo.value) == text
