"""``trains="head"``: which layer that is, and that it has the last word.

A module lists its layers in the order in which they were registered, which need not be the order in which they are
called: so they are called once, and the layer that is taken must be the last one with parameters to be done.
"""

import copy

import torch
from torch import nn

from fanin.edge.export.app import App
from fanin.edge.export.refusals import guarded
from fanin.protos.errors import UnsupportedModel


def head_of(app: App, module: nn.Module) -> tuple[set[nn.Parameter], str]:
    """(the parameters of the last layer registered that learns, a note that says which it is).

    Raises UnsupportedModel if another layer follows it.
    """
    # A parameter that two layers share is listed in both: it may be the last one's, whatever it is called first.
    kept = [(name, value) for name, value in module.named_parameters(remove_duplicate=False) if value.requires_grad]
    if not kept:
        return set(), ""
    owner = kept[-1][0].rpartition(".")[0]
    what = _described(owner, module.get_submodule(owner))
    done = _done(app, module)
    if owner in done and done[-1] != owner:
        last = _described(done[-1], module.get_submodule(done[-1]))
        raise UnsupportedModel(
            f"App {app.name}: trains 'head' takes {what}, the last layer registered, but the module's output comes "
            f"from {last}; register that one last, or let requires_grad_(False) freeze the rest and train 'full'"
        )
    chosen = {value for name, value in kept if name.rpartition(".")[0] == owner}
    return chosen, f"head: {what}, the last layer registered, is all that learns"


def _described(name: str, layer: nn.Module) -> str:
    sizes = f" {layer.in_features} -> {layer.out_features}" if isinstance(layer, nn.Linear) else ""
    return f"module {name or 'itself'} ({type(layer).__name__}{sizes})"


def _done(app: App, module: nn.Module) -> list[str]:
    """The layers with parameters of their own that learn, as they are done; those around others do not count."""
    names: list[str] = []
    # A copy: a pass may move running statistics.
    ran = copy.deepcopy(module).eval()
    owners = [
        name
        for name, layer in ran.named_modules()
        if any(value.requires_grad for value in layer.parameters(recurse=False))
    ]
    for name in owners:
        inside = f"{name}." if name else ""
        if any(other != name and other.startswith(inside) for other in owners):
            continue

        def note(_: nn.Module, given: object, said: object, name: str = name) -> None:
            names.append(name)

        ran.get_submodule(name).register_forward_hook(note)
    with torch.no_grad():
        guarded(f"App {app.name}: the module on its calibration data", ran, lambda: ran(app.examples(2)))
    return names
