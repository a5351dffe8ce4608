"""Layers and parameters that have two places in a model: they are replaced in both, and are one still."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn


def replace_modules(root: nn.Module, make: Callable[[str, nn.Module], nn.Module | None]) -> None:
    """Put what ``make`` gives for (name, module) in its place, and leave it where that is None.

    ``make`` is asked once for each module, under its first name. The root's name is "", and it has no place.
    """
    made: dict[nn.Module, nn.Module | None] = {}
    for name, module in list(root.named_modules(remove_duplicate=False)):
        if module not in made:
            made[module] = make(name, module)
        found = made[module]
        if found is not None and name:
            parent, _, leaf = name.rpartition(".")
            setattr(root.get_submodule(parent), leaf, found)


def call_with(module: nn.Module, values: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> object:
    """What the module says to ``inputs`` with these parameters and buffers, named as ``named_parameters`` does.

    ``functional_call`` ties weights by itself, but takes a layer with two names for two, and leaves the second one's
    values in the module: here each layer has one name.
    """
    first: dict[Tensor, str] = {}
    given: dict[str, Tensor] = {}
    for owner, layer in module.named_modules():
        for named in (layer.named_parameters, layer.named_buffers):
            for leaf, tensor in named(recurse=False, remove_duplicate=False):
                place = f"{owner}.{leaf}" if owner else leaf
                name = first.setdefault(tensor, place)
                if name in values:
                    given[place] = values[name]
    return torch.func.functional_call(module, given, tuple(inputs), tie_weights=False)
