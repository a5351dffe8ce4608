"""The mods of a Flower app that fanin does not support: those of differential privacy and of secure aggregation.

Each needs something that is not there: a source of noise that is fit for privacy and a range that holds it, or messages
of Flower's server. An app with a mod of differential privacy runs, and its device logs a warning. An app with a mod of
secure aggregation is refused: its user relies on masks, and the mod fails without these messages.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

_NO_SERVER: Final = "it needs messages of Flower's server, which fanin does not send"
UNSUPPORTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "LocalDpMod": "a Mersenne Twister draws its noise, and the grid of a Round may cut it",
        "fixedclipping_mod": _NO_SERVER,
        "adaptiveclipping_mod": _NO_SERVER,
    }
)
"""The mods of Flower 1.41 by name, and the reason of each."""
REFUSED: Final = ("secagg_mod", "secaggplus_mod")
"""The mods of Flower 1.41 that mask."""
PAGE: Final = "docs/explanation/privacy.md#mods"


def warnings_of(functions: Iterable[object]) -> tuple[str, ...]:
    """Return a warning for each unsupported mod, in the order of the table.

    Args:
        functions: The functions of the app, each wrapped by its mods.
    """
    used = _used(functions)
    return tuple(
        f"mod {name} is not supported: {reason}. Its result is no differential privacy; see {PAGE}"
        for name, reason in UNSUPPORTED.items()
        if name in used
    )


def refusal_of(functions: Iterable[object]) -> str:
    """Return the text of the error for an app with a mod that is refused; "" for another one. See ``warnings_of``."""
    used = _used(functions)
    mods = [name for name in REFUSED if name in used]
    if not mods:
        return ""
    return f"got the mod {mods[0]}, but {_NO_SERVER}, so nothing would be masked; remove it, and read {PAGE}"


def _used(functions: Iterable[object]) -> set[str]:
    return {name for function in functions for mod in _mods_around(function) for name in _names(mod)}


def _mods_around(function: object) -> Iterator[object]:
    """Yield the mods around a function. Flower keeps them in closures alone (``flwr.client.mod.utils.make_ffn``)."""
    while inspect.isfunction(function) and {"_ffn", "_mod"} <= {*function.__code__.co_freevars}:
        closure: Mapping[str, object] = inspect.getclosurevars(function).nonlocals
        yield closure["_mod"]
        function = closure["_ffn"]


def _names(mod: object) -> Iterator[str]:
    """Yield the name of a mod that is a function, or the names of its class and of its base classes."""
    if inspect.isfunction(mod):
        yield mod.__name__
    else:
        yield from (each.__name__ for each in type(mod).__mro__)
