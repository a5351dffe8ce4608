"""The Plan as a TOML file: its parser, and the options that override its keys.

Every key is declared in ``fanin.protos.plans``; docs/reference/plan.md lists them. The parser is strict. An unknown
key, a wrong type or a value out of range is an error. It names the key and its source: the file or ``--set``.
"""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, TypeVar

from fanin.clients.textfiles import reason_of
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import OPTIMIZER_SETTINGS, Plan, Training
from fanin.protos.plans.entries import as_float
from fanin.protos.plans.keys import PAGE, Fields, Key, KeyField, SectionField, fields_of, joined, keys_of, shown

T = TypeVar("T")
SET: Final = "--set"
OPTIMIZER: Final = "optimizer"
OPTIONS: Final = MappingProxyType(
    {
        "aggregation.options": "aggregation.rule_options",
        "cohort.options": "cohort.selection_options",
        "aggregation.trim": "aggregation.rule_options.trim",
        "aggregation.outer_learning_rate": "aggregation.outer_options.learning_rate",
        "aggregation.outer_momentum": "aggregation.outer_options.momentum",
        "aggregation.momentum": "aggregation.outer_options.momentum",
    }
)
"""Options of fanin's parts under the names that a reader may give them as keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKeys:
    """The keys of the model that a Plan trains: either an App to export or a Bundle folder."""

    app: Annotated[
        str,
        Key(
            text="The App to export: `package.module:name`, or `path/to/file.py:name` relative to the Plan's "
            "file. A Plan has either `app` or `bundle`.",
            see="../howto/export.md",
        ),
    ] = ""
    bundle: Annotated[str, Key(text="The folder of a Bundle, relative to the Plan's file.")] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile(ModelKeys):
    """A Plan and the model that it trains.

    Attributes:
        sources: The names of the file and of the options that set its keys, for errors.
    """

    plan: Plan
    sources: str


ROOT: Final[Fields] = {field.name: field for field in keys_of(ModelKeys)} | dict(fields_of(Plan))
"""The keys and sections at the top level of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A value that replaces a key of a document.

    Attributes:
        path: The dotted key. Below a key that is a table, the rest is the name of an entry.
        value: Its value, as TOML reads it.
        source: The name of the option or argument in error messages.
    """

    path: str
    value: object
    source: str = SET


def parse_plan(text: str, where: str, overrides: Sequence[str | Override] = ()) -> PlanFile:
    """Parse a Plan from TOML.

    Args:
        text: The TOML document.
        where: Name of the document in error messages.
        overrides: Keys that replace those of the document. A text is one of ``--set`` (see ``override_of``). A later
            override of the same key wins.

    Raises:
        InvalidPlan: The document is not TOML, has an unknown key or a wrong value, or is not a valid Plan.
    """
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as exc:
        # A ValueError that is no TOMLDecodeError: Python refuses integers of thousands of digits.
        raise InvalidPlan(f"{where}: not TOML ({exc})", code="FN-0280") from exc
    parsed = (override_of(each) if isinstance(each, str) else each for each in overrides)
    reader = _Reader(where, tuple(parsed))
    reader.override(tables)
    row = reader.row(ROOT, tables, "")
    app, bundle = str(row.pop("app")), str(row.pop("bundle"))
    if bool(app) == bool(bundle):
        raise InvalidPlan(
            f"{reader.sources}: expected either app or bundle, got {'both' if app else 'neither'}", code="FN-0281"
        )
    plan = reader.build(Plan, row)
    if app and not plan.training.learning_rate:
        # Only a Flower app, which has a Bundle, may need none.
        rate = fields_of(Training)["learning_rate"]
        assert isinstance(rate, KeyField), "a key is declared"
        path = f"training.{rate.name}"
        raise InvalidPlan(
            f"{reader.source(path)}: {path}: missing, expected {rate.expected}; add the key", code="FN-0286"
        )
    return PlanFile(plan=plan, sources=reader.sources, app=app, bundle=bundle)


def read_plan(path: Path, overrides: Sequence[str | Override] = ()) -> PlanFile:
    """Read a Plan from a TOML file. Raises InvalidPlan (see ``parse_plan``)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidPlan(f"{path}: cannot be read ({reason_of(exc)})", code="FN-0280") from exc
    return parse_plan(text, str(path), overrides)


def override_of(text: str, source: str = SET) -> Override:
    """Return the override that ``key=value`` describes.

    Args:
        text: A dotted key and a TOML value; any other value is a string. A name in a table, such as a pattern of
            ``flower.roles``, may have the quotes that TOML needs.
        source: The name of the option or argument in error messages.

    Raises:
        InvalidPlan: The text has no key or no value, or a quote of the key has no end.
    """
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise InvalidPlan(
            f"{source} {text}: expected KEY=VALUE, for example {source} cohort.concurrency=8", code="FN-0283"
        )
    try:
        tables = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        tables = {}
    # A line break in the text could begin another key.
    parsed = tables["value"] if set(tables) == {"value"} else value
    return Override(path=_unquoted(path.strip(), source), value=parsed, source=source)


