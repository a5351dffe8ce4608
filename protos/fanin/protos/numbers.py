"""Numbers among values of any type.

Dataclasses check no types. Without a check, a text in place of a number fails in a comparison. Its error names neither
the field nor the value.
"""

from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or a float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def are_numbers(*values: object) -> bool:
    """Return whether all values are numbers (``is_number``)."""
    return all(map(is_number, values))
