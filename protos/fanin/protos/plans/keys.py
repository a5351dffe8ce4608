"""The declaration of a key: the source of its range check, and of the texts of errors and of docs/reference/plan.md.

A section of a Plan is a frozen dataclass. The annotation of a field declares a key::

    deadline_s: Annotated[float, Key(text="Seconds until the deadline.", unit="s", above=0)] = 600.0

The field has the key's name, type and default. ``Key`` has the other properties. A field whose type is a dataclass is a
section within the section. ``tuple[X, ...]`` of a dataclass X is a list of sections: ``[[name]]`` in TOML. A key of the
type ``dict`` is a table. Its names are not declared here, because others define them; ``Key.entries`` has its values.
A key of the type ``X | None`` with the default None may be absent.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Final, get_args, get_origin, get_type_hints

from fanin.protos.plans.entries import NUMBERS, EntryKind
from fanin.protos.texts import counted

TYPE_NAMES: Final = MappingProxyType(
    {int: "an integer", float: "a number", str: "a string", bool: "true or false", dict: "a table"}
)
"""The types that a key may have."""
PAGE: Final = "docs/reference/plan.md"
EMPTY: Final = '""'
"""The empty string among the choices of a key, as a Plan writes it."""
MAX_SHOWN_BITS: Final = 256
MAX_SHOWN_CHARS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedDefault:
    """A default that depends on other keys.

    Attributes:
        text: The default in words, as Markdown.
        value: A function of the values of the keys that the same section declares before this one.
    """

    text: str
    value: Callable[[Mapping[str, object]], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The properties of a key other than the name, type and default of its field.

    Attributes:
        text: The meaning of the key, in one or a few sentences of Markdown.
        unit: The unit of the value.
        at_least: Smallest value.
        at_most: Largest value.
        above: The value is above this one.
        below: The value is below this one.
        choices: All values, if there are few.
        form: The form of a string in words; ``is_valid`` tests it.
        is_valid: Whether a string has that form.
        entries: The values of a table.
        derived: The default, if other keys determine it. The field itself then has none.
        see: Target of a link from docs/reference/plan.md.
    """

    text: str
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    form: str = ""
    is_valid: Callable[[str], bool] | None = None
    entries: EntryKind = NUMBERS
    derived: DerivedDefault | None = None
    see: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyField:
    """A key of a section.

    ``default`` is ``MISSING`` if the key is required or its default is derived, and None if the key may be absent.
    """

    name: str
    type: type
    default: object
    key: Key

    @property
    def is_required(self) -> bool:
        """Whether a Plan must have the key."""
        return self.default is MISSING and self.key.derived is None

    @property
    def range(self) -> str:
        """The range in words, such as "from 1 to 10"; "" for any value of the type."""
        key = self.key
        if key.choices:
            return f"one of {', '.join(each or EMPTY for each in key.choices)}"
        if key.form:
            return key.form
        if key.at_least is not None and key.at_most is not None:
            return f"from {number_text(key.at_least)} to {number_text(key.at_most)}"
        limits = (
            ("above", key.above),
            ("of at least", key.at_least),
            ("and at most", key.at_most),
            ("and below", key.below),
        )
        return " ".join(f"{word} {number_text(limit)}" for word, limit in limits if limit is not None)

    @property
    def expected(self) -> str:
        """The accepted values in words, such as "an integer from 1 to 10"."""
        if self.key.choices:
            return self.range
        kind = TYPE_NAMES[self.type]
        if self.type is dict:
            return f"{kind} of {self.key.entries.plural}"
        return " ".join(filter(None, (kind, self.key.form and "of", self.range)))

    def accepts(self, value: object) -> bool:
        """Return whether a value of the key's type is within the range. NaN is in no range."""
        key = self.key
        if value is None:
            return self.default is None
        if isinstance(value, dict):
            return all(key.entries.has_form(name) and key.entries.accepts(item) for name, item in value.items())
        if isinstance(value, str):
            return (not key.choices or value in key.choices) and (key.is_valid is None or key.is_valid(value))
        if not isinstance(value, int | float):
            return False
        return not (
            (isinstance(value, float) and math.isnan(value))
            or (key.at_least is not None and value < key.at_least)
            or (key.at_most is not None and value > key.at_most)
            or (key.above is not None and value <= key.above)
            or (key.below is not None and value >= key.below)
        )

    def problem(self, path: str, value: object) -> str:
        """Return the text of the error for a wrong value at a dotted path."""
        if isinstance(value, dict):
            for name, item in value.items():
                if not self.key.entries.has_form(name):
                    form = self.key.entries.name_form
                    return f"{path}: got the name {shown(name)}, expected {form}; {PAGE} describes the key"
                if not self.key.entries.accepts(item):
                    entry, expected = joined(path, name), self.key.entries.text
                    return f"{entry}: got {shown(item)}, expected {expected}; {PAGE} describes the key"
        return f"{path}: got {shown(value)}, expected {self.expected}; {PAGE} describes the key"


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionField:
    """A section within a section. ``is_list`` is whether it may occur several times, in an order."""

    name: str
    section: type
    is_list: bool


