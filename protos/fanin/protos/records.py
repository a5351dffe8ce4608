"""The check of records that other packages create: an engine, a runtime, a family."""

import reprlib

from fanin.protos.errors import InvalidInput


def check_part(what: str, part: str, value: object, is_right: bool, expected: str) -> None:
    """Raise InvalidInput for a wrong part of a record.

    Args:
        what: The record.
        part: Name of the part.
        value: The part.
        is_right: Whether it is valid.
        expected: The expected value, in words.
    """
    if not is_right:
        raise InvalidInput(f"{what}: {part}: got {reprlib.repr(value)}, expected {expected}", code="FN-0165")


def are_all(rows: object, collection: type, kind: type) -> bool:
    """Return whether ``rows`` is a collection of this type and all its elements are of ``kind``."""
    return isinstance(rows, collection) and all(isinstance(row, kind) for row in rows)  # type: ignore[attr-defined]


def is_word(text: object) -> bool:
    """Return whether ``text`` is a text of at least one character, without spaces."""
    return isinstance(text, str) and text != "" and not any(letter.isspace() for letter in text)
