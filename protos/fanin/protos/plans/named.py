"""The objects that a Plan names, and their options: those of fanin by name, of other distributions by entry point.

The options of a part are the parameters of its factory after the arguments that fanin gives, or of the policy itself.
An annotation is a type (``int``, ``float``, ``str``, ``bool``, or one of these ``| None``), or
``Annotated[type, Key(...)]`` with a range:

    def trimmed_mean(plan: Plan, *, trim: Annotated[float, Key(text="...", above=0, below=0.5)] = 0.1) -> ColumnRule

A simulation may pass a part as an object, without a package. It has a name of this process alone, ``passed.`` and the
name of its class or function. The record of a Plan has no more than names, so it tells that the code is elsewhere, and
``fanin verify`` says what it needs.

So a wrong name, type or range in a Plan is one error of fanin, before the factory is called. A parameter of another
type is no option. It needs a default.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, field
from difflib import get_close_matches
from inspect import Parameter, Signature
from itertools import islice
from traceback import walk_tb
from types import MappingProxyType, NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Final, Generic, TypeVar, cast, get_args

from fanin.protos.errors import FaninError, InvalidPlan, foreign_text
from fanin.protos.names import is_name
from fanin.protos.plans.entries import Option, as_float
from fanin.protos.plans.keys import Key, KeyField, joined, key_field, shown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

R = TypeVar("R")
T = TypeVar("T")
KINDS: Final = (int, float, str, bool)
"""The types that an option may have."""
NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
EMPTY: Final = inspect.Parameter.empty
PREFIX: Final = "passed."
Factory = Callable[..., object]
PassedParts = Mapping[tuple[str, str], Factory]
"""The factory of each part by the entry point group and the name that an installed one would have."""
_PARTS: Final[ContextVar[PassedParts | None]] = ContextVar("parts", default=None)
"""The parts that are passed here; None outside of a simulation."""
OURS: Final = "fanin"


def named(key: str, name: str, ours: Mapping[str, T], group: str) -> T:
    """Return the object that a Plan names: fanin's own, or the entry point of this name.

    Args:
        key: The key of the Plan, for errors.
        name: The name.
        ours: fanin's own objects, by name.
        group: The entry point group of the others.

    Raises:
        InvalidPlan: Nothing has this name, two packages have it, or its package cannot be imported.
    """
    if name in ours:
        return ours[name]
    if (passed := passed_factory(group, name)) is not None:
        return cast(T, passed)
    entries = installed(group)
    if name in entries:
        check_single(f"plan: {key}", name, group)
        try:
            theirs: T = entries[name].load()
        except Exception as exc:  # Any error: the code comes from another package.
            raise InvalidPlan(
                f"plan: {key}: {name!r} cannot be imported from {entries[name].value} ({foreign_text(exc)}); "
                "repair that package",
                code="FN-0211",
            ) from exc
        return theirs
    if name.startswith(PREFIX):
        raise InvalidPlan(f"plan: {key}: {missing_text(group, name)}", code="FN-1880")
    known = sorted({*ours, *entries})
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InvalidPlan(
        f"plan: {key}: got {name!r}, expected one of {known}, which are installed here{hint}", code="FN-0210"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A part that a Plan names, with its options.

    Attributes:
        key: The key of the Plan, for errors.
        name: The name of the part.
        options_key: The key of the options, for errors.
        options: The options, which the signature of the factory declares.
    """

    key: str
    name: str
    options_key: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)


def created(
    choice: Choice,
    factories: Mapping[str, Callable[..., T]],
    group: str,
    *arguments: object,
    checked: Callable[[T, str], T] | None = None,
) -> T:
    """Call the factory that a Plan names, and return its result.

    Only a factory of another package is distrusted: its errors name it, and its result is checked.

    Args:
        choice: The name and the options.
        factories: Our factories, by name.
        group: The entry point group of the others.
        arguments: The arguments of the factory before the options.
        checked: Checks the result of another package, whose errors begin with the text. It returns the part to use.

    Raises:
        InvalidPlan: No factory has this name, it is no function, an option is wrong, it raised an error, or
            ``checked`` refuses its result.
    """
    factory = named(choice.key, choice.name, factories, group)

    def part() -> T:
        options = checked_options(f"plan: {choice.options_key}", factory, choice.options, len(arguments))
        return factory(*arguments, **options)

    if choice.name in factories:
        return part()
    where = f"plan: {choice.key}: {choice.name!r}"
    if not callable(factory):
        raise InvalidPlan(f"{where} is no function; correct it", code="FN-0214")
    with blamed(where, "correct it"):
        return part() if checked is None else checked(part(), where)


