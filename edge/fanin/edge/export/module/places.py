"""Modules and tensors of a model in their places: those that occur twice are replaced together and stay one."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn


def replace_modules(root: nn.Module, make: Callable[[str, nn.Module], nn.Module | None]) -> None:
    """Replace modules in a model.

    Args:
        root: The model, changed in place. Its own name is "", and it cannot be replaced itself.
        make: (name, module) -> replacement, or None to keep the module. It is called once for each module, with the
            first of its names.
    """
    replacements: dict[nn.Module, nn.Module | None] = {}
    for name, module in list(root.named_modules(remove_duplicate=False)):
        if module not in replacements:
            replacements[module] = make(name, module)
        replacement = replacements[module]
        if replacement is not None and name:
            parent, _, leaf = name.rpartition(".")
            setattr(root.get_submodule(parent), leaf, replacement)


def call_with(
    module: nn.Module,
    values: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    keywords: Mapping[str, Tensor] = MappingProxyType({}),
) -> object:
    """Call a module with other parameters and buffers.

    ``functional_call`` ties weights itself, but treats a module with two names as two modules, and leaves the values of
    the second one in place. Here each module has one name.

    Args:
        module: The module.
        values: Parameters and buffers, named as by ``named_parameters``.
        inputs: Positional arguments.
        keywords: Keyword arguments.

    Returns:
        The output of the module.
    """
    first: dict[Tensor, str] = {}
    tensors: dict[str, Tensor] = {}
    for owner, layer in module.named_modules():
        for named in (layer.named_parameters, layer.named_buffers):
            for leaf, tensor in named(recurse=False, remove_duplicate=False):
                place = f"{owner}.{leaf}" if owner else leaf
                name = first.setdefault(tensor, place)
                if name in values:
                    tensors[place] = values[name]
    return torch.func.functional_call(module, tensors, tuple(inputs), dict(keywords), tie_weights=False)


def store_by_rows(module: nn.Module) -> None:
    """Let each parameter, buffer and other tensor attribute of a module be contiguous, with the same values.

    A module may have another memory format, such as ``torch.channels_last``, or tensors that are views: ``w.t()``. A
    graph has no strides, so this changes no result. But torch chooses operators by strides.
    """
    for layer in module.modules():
        attributes = (*layer.parameters(recurse=False), *layer.buffers(recurse=False), *vars(layer).values())
        for value in attributes:
            if isinstance(value, Tensor) and value.layout == torch.strided:
                # The tensor stays the same object: layers may share it.
                value.data = value.data.contiguous()
