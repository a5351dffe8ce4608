"""A torch module's parameters as one canonical flat vector, and back.

What travels are the parameters that require a gradient, under the names of ``named_parameters``, and the running
statistics of norms that train: the layout that the Bundle's manifest has too, so a vector fits everywhere or nowhere.
An App whose recipe trains only a part is that part here, too: ``trained_module`` gives the module with its adapters.
"""

import numpy as np
import torch
from torch import Tensor

from fanin.edge.export import App
from fanin.edge.export.prepare import prepare, running_statistics
from fanin.edge.tensors import Float32s, TensorSpec, TensorTable
from fanin.protos.errors import InvalidInput


def trained_module(app: App) -> torch.nn.Module:
    """The App's module as it learns. Raises UnsupportedModel."""
    return app.module if app.recipe.trains == "full" else prepare(app).eager


def parameter_table(module: torch.nn.Module) -> TensorTable:
    """The layout of what travels of a module."""
    return TensorTable.of({name: tuple(value.shape) for name, value in _travelling(module).items()})


def parameter_vector(module: torch.nn.Module) -> Float32s:
    """What travels (num_values,), a copy."""
    found = {name: value.detach().cpu().numpy() for name, value in _travelling(module).items()}
    return parameter_table(module).flatten(found)


def load_parameters(module: torch.nn.Module, table: TensorTable, flat: Float32s) -> None:
    """Put parameters (num_values,) into a module.

    Raises InvalidInput, and changes nothing, if they are another model's or not all finite.
    """
    expected = parameter_table(module)
    if table != expected:
        got, wanted = set(table.specs), set(expected.specs)
        raise InvalidInput(
            f"parameters: {len(got - wanted)} of {len(got)} tensors are not the model's and {len(wanted - got)} are "
            f"missing, such as {_some(got ^ wanted)}; expected the parameters of this very model"
        )
    if not np.isfinite(flat).all():
        raise InvalidInput(f"parameters: got {int((~np.isfinite(flat)).sum())} values that are not finite")
    views = table.views(flat)
    with torch.no_grad():
        for name, value in _travelling(module).items():
            value.copy_(torch.from_numpy(np.array(views[name])))


def _travelling(module: torch.nn.Module) -> dict[str, Tensor]:
    learned: dict[str, Tensor] = {name: value for name, value in module.named_parameters() if value.requires_grad}
    return learned | running_statistics(module)


def _some(specs: set[TensorSpec]) -> str:
    return ", ".join(sorted(f"{spec.name} {list(spec.shape)}" for spec in specs)[:2])
