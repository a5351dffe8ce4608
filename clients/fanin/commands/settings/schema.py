"""The keys of ``fanin.toml`` as a JSON schema: editors complete and check the file with it."""

from collections.abc import Iterable, Mapping
from typing import Final

import click

from fanin.commands.settings.keys import ConfigKey

DRAFT: Final = "http://json-schema.org/draft-07/schema#"
TYPES: Final[Mapping[type, str]] = {bool: "boolean", int: "integer", float: "number", str: "string"}


def schema_of(keys: Iterable[ConfigKey]) -> dict[str, object]:
    """Return the JSON schema of a file with these keys."""
    tables: dict[str, dict[str, object]] = {}
    for key in keys:
        tables.setdefault(key.table, {})[key.name] = _of_key(key)
    return {
        "$schema": DRAFT,
        "title": "fanin.toml",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            name: {"type": "object", "additionalProperties": False, "properties": rows} for name, rows in tables.items()
        },
    }


def _of_key(key: ConfigKey) -> dict[str, object]:
    row: dict[str, object] = {"description": (key.option.help or "").strip()}
    default = key.plain_default()
    if default is not None:
        row["default"] = default
    if key.is_named_paths:
        return row | {"type": "object", "additionalProperties": {"type": "string"}}
    item: dict[str, object] = {"type": TYPES[key.kind]}
    match key.option.type:
        case click.Choice(choices=choices):
            item["enum"] = [str(getattr(each, "value", each)) for each in choices]
        case click.IntRange(min=least, max=most) | click.FloatRange(min=least, max=most):
            limits = (("minimum", least), ("maximum", most))
            item |= {name: limit for name, limit in limits if limit is not None}
    return row | ({"type": "array", "items": item} if key.option.multiple else item)
