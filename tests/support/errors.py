"""Asserting on the one sentence that an error carries."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raises(kind: type[Exception], text: str) -> Iterator[None]:
    """Exactly this class with exactly this text."""
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    assert str(caught.value) == text
