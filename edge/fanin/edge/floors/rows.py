"""A privacy floor as a table of JSON or TOML: its keys are those of ``PrivacyFloor``, each of which may be missing."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Final

from fanin.edge.floors.floor import PrivacyFloor, demands_text, floor_keys
from fanin.protos.errors import InvalidInput
from fanin.protos.plans.entries import as_float
from fanin.protos.plans.keys import shown

WRONG_KEY: Final = "FN-1701"


def floor_row(floor: PrivacyFloor) -> dict[str, object]:
    """Return the table of a floor: the keys that demand something."""
    return floor.values()


def floor_text(floor: PrivacyFloor) -> str:
    """Return the keys that demand something on one line; "none" without any."""
    return demands_text(floor.values()) or "none"


def parse_floor(row: object, where: str) -> PrivacyFloor:
    """Return the floor of a table.

    Args:
        row: The table.
        where: Its place, for errors.

    Raises:
        InvalidInput: The message has one line of text for each wrong key.
    """
    if not isinstance(row, Mapping):
        raise InvalidInput(f"{where}: got {shown(row)}, expected a table of keys", code=WRONG_KEY)
    values: dict[str, Any] = {str(name): _value(str(name), value) for name, value in row.items()}
    if faults := list(_faults(values)):
        raise InvalidInput("; ".join(f"{where}.{fault}" for fault in faults), code=WRONG_KEY)
    try:
        return PrivacyFloor(**values)
    except InvalidInput as exc:
        raise InvalidInput(f"{where}.{exc}", code=exc.code) from exc


def _value(name: str, value: object) -> object:
    kinds = {key.name: key.type for key in floor_keys()}
    return as_float(value) if kinds.get(name) is float else value


def _faults(values: Mapping[str, object]) -> Iterator[str]:
    keys = {key.name: key for key in floor_keys()}
    for name, value in values.items():
        key = keys.get(name)
        if key is None:
            near = get_close_matches(name, keys, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{name}: got an unknown key, expected one of {', '.join(keys)}{hint}"
        elif type(value) is not key.type or not key.accepts(value):
            yield f"{name}: got {shown(value)}, expected {key.expected}"
