"""A federation in memory: the production coordinator and devices in one process, on a virtual clock.

    found = simulate(scenario, folder)      # the same scenario, the same bits and the same log
    async with Federation(folder, seed=0) as federation: ...      # to be told step by step, within ``run_virtual``

It composes ``fanin.server`` and ``fanin.clients`` through the Protocol ``Fleet``; neither knows the other, or this.
What is replaced is the clock, the network, the threads and the training, and nothing else (docs/simulation.md).
"""

from fanin.simulation.federation import Federation
from fanin.simulation.scenario import Outcome, Scenario, simulate

__all__ = ["Federation", "Outcome", "Scenario", "simulate"]