@contextmanager
def blamed(what: str, advice: str) -> Iterator[None]:
    """Convert the errors of a named object but InvalidPlan into InvalidPlan: the code may come from another package.

    An error of ours keeps its code.

    Args:
        what: The code that runs within, for the error.
        advice: The end of the error: the remedy.
    """
    try:
        yield
    except Exception as exc:  # Any error: the code may come from another package.
        if type(exc) is InvalidPlan:
            raise
        code = exc.code if isinstance(exc, FaninError) else "FN-0213"
        raise InvalidPlan(f"{what} raised {raised_text(exc)}; {advice}", code=code) from exc


def is_simulated() -> bool:
    """Return whether this is a simulation, whose errors nobody but its caller reads."""
    return _PARTS.get() is not None


def raised_text(error: Exception) -> str:
    """Return kind and text of an exception of another package, in a simulation also its line in that code.

    A coordinator and a device do not name the line: their peers would read the paths of their machine.
    """
    if not is_simulated():
        return foreign_text(error)
    frames = [(frame.f_globals.get("__name__", ""), frame, line) for frame, line in walk_tb(error.__traceback__)]
    roots = [name.partition(".")[0] for name, _, _ in frames]
    # The first package that is not fanin has the part. What it calls, such as numpy, may raise the error.
    part = next((root for root in roots if root != OURS), OURS)
    places = [(frame, line) for root, (_, frame, line) in zip(roots, frames, strict=True) if root == part]
    if not places:
        return foreign_text(error)
    frame, line = places[-1]
    return f"{foreign_text(error)} ({frame.f_code.co_filename}:{line})"


def wrong_object(where: str, part: object, expected: str) -> InvalidPlan:
    """Return the error for a class, or for an object of another type.

    Args:
        where: Begins the error.
        part: The wrong object.
        expected: The expected object.
    """
    kind = f"the class {part.__name__}" if isinstance(part, type) else type(part).__name__
    return InvalidPlan(f"{where}: got {kind}, expected {expected}; correct it", code="FN-0214")


def check_names(where: str, names: object) -> None:
    """Raise InvalidPlan unless these are different names. ``where`` begins the error."""
    are_names = isinstance(names, tuple | list) and all(isinstance(name, str) and is_name(name) for name in names)
    if not isinstance(names, tuple | list) or not are_names or len(set(names)) < len(names):
        raise InvalidPlan(
            f"{where}: got {shown(names)}, expected a tuple of different names; correct it", code="FN-0214"
        )


def check_single(what: str, name: str, group: str) -> None:
    """Raise InvalidPlan if two packages have the same entry point in a group: the choice would be arbitrary."""
    from importlib.metadata import entry_points

    entries = entry_points(group=group, name=name)
    packages = sorted({str(entry.dist.name if entry.dist else entry.value) for entry in entries})
    if len(packages) > 1:
        raise InvalidPlan(
            f"{what}: {name!r} is in each of the packages {packages}, expected one of them; uninstall the others",
            code="FN-0212",
        )


def installed(group: str) -> "Mapping[str, EntryPoint]":
    """Return the entry points of a group that are installed here, by name."""
    # Imported late: it loads the email parser, which costs 3 MB on a device.
    from importlib.metadata import entry_points

    return MappingProxyType({entry.name: entry for entry in entry_points(group=group)})


def options_of(factory: Callable[..., object], num_arguments: int) -> Mapping[str, KeyField]:
    """Return the options of a factory, by name, in the order of its signature.

    Args:
        factory: The factory.
        num_arguments: The number of its arguments that are no options.

    Raises:
        TypeError: A parameter without a default has no annotation, or one of another type.
    """
    parameters = inspect.signature(factory, eval_str=True).parameters.values()
    fields = map(_option, (each for each in islice(parameters, num_arguments, None) if each.kind in NAMED))
    return {field.name: field for field in fields if field is not None}


