"""The queries of the alert rules and the dashboard, and the dashboard against Grafana's schema.

The schema is in typed models that Grafana generates from it. They ignore an unknown key and check no value. So the
dashboard is written again and compared, and each value is compared with the annotation of its attribute.
"""

import enum
import json
import re
import types
from collections.abc import Iterator, Mapping
from typing import Literal, Union, get_args, get_origin, get_type_hints

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from house.tree import ROOT

FOLDER = ROOT / "examples" / "operations"
BOARD = FOLDER / "grafana" / "dashboard.json"
MODELS = "grafana_foundation_sdk.models."


def queries() -> list[str]:
    """Return the queries of the panels of the dashboard."""
    return [target["expr"] for panel in json.loads(BOARD.read_text())["panels"] for target in panel.get("targets", ())]


def expressions() -> list[str]:
    """Return the expressions of the alert rules, and of the panels and variables of the dashboard."""
    alerts = re.findall(r"expr: (?:>-\n)?((?:.|\n {10})*)", (FOLDER / "alerts.yml").read_text())
    variables = json.loads(BOARD.read_text())["templating"]["list"]
    return [*alerts, *queries(), *(each["query"]["query"] for each in variables if each["type"] == "query")]


def names_in(expression: str) -> set[str]:
    """Return the names of metrics in an expression."""
    plain = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^]]*\]|by \([^)]*\)|on \([^)]*\)', " ", expression)
    return set(re.findall(r"\b(?:fanin|process)_\w+|\bup\b", plain))


def schema_errors(board: Mapping[str, object]) -> list[str]:
    """Return the keys and values of a dashboard that Grafana's schema does not have."""
    register_default_plugins()
    try:
        dashboard = Dashboard.from_json(dict(board))
    except (AttributeError, KeyError, TypeError) as exc:
        return [f"cannot be read: {exc!r}"]
    written = json.loads(json.dumps(dashboard, cls=JSONEncoder))
    return [*_lost(board, written, "dashboard"), *_wrong(dashboard, "dashboard")]


def _lost(value: object, written: object, place: str) -> Iterator[str]:
    """Yield the keys that the models did not keep."""
    if isinstance(value, Mapping) and isinstance(written, Mapping):
        for key, each in value.items():
            if key in written:
                yield from _lost(each, written[key], f"{place}.{key}")
            else:
                yield f"{place}.{key}: unknown key"
    elif isinstance(value, list) and isinstance(written, list):
        for index, (each, other) in enumerate(zip(value, written, strict=True)):
            yield from _lost(each, other, f"{place}[{index}]")
    elif value != written:
        yield f"{place}: {value!r} was read as {written!r}"


def _wrong(value: object, place: str) -> Iterator[str]:
    """Yield the values of a model, and of the models in it, that have another type than their annotation."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _wrong(each, f"{place}.{key}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _wrong(each, f"{place}[{index}]")
    elif type(value).__module__.startswith(MODELS) and not isinstance(value, enum.Enum):
        hints = get_type_hints(type(value))
        for name, each in vars(value).items():
            if not _fits(each, hints[name]):
                yield f"{place}.{name}: received {each!r}, expected {hints[name]}"
            yield from _wrong(each, f"{place}.{name}")


def _fits(value: object, hint: object) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_fits(each, arguments[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, arguments[1]) for each in value.values())
    assert isinstance(hint, type), hint
    if issubclass(hint, enum.Enum):
        # The models keep the word of a file.
        return value in [each.value for each in hint]
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return isinstance(value, hint)
