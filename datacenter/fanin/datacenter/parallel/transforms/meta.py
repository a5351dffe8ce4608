"""Parameters without values: on torch's meta device until a rank has its own slices.

A model on the meta device has names, shapes and ties, and uses no memory. It is cut and split first. Each rank then
allocates its own slices only, uninitialized, and the caller loads their values. Only parameters are on the meta device.
Buffers are small, are often computed when a module is built, and keep their values.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from fanin.datacenter.parallel.transforms.ties import shared_names


class RepeatedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """While active, an operator that fills a tensor without values draws as many random numbers as one with values.

    A rank that builds a model without values then draws the same later numbers as the rank that has them.
    """

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call the operator, and draw for a tensor without values."""
        is_draw = torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable
        if is_draw and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            func(torch.empty_like(args[0], device="cpu"), *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def parameters_on_meta() -> Iterator[list[tuple[nn.Module, nn.Parameter]]]:
    """Replace each parameter that is registered in this context by one on the meta device.

    Yields:
        The module and the parameter of each registration, in order. A tied parameter is listed once for each name.
    """
    registrations: list[tuple[nn.Module, nn.Parameter]] = []

    def replaced(module: nn.Module, name: str, value: nn.Parameter | None) -> nn.Parameter | None:
        if value is None or is_lazy(value):
            return None
        meta_value = value if value.is_meta else without_values(value)
        registrations.append((module, meta_value))
        return meta_value

    handle = register_module_parameter_registration_hook(replaced)  # type: ignore[arg-type]  # its annotation
    try:
        yield registrations
    finally:
        handle.remove()


def without_values(value: nn.Parameter) -> nn.Parameter:
    """Return a parameter on the meta device with the same shape, dtype and attributes."""
    return like(value, torch.empty_like(value, device="meta"))


def like(value: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """Return a parameter of other data with the attributes of ``value``."""
    parameter = nn.Parameter(data, requires_grad=value.requires_grad)
    parameter.__dict__.update(value.__dict__)
    return parameter


def is_on_meta(module: nn.Module) -> bool:
    """Return whether a parameter of a module has no value."""
    return any(value.is_meta for value in module.parameters())


def drop_values(module: nn.Module) -> None:
    """Move the parameters of a module to the meta device in place. Shared parameters stay shared."""
    replaced: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for key, value in list(part.named_parameters(recurse=False)):
            if id(value) not in replaced:
                replaced[id(value)] = value if value.is_meta else without_values(value)
            # Not register_parameter: recurrent layers override __setattr__ to keep a list of their weights.
            setattr(part, key, replaced[id(value)])


def materialize(part: nn.Module, device: torch.device) -> None:
    """Allocate the parameters of a part on a device, uninitialized.

    A part that has its values is moved to the device instead. ``to_empty`` separates shared parameters and overwrites
    buffers, so both are restored. A buffer that is on a GPU stays there: FSDP moves buffers to it, also if it offloads
    parameters to the CPU.
    """
    if not is_on_meta(part):
        part.to(device)
        return
    shared = shared_names(part)
    buffers = {name: _placed(buffer, device) for name, buffer in part.named_buffers(remove_duplicate=False)}
    part.to_empty(device=device)
    for names in shared:
        value = part.get_parameter(names[0])
        for name in names[1:]:
            owner, _, key = name.rpartition(".")
            setattr(part.get_submodule(owner), key, value)
    for name, buffer in buffers.items():
        owner, _, key = name.rpartition(".")
        setattr(part.get_submodule(owner), key, buffer)


def _placed(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    return buffer.to(device) if buffer.device.type == "cpu" else buffer
