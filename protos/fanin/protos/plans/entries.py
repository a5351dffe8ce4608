"""The entries of a key that is a table: which values they may have, and how they are read from TOML.

``ROLES`` are the roles of arrays, by patterns of their names: ``"statistic"``, or a table with a range.
``NUMBERS`` are the settings of an optimizer, ``OPTIONS`` those of a part that the Plan names. ``SETTINGS`` are the
entries of a ConfigRecord of Flower: numbers, strings, booleans, bytes, and lists of one of these. TOML has no bytes, so
they are written as a table: ``{ base64 = "AAEC" }``.
"""

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fanin.protos.errors import InvalidInput
from fanin.protos.names import MAX_NAME_CHARS, NAME_FORM, is_name
from fanin.protos.roles import RoleKind, TensorRole

Scalar = bool | int | float | str | bytes
Option = bool | int | float | str
"""An entry of ``OPTIONS``."""
Setting = Scalar | tuple[Scalar, ...]
"""An entry of ``SETTINGS``. All items of a list have one type."""
SCALAR_NAMES: Final = MappingProxyType(
    {bool: "true or false", int: "an integer", float: "a number with a decimal point", str: "a string", bytes: "bytes"}
)
INTEGER_BITS: Final = 63
"""Bits of an integer without its sign, as on the wire."""
MAX_FLOAT_BITS: Final = 1000
"""A longer integer has no float. As infinity it is out of the range of its key."""
BASE64: Final = "base64"
MAX_SITE_WEIGHT: Final = 1 << 20
"""Weights are ratios between sites. With a million of these, their sum still fits (``Plan.max_total_examples``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryKind:
    """The values of a table.

    Attributes:
        text: One of them, in words.
        plural: Several of them, in words.
        accepts: Whether a value is one.
        read: Converts a value of TOML. Other values are returned unchanged.
        name_form: The form of the names of entries in words; ``has_form`` tests it.
        has_form: Whether a text has that form.
    """

    text: str
    plural: str
    accepts: Callable[[object], bool]
    read: Callable[[object], object]
    name_form: str = NAME_FORM
    has_form: Callable[[str], bool] = is_name


def as_float(value: object) -> object:
    """Return an integer as a float, and any other value unchanged."""
    if type(value) is not int:
        return value
    return float(value) if value.bit_length() <= MAX_FLOAT_BITS else float("inf")


def kind_of(setting: Setting) -> str:
    """Return the type of an entry of ``SETTINGS`` in words."""
    return "a list" if isinstance(setting, tuple) else SCALAR_NAMES[type(setting)]


def _is_number(value: object) -> bool:
    return type(value) is float and math.isfinite(value)


def _is_setting(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_scalar, value)) and len({type(item) for item in value}) <= 1
    return _is_scalar(value)


def _is_scalar(value: object) -> bool:
    if type(value) is int:
        return value.bit_length() <= INTEGER_BITS
    return _is_number(value) or type(value) in (bool, str, bytes)


def _read_setting(value: object) -> object:
    if isinstance(value, list):
        return tuple(map(_read_setting, value))
    if isinstance(value, Mapping) and set(value) == {BASE64}:
        try:
            return base64.b64decode(value[BASE64], validate=True)
        except (ValueError, TypeError):
            return value
    return value


def _read_role(value: object) -> object:
    row = {"role": value} if isinstance(value, str) else value
    if not isinstance(row, Mapping) or not {"role"} <= row.keys() <= {"role", "lowest", "highest"}:
        return value
    bounds = {name: as_float(bound) for name, bound in row.items() if name != "role"}
    if row["role"] not in set(RoleKind) - {RoleKind.SUM} or not all(
        isinstance(bound, float) for bound in bounds.values()
    ):
        return value
    try:
        return TensorRole(role=RoleKind(row["role"]), **bounds)  # type: ignore[arg-type]  # the floats were just checked
    except InvalidInput:
        return value


OPTIONS: Final = EntryKind(
    text="a finite number, an integer of 64 bits, a string, true or false",
    plural="numbers, strings, true and false",
    accepts=lambda value: type(value) is not bytes and _is_scalar(value),
    read=lambda value: value,
)
NUMBERS: Final = EntryKind(text="a finite number", plural="finite numbers", accepts=_is_number, read=as_float)
SETTINGS: Final = EntryKind(
    text='a finite number, an integer of 64 bits, a string, true, false, bytes as { base64 = "AAEC" }, or a list of '
    "one of these types",
    plural="numbers, strings, booleans, bytes, and lists of these",
    accepts=_is_setting,
    read=_read_setting,
)
SITE_WEIGHTS: Final = EntryKind(
    text=f"an integer from 1 to {MAX_SITE_WEIGHT}",
    plural="weights by device",
    accepts=lambda value: type(value) is int and 1 <= value <= MAX_SITE_WEIGHT,
    read=lambda value: value,
)
ROLES: Final = EntryKind(
    text='one of parameter, statistic, counter, or { role = "statistic", lowest = 0.0, highest = 1.0 } with one of the '
    "bounds or both, in rising order",
    plural="roles by patterns of names",
    accepts=lambda value: isinstance(value, TensorRole) and value.role is not RoleKind.SUM,
    read=_read_role,
    name_form=f"1 to {MAX_NAME_CHARS} printable characters",
    has_form=lambda text: 0 < len(text) <= MAX_NAME_CHARS and text.isprintable(),
)
