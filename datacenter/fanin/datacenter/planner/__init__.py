"""Chooses how to spread a model over ranks: predicts the step time and the memory of every legal layout.

A *layout* here is a mesh with its schedule, microbatches and recomputation. All predictions are formulas; tests compare
them with measurements. Nothing is started.

Modules, in reading order:

- ``facts``: the sizes and parameters of a model.
- ``presets``: model configs by name, and from a TOML file.
- ``spread``: the part of a job that one rank computes and stores.
- ``traffic``: the bytes that a rank sends in a step.
- ``memory``: the peak memory of a rank in bytes.
- ``bubble``: the idle time of each pipeline schedule.
- ``timing``: the seconds of a step.
- ``choices``: the request, and one layout with its predictions.
- ``search``: enumerates all layouts and sorts them.
- ``options``: ``plan`` and ``PlanOptions``, the public function and its options.
"""

from fanin.datacenter.planner.choices import LayoutChoice, LayoutRequest
from fanin.datacenter.planner.search import plan, price

__all__ = ["LayoutChoice", "LayoutRequest", "plan", "price"]
