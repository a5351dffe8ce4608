"""Distributions of numbers that differ between devices, drawn from a seed.

The generator is Python's own ``random.Random``, whose streams are the same in all versions of Python.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Final, Protocol, TypeVar

from fanin.protos.errors import InvalidInput, SubjectError
from fanin.protos.numbers import are_numbers, is_number

T = TypeVar("T")


class Distribution(Protocol):
    """A distribution of positive numbers."""

    def draw(self, rng: random.Random) -> float:
        """Draw a number. All randomness comes from ``rng``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """The same number for all devices."""

    value: float

    def __post_init__(self) -> None:
        _check(self, "value", lambda: self.value > 0.0)

    def draw(self, rng: random.Random) -> float:
        """See Distribution."""
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """All numbers from ``low`` to ``high`` are equally probable."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check(self, "low <= high", lambda: 0.0 < self.low <= self.high)

    def draw(self, rng: random.Random) -> float:
        """See Distribution."""
        return rng.uniform(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """The logarithm is normal: half of the devices are below ``median``. ``sigma`` 1 is a factor of 2.7."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        _check(self, "median", lambda: self.median > 0.0 and self.sigma > 0.0)

    def draw(self, rng: random.Random) -> float:
        """See Distribution."""
        return rng.lognormvariate(math.log(self.median), self.sigma)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto:
    """A heavy tail: at least ``least``, and above ``x`` with the probability ``(least / x) ** alpha``."""

    least: float
    alpha: float

    def __post_init__(self) -> None:
        _check(self, "least", lambda: self.least > 0.0 and self.alpha > 0.0)

    def draw(self, rng: random.Random) -> float:
        """See Distribution."""
        return self.least * rng.paretovariate(self.alpha)


DISTRIBUTIONS: Final[Mapping[str, Callable[..., Distribution]]] = MappingProxyType(
    {"fixed": Fixed, "uniform": Uniform, "lognormal": Lognormal, "pareto": Pareto}
)
"""The distributions by their name in a file."""


def distribution_of(what: str, value: object) -> Distribution:
    """Return the distribution that a file describes: a number, or a table with a ``name`` and its parameters.

    Raises:
        InvalidInput: The value describes no distribution. The message begins with ``what``.
    """
    if is_number(value):
        value = {"name": "fixed", "value": value}
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(name, str) or name not in DISTRIBUTIONS:
        raise InvalidInput(
            f"{what}: got {value!r}, expected a number or a table with a name of {', '.join(DISTRIBUTIONS)}, as in "
            '{ name = "lognormal", median = 50.0, sigma = 1.0 }',
            code="FN-1153",
        )
    return built(what, DISTRIBUTIONS[name], {key: item for key, item in value.items() if key != "name"})


def built(what: str, kind: Callable[..., T], options: Mapping[str, object]) -> T:
    """Return a record of numbers from a table of a file. Raises InvalidInput; the message begins with ``what``."""
    known = fields(kind)  # type: ignore[arg-type]
    names = [each.name for each in known]
    missing = [each.name for each in known if each.default is MISSING and each.name not in options]
    numbers = {key: item for key, item in options.items() if is_number(item)}
    if not set(options) <= set(names) or numbers != options:
        raise InvalidInput(f"{what}: got {dict(options)}, expected numbers for {', '.join(names)}", code="FN-1151")
    if missing:
        raise InvalidInput(
            f"{what}: got {dict(options)} without {', '.join(missing)}, expected numbers for {', '.join(names)}",
            code="FN-1151",
        )
    try:
        return kind(**numbers)
    except SubjectError as exc:
        raise InvalidInput(f"{what}: {exc.fault}", code="FN-1152") from exc


def _check(distribution: object, what: str, is_valid: Callable[[], bool]) -> None:
    values = [getattr(distribution, each.name) for each in fields(distribution)]  # type: ignore[arg-type]
    if not (are_numbers(*values) and all(map(math.isfinite, values)) and is_valid()):
        raise InvalidInput(
            f"distribution: got {distribution}, expected finite positive numbers, {what}", code="FN-1152"
        )