def leaves_of(override: Override) -> Iterator[Override]:
    """Yield an override for each key below the value of one: a section, or a table whose names are free.

    So the order of two overrides does not matter unless both have the same key.
    """
    fields: Fields = {}
    field: KeyField | SectionField | None = None
    for index, name in enumerate(override.path.split(".")):
        field = (ROOT if index == 0 else fields).get(name)
        fields = fields_of(field.section) if isinstance(field, SectionField) and not field.is_list else {}
    is_table = bool(fields) or (isinstance(field, KeyField) and field.type is dict)
    if not is_table or not isinstance(override.value, dict):
        yield override
        return
    for name, value in override.value.items():
        yield from leaves_of(replace(override, path=joined(override.path, name), value=value))


def _unquoted(path: str, source: str) -> str:
    """Return a dotted key without the quotes of TOML. Raises InvalidPlan."""
    if not {*path} & {'"', "'"}:
        return path
    try:
        table: object = tomllib.loads(f"{path} = 0")
    except (ValueError, RecursionError) as exc:
        raise InvalidPlan(
            f"{source} {path}: got quotes that TOML does not read ({exc}), expected a name in quotes as in "
            f"{source} 'flower.roles.\"layer.*\"=statistic'; a name without = and quotes needs none",
            code="FN-0283",
        ) from exc
    names = []
    while isinstance(table, dict):
        ((name, table),) = table.items()
        names.append(name)
    return ".".join(names)


@contextmanager
def named_sources(sources: str) -> Iterator[None]:
    """Name the sources of a Plan in the errors about the whole Plan."""
    try:
        yield
    except InvalidPlan as exc:
        raise InvalidPlan(f"{sources}: {str(exc).removeprefix('plan: ')}", code=exc.code) from exc