class RecordFactory(Generic[R, T]):
    """A factory whose options are the fields of a record.

    Args:
        record: A dataclass with the options.
        build: Returns the part, of the arguments that fanin gives and the record.
        num_arguments: The number of these arguments.
    """

    def __init__(self, record: Callable[..., R], build: Callable[..., T], num_arguments: int = 0) -> None:
        self._record, self._build, self._num_arguments = record, build, num_arguments
        given = (Parameter(f"argument_{index}", Parameter.POSITIONAL_ONLY) for index in range(num_arguments))
        # ``inspect.signature`` returns it for this object.
        self.__signature__ = Signature([*given, *inspect.signature(record).parameters.values()])

    def __call__(self, *arguments: object, **options: Option) -> T:
        """Return the part."""
        return self._build(*arguments, self._record(**options))


def checked_options(
    where: str, factory: Callable[..., object], given: Mapping[str, Option], num_arguments: int
) -> Mapping[str, Option]:
    """Return the options of a Plan, checked against the signature of a factory.

    Args:
        where: Begins the error: the table of the options.
        factory: The factory.
        given: The options.
        num_arguments: The number of arguments of the factory that are no options.

    Raises:
        InvalidPlan: An option is unknown, missing, of another type or out of range.
        TypeError: See ``options_of``.
    """
    options = options_of(factory, num_arguments)
    for name in given.keys() - options.keys():
        near = get_close_matches(name, options, n=1)
        advice = f"did you mean {near[0]}?" if near else "remove it"
        raise InvalidPlan(
            f"{joined(where, name)}: unknown option, expected {', '.join(options) or 'none'}; {advice}", code="FN-0216"
        )
    for name, option in options.items():
        if name not in given and option.is_required:
            raise InvalidPlan(f"{joined(where, name)}: missing, expected {option.expected}; add it", code="FN-0216")
    return {name: _checked(joined(where, name), options[name], value) for name, value in given.items()}


def _checked(where: str, option: KeyField, value: Option) -> Option:
    if option.type is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    converted = as_float(value) if option.type is float else value
    if not isinstance(converted, KINDS) or type(converted) is not option.type or not option.accepts(converted):
        raise InvalidPlan(f"{where}: got {shown(value)}, expected {option.expected}; correct it", code="FN-0216")
    return converted


def _option(parameter: inspect.Parameter) -> KeyField | None:
    hint = parameter.annotation
    kinds = {*get_args(hint)} - {NoneType} if isinstance(hint, UnionType) else {hint}
    if len(kinds) == 1 and kinds <= {*KINDS}:
        hint = Annotated[hint, Key(text="")]
    field = key_field(parameter.name, hint, MISSING if parameter.default is EMPTY else parameter.default)
    if field is not None and field.type in KINDS:
        return field
    if parameter.default is EMPTY:
        names = ", ".join(kind.__name__ for kind in KINDS)
        got = "no annotation" if parameter.annotation is EMPTY else shown(parameter.annotation)
        raise TypeError(f"option {parameter.name}: got {got}, expected the annotation {names}")
    return None


@contextmanager
def passing(parts: PassedParts) -> Iterator[None]:
    """Let the Plans within the block name these parts.

    The block's context has them: its thread, and the tasks and copied contexts that begin within. So no other
    simulation of the process sees them. Coordinators and devices never enter such a block.
    """
    token = _PARTS.set(MappingProxyType(dict(parts)))
    try:
        yield
    finally:
        _PARTS.reset(token)


def passed_names(group: str) -> tuple[str, ...]:
    """Return the names of the parts of a group that are passed here."""
    return tuple(name for each, name in _PARTS.get() or () if each == group)


def passed_factory(group: str, name: str) -> Factory | None:
    """Return the factory of a passed part; None if none has the name."""
    return (_PARTS.get() or {}).get((group, name))


def missing_text(group: str, name: str) -> str:
    """Return what is needed to use the name of a passed part elsewhere."""
    return (
        f"got {name!r}, an object that a simulation passed without a package, so its code is not in the record; "
        f"install a package whose entry point {name!r} in the group {group} is its factory"
    )
