"""From a torch module to a signed Bundle. No other room of the edge imports torch.

This is the front door: import the names in ``__all__`` from here. They are loaded on first use, so importing the room
imports neither torch nor the libraries of a graph format. An App that is only trained never loads the latter.

Modules, in reading order:

- ``app``, ``losses``, ``optimizers``: the objects that an ML engineer writes; ``loading`` finds an App by name.
- ``build``: all steps of an export but the last one, ``sign``; ``check`` runs a build and reports its failures.
- ``diagnosis/``: after a failure, the parts of a module that cause it.
- ``inputs/``: the inputs of a module by name, and the output for the loss.
- ``prepare``: the module prepared for tracing; ``modules/`` has the layers that replace others for it.
- ``tracing/``: the module and its gradient as one graph of plain operators; ``decompositions/`` rewrites operators.
- ``vectorized/``: the train step of many clients at once, for simulations.
- ``formats``: an App's graphs in each format, by ``int8/``, ``onnx/`` and ``tflite/``; ``preprocess`` adds one more.
- ``cache/``: converted graphs on disk, by a digest of the traced ones.
- ``verification/``: the checks that need no graph, and the graphs against eager torch.
- ``standalone/``: a Version as one plain file, for users without fanin.
- ``apart``: a call in a fork, to build formats in parallel.
- ``refusals``, ``quiet``: errors that name a module and a line; suppression of the libraries' noise.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fanin.edge.export.app import App, inputs_of
    from fanin.edge.export.check import check_app
    from fanin.edge.export.decompositions.own import check_decomposition
    from fanin.edge.export.diagnosis.parts import Finding
    from fanin.edge.export.loading import load_app
    from fanin.edge.export.losses import Loss, cross_entropy, next_token, squared_error
    from fanin.edge.export.optimizers.lion import Lion
    from fanin.edge.export.optimizers.optimizer import Optimizer
    from fanin.edge.export.optimizers.recipe import Adapters, Recipe
    from fanin.edge.export.optimizers.rules import Adagrad, Adam, RmsProp, Sgd
    from fanin.edge.export.sign import Exported, export
    from fanin.edge.lengths import Lengths

__all__ = [
    "Adagrad",
    "Adam",
    "Adapters",
    "App",
    "Exported",
    "Finding",
    "Lengths",
    "Lion",
    "Loss",
    "Optimizer",
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
    "squared_error",
]

OWNERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Adagrad": "optimizers.rules",
        "Adam": "optimizers.rules",
        "Adapters": "optimizers.recipe",
        "App": "app",
        "Exported": "sign",
        "Finding": "diagnosis.parts",
        "Lengths": "fanin.edge.lengths",
        "Lion": "optimizers.lion",
        "Loss": "losses",
        "Optimizer": "optimizers.optimizer",
        "Recipe": "optimizers.recipe",
        "RmsProp": "optimizers.rules",
        "Sgd": "optimizers.rules",
        "check_app": "check",
        "check_decomposition": "decompositions.own",
        "cross_entropy": "losses",
        "export": "sign",
        "inputs_of": "app",
        "load_app": "loading",
        "next_token": "losses",
        "squared_error": "losses",
    }
)
"""The module that defines each public name: in this room, or with its full name elsewhere."""


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562)."""
    if name not in OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    owner = OWNERS[name]
    return getattr(import_module(owner if owner.startswith("fanin.") else f"{__name__}.{owner}"), name)
