"""The options of a part that a Plan names: a rule, an outer optimizer, a stage, a selection policy.

The options of a part are the parameters of its factory after the arguments that fanin gives, or of the policy itself.
An annotation is a type (``int``, ``float``, ``str``, ``bool``, or one of these ``| None``), or
``Annotated[type, Key(...)]`` with a range:

    def trimmed_mean(plan: Plan, *, trim: Annotated[float, Key(text="...", above=0, below=0.5)] = 0.1) -> ColumnRule

So a wrong name, type or range in a Plan is one error of fanin, before the factory is called. A parameter of another
type is no option. It needs a default.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from difflib import get_close_matches
from itertools import islice
from types import NoneType, UnionType
from typing import Annotated, Final, get_args

from fanin.protos.errors import InvalidPlan
from fanin.protos.plans.entries import Option, as_float
from fanin.protos.plans.keys import Key, KeyField, joined, key_field, shown

KINDS: Final = (int, float, str, bool)
"""The types that an option may have."""
NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
EMPTY: Final = inspect.Parameter.empty


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
