"""From a torch module to a signed Bundle. The only room of the edge that imports torch."""

from fanin.edge.export.app import App, Loss, cross_entropy, load_app
from fanin.edge.export.build import export_app

__all__ = ["App", "Loss", "cross_entropy", "export_app", "load_app"]
