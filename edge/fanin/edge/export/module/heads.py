"""The layer that ``trains="head"`` selects: the last layer registered, which must also be the last one called.

A module lists its layers in the order of their registration, which can differ from the order of their calls. So the
module is called once, and the selected layer must be the last one with parameters to finish.
"""

import copy

import torch
from torch import nn

from fanin.edge.export.app.app import App
from fanin.edge.export.app.calls import guarded
from fanin.protos.errors import UnsupportedModel


def head_of(app: App, module: nn.Module) -> tuple[set[nn.Parameter], str]:
    """Select the last registered layer that learns.

    Returns:
        (parameters of the layer, a note that names it).

    Raises:
        UnsupportedModel: Another layer that learns is called after it.
    """
    # A parameter that two layers share is listed under both names: the last layer may own it under the second one.
    trainable = [
        (name, value) for name, value in module.named_parameters(remove_duplicate=False) if value.requires_grad
    ]
    if not trainable:
        return set(), ""
    owner = trainable[-1][0].rpartition(".")[0]
    what = _described(owner, module.get_submodule(owner))
    finished = _call_order(app, module)
    if owner in finished and finished[-1] != owner:
        last = _described(finished[-1], module.get_submodule(finished[-1]))
        raise UnsupportedModel(
            f"App {app.name}: trains 'head' selects {what}, the last layer registered, but the module's output comes "
            f"from {last}; register that layer last, or freeze the rest with requires_grad_(False) and train 'full'",
            code="FN-0752",
        )
    chosen = {value for name, value in trainable if name.rpartition(".")[0] == owner}
    return chosen, f"head: {what}, the last layer registered, is all that learns"


def _described(name: str, layer: nn.Module) -> str:
    sizes = f" {layer.in_features} -> {layer.out_features}" if isinstance(layer, nn.Linear) else ""
    return f"module {name or 'itself'} ({type(layer).__name__}{sizes})"


def _call_order(app: App, module: nn.Module) -> list[str]:
    """Return the innermost layers with parameters that learn, in the order in which their forward finishes."""
    names: list[str] = []
    # A copy: a pass may change running statistics.
    copied = copy.deepcopy(module).eval()
    owners = [
        name
        for name, layer in copied.named_modules()
        if any(value.requires_grad for value in layer.parameters(recurse=False))
    ]
    for name in owners:
        inside = f"{name}." if name else ""
        if any(other != name and other.startswith(inside) for other in owners):
            continue

        def record(_: nn.Module, inputs: object, output: object, name: str = name) -> None:
            names.append(name)

        copied.get_submodule(name).register_forward_hook(record)
    with torch.no_grad():
        guarded(
            f"App {app.name}: the module on its calibration data", copied, lambda: app.call(copied, app.examples(2))
        )
    return names
