"""Picks how to spread a model over ranks, by formulas that tests hold against what is measured.

``facts``: a model's numbers; ``spread``: a rank's part of them; ``traffic``, ``memory``, ``bubble``: what it sends,
keeps and waits; ``links`` and ``timing``: how long that takes; ``search``: all ways, the best first; ``presets``:
models by name.
"""

from fanin.datacenter.planner.search import Choice, Wanted, plan, price

__all__ = ["Choice", "Wanted", "plan", "price"]
