"""Conversion between a torch module's parameters and one canonical flat vector.

The vector holds the parameters that require a gradient, under their names in ``named_parameters``, and the running
statistics of norms that train. A Bundle's manifest has the same layout, so a vector fits both or neither. If an App's
recipe trains only a part of the module, ``trained_module`` returns the module with its adapters.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fanin.edge.tensors import Float32s, TensorSpec, TensorTable, count_differences
from fanin.protos.errors import InvalidInput
from fanin.protos.texts import counted

if TYPE_CHECKING:
    # The exporter imports onnx and the TFLite converter. A rank without an App does not need them.
    from fanin.edge.export.app.app import App


def trained_module(app: "App") -> torch.nn.Module:
    """Return the module that the App trains. Raises UnsupportedModel."""
    from fanin.edge.export.module.prepare import prepare

    return app.module if app.recipe.trains == "full" else prepare(app).eager


def parameter_table(module: torch.nn.Module) -> TensorTable:
    """Return the layout of a module's vector."""
    return TensorTable.of({name: tuple(value.shape) for name, value in _vector_tensors(module).items()})


def parameter_vector(module: torch.nn.Module) -> Float32s:
    """Return a copy of a module's vector (num_values,)."""
    values = {name: value.detach().cpu().numpy() for name, value in _vector_tensors(module).items()}
    return parameter_table(module).flatten(values)


def load_parameters(module: torch.nn.Module, table: TensorTable, flat: Float32s) -> None:
    """Copy a vector into a module.

    Args:
        module: The module to change.
        table: Layout of the vector.
        flat: The vector (num_values,).

    Raises:
        InvalidInput: The vector belongs to another model, or has values that are not finite. Nothing has changed.
    """
    expected = parameter_table(module)
    if table != expected:
        received, known = ({spec.name: spec for spec in each.specs} for each in (table, expected))
        wrong = {name for name in received.keys() & known.keys() if received[name] != known[name]}
        differences = count_differences(received.keys() - known.keys(), wrong, known.keys() - received.keys())
        raise InvalidInput(
            f"parameters: got {counted(len(received), 'tensor')}: {differences or 'in another order'}, such as "
            f"{_examples(set(table.specs) ^ set(expected.specs))}; expected each parameter of this model and no "
            "other; complete them, or correct the model",
            code="FN-1315",
        )
    if not np.isfinite(flat).all():
        raise InvalidInput(
            f"parameters: got {counted(int((~np.isfinite(flat)).sum()), 'value')} that are not finite, expected finite "
            "ones; use earlier values",
            code="FN-1312",
        )
    views = table.views(flat)
    with torch.no_grad():
        for name, value in _vector_tensors(module).items():
            value.copy_(torch.from_numpy(np.array(views[name])))


def _vector_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    from fanin.edge.export.module.norms import running_statistics

    trained: dict[str, Tensor] = {name: value for name, value in module.named_parameters() if value.requires_grad}
    return trained | running_statistics(module)


def _examples(specs: set[TensorSpec]) -> str:
    return ", ".join(sorted(f"{spec.name} {list(spec.shape)}" for spec in specs)[:2])
