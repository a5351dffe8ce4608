"""From a torch module to a signed Bundle. The only room of the edge that imports torch."""

from fanin.edge.export.app import Adapters, App, Recipe, inputs_of, load_app
from fanin.edge.export.build import Exported, export_app
from fanin.edge.export.check import check_app
from fanin.edge.export.losses import Loss, cross_entropy, next_token, squared_error
from fanin.edge.export.optimizers import Adam, Optimizer, Sgd

__all__ = [
    "Adam",
    "Adapters",
    "App",
    "Exported",
    "Loss",
    "Optimizer",
    "Recipe",
    "Sgd",
    "check_app",
    "cross_entropy",
    "export_app",
    "inputs_of",
    "load_app",
    "next_token",
    "squared_error",
]
