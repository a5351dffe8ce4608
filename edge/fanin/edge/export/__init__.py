"""From a torch module to a signed Bundle. No other room of the edge imports torch.

This is the front door: import the names in ``__all__`` from here. They are loaded on first use, so importing the room
imports neither torch nor the libraries of a graph format. An App that is only trained never loads the latter.

Floors, from the ground up. A floor imports only those below it (import-linter checks this):

- ``refusals``, ``quiet``: errors that name a module and a line; suppression of the libraries' noise.
- ``diagnosis/``: the reason of a failure and a remedy, imported only after a failure.
- ``app/``: the objects that an ML engineer writes: App, Recipe, losses, inputs, lengths.
- ``module/``: the module made traceable.
- ``graph/``: its train step, evaluation and inference as graphs of plain operators.
- ``formats/``: from graphs to files.
- ``verification/``: the checks that need no graph, and the files against eager torch.
- ``standalone/``: a Version as one plain file; ``vectorized/``: the train step of many clients, for simulations.
- ``build``: all steps of an export, and the check of an App, which omits the last one.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fanin.edge.export.app.app import App, inputs_of
    from fanin.edge.export.app.decompositions import check_decomposition
    from fanin.edge.export.app.loading import load_app
    from fanin.edge.export.app.losses import BatchLoss, Loss, cross_entropy, next_token, squared_error
    from fanin.edge.export.app.normalizing import normalization
    from fanin.edge.export.app.optimizers.lion import Lion
    from fanin.edge.export.app.optimizers.optimizer import Optimizer
    from fanin.edge.export.app.optimizers.recipe import Adapters, Recipe
    from fanin.edge.export.app.optimizers.rules import Adagrad, Adam, RmsProp, Sgd
    from fanin.edge.export.build import Exported, check_app, export
    from fanin.edge.export.refusals import Finding
    from fanin.edge.floors.floor import PrivacyFloor
    from fanin.edge.lengths import Lengths

__all__ = [
    "Adagrad",
    "Adam",
    "Adapters",
    "App",
    "BatchLoss",
    "Exported",
    "Finding",
    "Lengths",
    "Lion",
    "Loss",
    "Optimizer",
    "PrivacyFloor",
    "Recipe",
    "RmsProp",
    "Sgd",
    "check_app",
    "check_decomposition",
    "cross_entropy",
    "export",
    "inputs_of",
    "load_app",
    "next_token",
    "normalization",
    "squared_error",
]

OWNERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Adagrad": "app.optimizers.rules",
        "Adam": "app.optimizers.rules",
        "Adapters": "app.optimizers.recipe",
        "App": "app.app",
        "BatchLoss": "app.losses",
        "Exported": "build",
        "Finding": "refusals",
        "Lengths": "fanin.edge.lengths",
        "Lion": "app.optimizers.lion",
        "Loss": "app.losses",
        "Optimizer": "app.optimizers.optimizer",
        "PrivacyFloor": "fanin.edge.floors.floor",
        "Recipe": "app.optimizers.recipe",
        "RmsProp": "app.optimizers.rules",
        "Sgd": "app.optimizers.rules",
        "check_app": "build",
        "check_decomposition": "app.decompositions",
        "cross_entropy": "app.losses",
        "export": "build",
        "inputs_of": "app.app",
        "load_app": "app.loading",
        "next_token": "app.losses",
        "normalization": "app.normalizing",
        "squared_error": "app.losses",
    }
)
"""The module that defines each public name: in this room, or with its full name elsewhere."""


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562)."""
    if name not in OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    owner = OWNERS[name]
    return getattr(import_module(owner if owner.startswith("fanin.") else f"{__name__}.{owner}"), name)
