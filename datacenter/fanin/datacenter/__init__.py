"""Training in a datacenter: one model on a mesh of ranks, and its way into a federation.

    from fanin.datacenter import PlanOptions, plan, train

    print(plan(PlanOptions(model="1.5b", world=64)).choices[0].reason)
    print(train("train.toml", on_step=print).metrics.trained.losses)

Importing this package does not import torch; the first use of a name does. Rooms, in reading order:

- ``jobs``: a job's launcher and its ranks.
- ``config``: a job's config and its checks.
- ``files``: the files that launcher and ranks exchange.
- ``data``: samples and their order.
- ``models``: the models that fanin trains.
- ``families``: the kinds of models that a config names.
- ``training``: the training loop.
- ``parallel``: the engine that computes one process's numbers on any mesh of ranks.
- ``ranks``: the mesh, and a rank's device and process group.
- ``checkpoints``: saving, resuming, and weights in and out.
- ``observers``: the events of a training, and who receives them.
- ``watch``: measurements, the watchdog and the diagnosis of hangs.
- ``planner``: predictions of time and memory.
- ``network``: links, collectives and the bytes that they send.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fanin.datacenter.config.train_config import TrainConfig
    from fanin.datacenter.jobs.launch import Placement, train
    from fanin.datacenter.jobs.torchrun import Elastic
    from fanin.datacenter.planner.options import PlanOptions, plan

__all__ = ["Elastic", "Placement", "PlanOptions", "TrainConfig", "plan", "train"]

_MODULES: Final = {
    "Elastic": "jobs.torchrun",
    "Placement": "jobs.launch",
    "PlanOptions": "planner.options",
    "TrainConfig": "config.train_config",
    "plan": "planner.options",
    "train": "jobs.launch",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