Fields = Mapping[str, KeyField | SectionField]


def fields_of(section: type) -> Fields:
    """Return the keys and sections that a dataclass declares, by name, in the order of the declaration."""
    return _declared(section)


@cache
def _declared(section: type) -> Fields:
    assert is_dataclass(section), f"{section}: expected a dataclass"
    hints = get_type_hints(section, include_extras=True)
    members = {}
    for field in fields(section):
        hint = hints[field.name]
        default = field.default if field.default_factory is MISSING else field.default_factory()
        members[field.name] = key_field(field.name, hint, default) or _section_field(field.name, hint)
    return MappingProxyType(members)


def key_field(name: str, hint: object, default: object) -> KeyField | None:
    """Return the key that a name, hint and default declare; None if the hint is no ``Annotated[type, Key(...)]``."""
    kind, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    key = next((item for item in metadata if isinstance(item, Key)), None)
    if key is None:
        return None
    if isinstance(kind, UnionType):
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    kind = get_origin(kind) or kind
    assert kind in TYPE_NAMES, f"{name}: got type {kind}, expected one of {list(TYPE_NAMES)}"
    return KeyField(name=name, type=kind, default=default, key=key)


def _section_field(name: str, hint: object) -> SectionField:
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    is_list = get_origin(kind) is tuple
    section = get_args(kind)[0] if is_list else kind
    assert isinstance(section, type), f"{name}: got {hint}, expected a section or Annotated[type, Key(...)]"
    assert is_dataclass(section), f"{name}: got {hint}, expected a section or Annotated[type, Key(...)]"
    return SectionField(name=name, section=section, is_list=is_list)


def keys_of(section: type) -> Iterator[KeyField]:
    """Yield the keys of a section, without those of the sections within."""
    return (field for field in fields_of(section).values() if isinstance(field, KeyField))


def range_problem(section: object, path: str) -> str:
    """Check the values of a section against the ranges of its keys.

    Args:
        section: The section, a dataclass.
        path: Its dotted path in the Plan; "" for the Plan itself.

    Returns:
        The text of the error for the first key that is out of range; "" if there is none.
    """
    for field in keys_of(type(section)):
        value = getattr(section, field.name)
        # A default out of the range, as that of training.learning_rate, is no value. A file cannot write it.
        if value != field.default and not field.accepts(value):
            return field.problem(joined(path, field.name), value)
    return ""


def differences(first: object, second: object, path: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield the dotted path and both values of each key with different values in two sections of one type."""
    for name, field in fields_of(type(first)).items():
        values, where = (getattr(first, name), getattr(second, name)), joined(path, name)
        if values[0] == values[1]:
            continue
        if isinstance(field, KeyField):
            yield where, *values
        elif not field.is_list:
            yield from differences(*values, where)
        elif len(values[0]) != len(values[1]):
            yield where, counted(len(values[0]), "table"), counted(len(values[1]), "table")
        else:
            for index, pair in enumerate(zip(*values, strict=True)):
                yield from differences(*pair, f"{where}.{index}")


def joined(path: str, name: str) -> str:
    """Return the dotted path of a name within a section."""
    return f"{path}.{name}" if path else name


def shown(value: object) -> str:
    """Return a received value for an error message, shortened. Python refuses to print very long integers."""
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        return repr(value)[:MAX_SHOWN_CHARS]
    except ValueError:
        return f"a {type(value).__name__} with a very long integer"


def number_text(value: float) -> str:
    """Return a number in the shortest way that a person would write it."""
    return str(value) if isinstance(value, int) else f"{value:.2g}"
