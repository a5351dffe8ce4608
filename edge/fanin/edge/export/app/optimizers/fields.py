"""The types of the fields of an App, its Recipe and its optimizer, checked when they are created.

A value of another type would fail later, in a comparison or a loop, with a text that names neither the field nor the
value. Or it would be accepted by mistake: each text but the empty one counts as True.
"""

import operator
from collections.abc import Sequence
from typing import TypeGuard

from fanin.protos.errors import UnsupportedModel


def integer(what: str, value: object) -> int:
    """Return a number as an int: those of numpy and torch are accepted. Raises UnsupportedModel."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]  # a TypeError otherwise
    except TypeError:
        pass
    raise UnsupportedModel(f"{what}: got {value!r}, expected an int")


def check_switch(what: str, value: object) -> None:
    """Raise UnsupportedModel unless a value is True or False."""
    if not isinstance(value, bool):
        raise UnsupportedModel(f"{what}: got {value!r}, expected True or False")


def are_names(value: object) -> TypeGuard[Sequence[str]]:
    """Return whether a value is a list or another sequence of texts, and no text itself."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return False
    return all(isinstance(name, str) for name in value)
