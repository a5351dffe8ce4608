"""Conversion between frozen records and TOML or JSON tables; one reader for all settings of a job.

A key is the name of a field, and a nested table is a nested record. Errors name the key: an unknown key with the
nearest known one, a wrong type with the received value. The records themselves check the ranges of their values. This
module does not import torch.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from fanin.datacenter.ranks.mesh import MeshShape
from fanin.protos.errors import InvalidInput

if typing.TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
SCALARS: typing.Final = (bool, int, float, str)
NAMED: typing.Final = "named"
"""Key of a field's metadata: the ``NamedTables`` that the field is read with."""


class NamedTables(Protocol):
    """A field whose table has another name than the field, such as a model family in ``[model.NAME]``."""

    def names(self) -> tuple[str, ...]:
        """Return the known names, for errors."""

    def kind(self, name: str) -> type | None:
        """Return the record that a table of this name is read as, or None if the name is unknown."""

    def value(self, name: str, record: object) -> object:
        """Return the value of the field."""

    def named(self, value: object) -> tuple[str, object]:
        """Return the name and the record of a value."""


def record_of(kind: type[T], row: object, where: str) -> T:
    """Return a record of type ``kind`` from a table; ``where`` names the source in errors. Raises InvalidInput."""
    try:
        return _record(kind, row, "")
    except InvalidInput as exc:
        raise InvalidInput(f"{where}: {exc}", code=exc.code) from exc


def _record(kind: type[T], row: object, where: str) -> T:
    if not isinstance(row, dict):
        raise InvalidInput(f"{f'{where}: ' if where else ''}got {row!r}, expected a table", code="FN-1204")
    hints = typing.get_type_hints(kind)
    fields = {each.name: each for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    known = {name: each for name, each in fields.items() if NAMED not in each.metadata}
    named = {}
    for name, each in fields.items():
        if NAMED in each.metadata:
            others = {key: value for key, value in row.items() if key not in known}
            row = {key: value for key, value in row.items() if key in known}
            named = _named(name, each.metadata[NAMED], others, where, tuple(known))
    for key in row:
        if key not in known:
            raise InvalidInput(f"{_within(where)}got unknown key {key!r}{_nearest(key, tuple(known))}", code="FN-1203")
    for name, each in known.items():
        if name not in row and each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            raise InvalidInput(f"{_within(where)}got no {name}, expected a value", code="FN-1205")
    return kind(
        **{name: _value(hints[name], value, f"{where}.{name}" if where else name) for name, value in row.items()},
        **named,
    )


def _named(
    field: str, tables: NamedTables, row: Mapping[str, object], where: str, fields: tuple[str, ...]
) -> dict[str, object]:
    """Return the field and its value from the keys of a table that are no fields, or nothing if there are none."""
    values = {}
    for name, value in row.items():
        kind = tables.kind(name)
        if kind is None:
            known = tuple(dict.fromkeys((*fields, *tables.names())))
            raise InvalidInput(f"{_within(where)}got unknown key {name!r}{_nearest(name, known)}", code="FN-1203")
        place = f"{where}.{name}" if where else name
        try:
            values[field] = tables.value(name, _record(kind, value, place))
        except (ValueError, TypeError) as exc:  # the record is another package's, and checks its values itself
            raise InvalidInput(f"{_within(place)}{exc}", code="FN-1214") from exc
    if len(row) > 1:
        raise InvalidInput(
            f"{_within(where)}got {' and '.join(row)}, expected one of {', '.join(tables.names())}", code="FN-1207"
        )
    return values


def row_of(value: object) -> object:
    """Return a record, or a value in one, as JSON can represent it."""
    if isinstance(value, MeshShape | Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dict(_rows(value))
    if isinstance(value, Mapping):
        return {key: row_of(each) for key, each in value.items()}
    return [row_of(each) for each in value] if isinstance(value, tuple) else value


def _rows(record: "DataclassInstance") -> Iterator[tuple[str, object]]:
    for each in dataclasses.fields(record):
        value = getattr(record, each.name)
        if NAMED not in each.metadata:
            yield each.name, row_of(value)
        elif value is not None:
            name, table = each.metadata[NAMED].named(value)
            yield name, row_of(table)


def _within(where: str) -> str:
    return f"[{where}]: " if where else ""


def _nearest(key: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(key, known, 1)
    return f", did you mean {near[0]!r}?" if near else f", expected some of {', '.join(known)}"


def _value(kind: object, value: object, where: str) -> object:
    """Return a value converted to its field's type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and types.NoneType in inner:
            return None
        # A string is matched against the Literal, any other value is read as the one other type.
        words = [each for each in inner if typing.get_origin(each) is Literal]
        (some,) = (each for each in inner if each is not types.NoneType and each not in words)
        return _value(words[0] if words and isinstance(value, str) else some, value, where)
    if origin is Literal:
        if value not in inner:
            raise InvalidInput(f"{where}: got {value!r}, expected one of {', '.join(inner)}", code="FN-1206")
        return value
    if origin is tuple:
        return _values(inner, value, where)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise InvalidInput(f"{where}: got {value!r}, expected a table", code="FN-1204")
        return {key: _value(inner[1], each, f"{where}.{key}") for key, each in value.items()}
    assert isinstance(kind, type), f"no rule for {kind}"
    if kind in (MeshShape, Path):
        text = _scalar(str, value, where)
        return MeshShape.parse(str(text)) if kind is MeshShape else Path(str(text))
    return _scalar(kind, value, where) if kind in SCALARS else _record(kind, value, where)


def _values(inner: tuple[object, ...], value: object, where: str) -> tuple[object, ...]:
    endless = inner[-1] is Ellipsis
    if not isinstance(value, list) or not (endless or len(value) == len(inner)):
        raise InvalidInput(
            f"{where}: got {value!r}, expected a list{'' if endless else f' of {len(inner)}'}", code="FN-1204"
        )
    kinds = [inner[0]] * len(value) if endless else inner
    return tuple(
        _value(kind, each, f"{where}[{index}]") for index, (kind, each) in enumerate(zip(kinds, value, strict=True))
    )


def _scalar(kind: type, value: object, where: str) -> object:
    # isinstance would accept a bool as an int, which the author of the file does not mean.
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise InvalidInput(
                f"{where}: got {len(str(value))} digits, expected a number that a float can hold", code="FN-1204"
            ) from None
    if type(value) is not kind:
        raise InvalidInput(f"{where}: got {value!r}, expected {kind.__name__}", code="FN-1204")
    if isinstance(value, str) and "\0" in value:
        raise InvalidInput(f"{where}: got {value!r}, expected a text without NUL characters", code="FN-1204")
    return value
