"""The mods of a Flower app that fanin does not support: those of differential privacy and of secure aggregation.

An app that has one runs, and its device logs a warning. Each needs something that is not there: a source of noise that
is fit for privacy and a range that holds it, or messages of Flower's server.
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
        "secagg_mod": _NO_SERVER,
        "secaggplus_mod": _NO_SERVER,
    }
)
"""The mods of Flower 1.41 by name, and the reason of each."""


def warnings_of(functions: Iterable[object]) -> tuple[str, ...]:
    """Return a warning for each unsupported mod, in the order of the table.

    Args:
        functions: The functions of the app, each wrapped by its mods.
    """
    used = {name for function in functions for mod in _mods_around(function) for name in _names(mod)}
    return tuple(
        f"mod {name} is not supported: {reason}. Its result is neither differential privacy nor masked; see "
        "docs/explanation/privacy.md"
        for name, reason in UNSUPPORTED.items()
        if name in used
    )


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
