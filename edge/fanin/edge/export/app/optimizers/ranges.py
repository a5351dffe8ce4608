"""The ranges of an optimizer's settings, and the settings that a graph has as inputs."""

from collections.abc import Collection, Mapping
from typing import Final

from fanin.edge.bundles.manifest import OptimizerSetting
from fanin.edge.export.app.optimizers.fields import are_names
from fanin.protos.errors import UnsupportedModel
from fanin.protos.numbers import is_number

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
            f"({min(known)!r},)"
        )
    return tuple(settable)


def check_epsilon(name: str, epsilon: object) -> None:
    """Raise UnsupportedModel unless ``epsilon`` is at least ``MIN_EPSILON`` and below 1.0."""
    # ``rules.SCALE`` times a smaller one would be an added constant that is replaced by 0.
    if not (is_number(epsilon) and MIN_EPSILON <= epsilon < 1.0):
        raise UnsupportedModel(
            f"{name}: got epsilon {epsilon!r}, expected a float of at least {MIN_EPSILON:g} and below 1.0"
        )


def check_range(name: str, value: object, end: float) -> None:
    """Raise UnsupportedModel unless a setting is at least 0.0 and below ``end``."""
    if not (is_number(value) and 0.0 <= value < end):
        raise UnsupportedModel(f"optimizer: got {name} {value!r}, expected a float of at least 0.0 and below {end}")