def check_overrides(texts: Iterable[str] | None) -> None:
    """Raise InvalidPlan for a text of ``--set`` without a key or a value."""
    for text in texts or ():
        override_of(text)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the tables of a document, and knows the source of each key for error messages."""

    where: str
    overrides: tuple[Override, ...]

    @property
    def sources(self) -> str:
        """The sources of a condition on several keys."""
        names = list(dict.fromkeys(override.source for override in self.overrides if override.source != self.where))
        return f"{self.where} with {', '.join(names)}" if names else self.where

    def source(self, path: str) -> str:
        """Return the source of a key: the option or argument that has set it or a section around it, or the file."""
        owners = [override.source for override in self.overrides if f"{path}.".startswith(f"{override.path}.")]
        return owners[-1] if owners else self.where

    def override(self, root: dict[str, object]) -> None:
        """Write the values of the options into the tables of the document."""
        for override in self.overrides:
            *sections, name = override.path.split(".")
            table: object = root
            fields, path = ROOT, ""
            for section in sections:
                field = _declaration(section, fields, path, f"{override.source}: {{}}: unknown section")
                path = joined(path, section)
                table = _entered(table, section)
                if isinstance(field, KeyField) and field.type is dict:
                    # The names in this table are free. They may have dots.
                    name = override.path.removeprefix(f"{path}.")
                    break
                if isinstance(field, KeyField) or field.is_list:
                    form = f": {self._form(field, path, override.source)}" if isinstance(field, SectionField) else ""
                    raise InvalidPlan(
                        f"{override.source}: {override.path}: {path} is not a section; set {path} as a whole{form}",
                        code="FN-0284",
                    )
                fields = fields_of(field.section)
            # A value in place of a table is an error of the document: ``row`` reports it.
            if isinstance(table, dict):
                table[name] = override.value

    def row(self, fields: Fields, table: Mapping[str, object], path: str) -> dict[str, object]:
        """Return the values of a section by name: those of its table, and the defaults of the other keys."""
        for name, value in table.items():
            kind = "section" if isinstance(value, dict) else "key"
            _declaration(name, fields, path, f"{self.source(joined(path, name))}: {{}}: unknown {kind}")
        values: dict[str, object] = {}
        for name, field in fields.items():
            full = joined(path, name)
            if isinstance(field, SectionField):
                values[name] = self._section(field, table.get(name, [] if field.is_list else {}), full)
            elif name in table:
                values[name] = self._value(field, table[name], full)
            else:
                values[name] = self._default(field, values, full)
        return values

    def build(self, kind: type[T], row: Mapping[str, object]) -> T:
        """Construct a section. Raises InvalidPlan with the sources if a condition on several keys fails."""
        with named_sources(self.sources):
            return kind(**row)

    def _section(self, field: SectionField, value: object, path: str) -> object:
        if field.is_list:
            if not isinstance(value, list):
                expected = self._form(field, path, self.source(path), value)
                raise InvalidPlan(
                    f"{self.source(path)}: {path}: got {shown(value)}, expected {expected}", code="FN-0284"
                )
            for index, table in enumerate(value):
                if not isinstance(table, dict):
                    where, expected = joined(path, str(index)), self._form(field, path, self.source(path), table)
                    raise InvalidPlan(
                        f"{self.source(path)}: {where}: got {shown(table)}, expected {expected}", code="FN-0284"
                    )
            return tuple(self._table(field, table, joined(path, str(index))) for index, table in enumerate(value))
        return self._table(field, value, path)

    def _form(self, field: SectionField, path: str, source: str, received: object = None) -> str:
        """Return the form of a list of sections in words, as a source writes it, with a received name."""
        first = next(keys_of(field.section))
        value = '"NAME"' if first.type is str else "1"
        if type(received) is first.type and first.accepts(received):
            value = json.dumps(received)
        if source == SET:
            return f"a list of tables, as in --set '{path}=[{{{first.name}={value}}}]'"
        if any(override.source == source for override in self.overrides):
            return f'a list of mappings, as in {{"{path}": [{{"{first.name}": {value}}}]}}'
        return f"a list of sections [[{path}]] with {first.name} = {value}; write it with double brackets"

    def _table(self, field: SectionField, value: object, path: str) -> object:
        if not isinstance(value, dict):
            source, key = self.source(path), f"{path}.{next(keys_of(field.section)).name}"
            form = f", as in --set {key}=VALUE" if source == SET else ""
            if not form and any(override.source == source for override in self.overrides):
                form = f', as in {{"{key}": VALUE}}'
            raise InvalidPlan(
                f"{source}: {path}: got {shown(value)}, expected a section [{path}]{form}", code="FN-0284"
            )
        return self.build(field.section, self.row(fields_of(field.section), value, path))

    def _value(self, field: KeyField, value: object, path: str) -> object:
        if field.type is float:
            value = as_float(value)
        if field.type is dict and isinstance(value, dict):
            value = {name: field.key.entries.read(item) for name, item in value.items()}
            for name, item in value.items():
                if not field.accepts({name: item}):
                    raise InvalidPlan(
                        f"{self.source(joined(path, name))}: {field.problem(path, {name: item})}", code="FN-0285"
                    )
        if type(value) is not field.type or not field.accepts(value):
            raise InvalidPlan(f"{self.source(path)}: {field.problem(path, value)}", code="FN-0285")
        return value

    def _default(self, field: KeyField, values: Mapping[str, object], path: str) -> object:
        if field.key.derived is not None:
            return field.key.derived.value(values)
        if field.default is MISSING:
            raise InvalidPlan(
                f"{self.source(path)}: {path}: missing, expected {field.expected}; add the key", code="FN-0286"
            )
        return field.default


def _entered(table: object, section: str) -> object:
    """Return the table of a section within a table, as a copy, because it may be a value of the caller."""
    if not isinstance(table, dict):
        return None
    inner = table.get(section, {})
    table[section] = dict(inner) if isinstance(inner, dict) else inner
    return table[section]


def _declaration(name: str, fields: Fields, path: str, problem: str) -> KeyField | SectionField:
    """Return the declaration of a name in a section. Raises InvalidPlan with the nearest name."""
    if name in fields:
        return fields[name]
    names = ", ".join(_notation(each, field) for each, field in fields.items())
    nearest = _nearest(name, path, fields)
    advice = f"did you mean {nearest}?" if nearest else f"{PAGE} lists the keys"
    raise InvalidPlan(f"{problem.replace('{}', joined(path, name))}, expected one of {names}; {advice}", code="FN-0287")


def _notation(name: str, field: KeyField | SectionField) -> str:
    """Return a name in the notation of a file."""
    if isinstance(field, KeyField):
        return name
    return f"[[{name}]]" if field.is_list else f"[{name}]"


def _nearest(name: str, path: str, fields: Fields) -> str:
    """Return the dotted path of the key or section nearest to an unknown name; "" if none is near.

    The same name elsewhere is the nearest, then a similar one in the same section, then a similar one elsewhere. Of
    several paths of one name it is the shortest, and of those the first: ``training.epochs``, not ``schedule.epochs``.
    The settings of an optimizer are names below each key ``optimizer``, the options of a part below its table.
    """
    if (path_of := OPTIONS.get(joined(path, name))) is not None:
        return path_of
    by_depth = sorted(_all_names(ROOT, ""), key=lambda pair: joined(*pair).count("."))
    elsewhere = {each: joined(section, each) for section, each in reversed(by_depth)}
    if name in elsewhere:
        return elsewhere[name]
    here = {each: joined(path, each) for each in fields}
    if OPTIMIZER in here:
        here = {each: joined(here[OPTIMIZER], each) for each in OPTIMIZER_SETTINGS} | here
    if near := get_close_matches(name, here, n=1):
        return here[near[0]]
    if name in OPTIMIZER_SETTINGS:
        return joined(f"training.{OPTIMIZER}", name)
    near = get_close_matches(name, elsewhere, n=1)
    return elsewhere[near[0]] if near else ""


def _all_names(fields: Fields, path: str) -> list[tuple[str, str]]:
    """Return each key and section as the path of its section and its name."""
    names = [(path, name) for name in fields]
    for name, field in fields.items():
        if isinstance(field, SectionField):
            names += _all_names(fields_of(field.section), joined(path, name))
    return names
