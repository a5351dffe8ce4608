"""A federation in memory: the production coordinator and devices in one process, on a virtual clock.

    outcome = simulate(scenario, folder)                          # the same scenario, the same bits and the same log
    async with Federation(folder, seed=0) as federation: ...      # step by step, inside ``run_virtual``

The simulation composes ``fanin.server`` and ``fanin.clients`` through the Protocol ``Fleet``. Clock, network, threads
and training are replaced; everything else is production code (docs/simulation.md). The names in ``__all__`` are
public, and their modules are imported when a name is first used.

Reading order:

- ``scenario``: ``simulate``, one Run from a ``Scenario`` to its ``Outcome``
- ``federation``: ``Federation``, a coordinator with its devices
- ``coordinator``: one coordinator that can stop and start again
- ``operator``: the calls of an operator, without a network
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fanin.simulation.federation import Federation
    from fanin.simulation.scenario import Outcome, Scenario, simulate

__all__ = ["Federation", "Outcome", "Scenario", "simulate"]
_MODULES = {"Federation": "federation", "Outcome": "scenario", "Scenario": "scenario", "simulate": "scenario"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
