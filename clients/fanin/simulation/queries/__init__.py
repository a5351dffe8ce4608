"""Statistics of simulated clients: ``simulated`` plays a statistics Run on a virtual clock."""

from fanin.simulation.queries.simulated import simulate_statistics

__all__ = ["simulate_statistics"]
