"""The types of the fields of an App, its Recipe and its optimizer, and the ranges of an optimizer's settings.

They are checked when an object is created. A value of another type would fail later, in a comparison or a loop, with a
text that names neither the field nor the value. Or it would be accepted by mistake: each text but the empty one counts
as True.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Final, TypeGuard

from fanin.edge.bundles.manifest import OptimizerSetting
from fanin.protos.errors import UnsupportedModel
from fanin.protos.numbers import is_number


def integer(what: str, value: object) -> int:
    """Return a number as an int: those of numpy and torch are accepted. Raises UnsupportedModel."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]  # a TypeError otherwise
    except TypeError:
        pass
    raise UnsupportedModel(f"{what}: got {value!r}, expected an int", code="FN-0711")


def check_switch(what: str, value: object) -> None:
    """Raise UnsupportedModel unless a value is True or False."""
    if not isinstance(value, bool):
        raise UnsupportedModel(f"{what}: got {value!r}, expected True or False", code="FN-0711")


def are_names(value: object) -> TypeGuard[Sequence[str]]:
    """Return whether a value is a list or another sequence of texts, and no text itself."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return False
    return all(isinstance(name, str) for name in value)


MIN_EPSILON: Final = 1e-16


def present(settings: Mapping[str, float], settable: Collection[str]) -> dict[str, OptimizerSetting]:
    """Return settings below 1.0, without those that are 0.0 and not settable."""
    return betas(**{name: value for name, value in settings.items() if value or name in settable})


def betas(**settings: float) -> dict[str, OptimizerSetting]:
    """Return settings below 1.0, also those that are 0.0."""
    return {name: OptimizerSetting(default=value, below=1.0) for name, value in settings.items()}


def decay(weight_decay: float, settable: Collection[str]) -> dict[str, OptimizerSetting]:
    """Return the weight decay as a setting, unless it is 0.0 and not settable."""
    is_present = weight_decay or "weight_decay" in settable
    return {"weight_decay": OptimizerSetting(default=weight_decay)} if is_present else {}


def checked_settable(optimizer: str, settable: object, known: Collection[str]) -> tuple[str, ...]:
    """Return the names of settable settings. Raises UnsupportedModel unless they are settings of the optimizer."""
    if not are_names(settable) or not {*settable} <= {*known}:
        raise UnsupportedModel(
            f"{optimizer}: settable: got {settable!r}, expected a tuple of names of {sorted(known)}, such as "
            f"({min(known)!r},)",
            code="FN-0746",
        )
    return tuple(settable)


def check_epsilon(name: str, epsilon: object) -> None:
    """Raise UnsupportedModel unless ``epsilon`` is at least ``MIN_EPSILON`` and below 1.0."""
    # ``rules.SCALE`` times a smaller one would be an added constant that is replaced by 0.
    if not (is_number(epsilon) and MIN_EPSILON <= epsilon < 1.0):
        raise UnsupportedModel(
            f"{name}: got epsilon {epsilon!r}, expected a float of at least {MIN_EPSILON:g} and below 1.0",
            code="FN-0746",
        )


def check_range(name: str, value: object, end: float) -> None:
    """Raise UnsupportedModel unless a setting is at least 0.0 and below ``end``."""
    if not (is_number(value) and 0.0 <= value < end):
        raise UnsupportedModel(
            f"optimizer: got {name} {value!r}, expected a float of at least 0.0 and below {end}", code="FN-0746"
        )
