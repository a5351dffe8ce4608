"""The inputs of a module by name.

An App has its inputs as a tensor, a tuple or a dict. Each becomes a dict of tensors, here and only here:

- A tensor is named ``x`` and is the first positional argument of ``forward``.
- The tensors of a tuple have the names of the parameters of ``forward``, in their order.
- The names of a dict are those of parameters of ``forward``.

The names are those of the graphs' inputs and of the arrays on devices.
"""

import inspect
from collections.abc import Mapping
from itertools import takewhile
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fanin.edge.export.app.inputs.checks import as_input
from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.runtimes.graphs import RESERVED, X
from fanin.protos.errors import UnsupportedModel

AnyArray = Tensor | npt.NDArray[np.generic]
ExampleInputs = AnyArray | tuple[AnyArray, ...] | Mapping[str, AnyArray]
"""Inputs of a module (n, ...): a tensor or array, one for each argument, or those by the name of the argument."""
BY_POSITION: Final = inspect.Parameter.POSITIONAL_ONLY
BY_NAME: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD
FORMS: Final = "pass a tensor, a tuple in the order of forward's parameters, or a dict with their names"


def named_tensors(what: str, module: nn.Module, value: object) -> Tensors:
    """Return the inputs of a module by name.

    Args:
        what: Prefix of error messages.
        module: The module that accepts them.
        value: A tensor, a tuple or a dict of tensors or numpy arrays, each (n, ...). Arrays are copied into tensors.

    Raises:
        UnsupportedModel: A part is no tensor, a name is reserved, ``forward`` does not accept the inputs, or they
            differ in their number of samples.
    """
    parts: Mapping[object, object] = {X: value}
    if isinstance(value, Mapping):
        parts = dict(value)
    elif isinstance(value, tuple):
        parts = dict(zip(_positions(what, module, len(value)), value, strict=True))
    tensors = {}
    for name, part in parts.items():
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
            raise UnsupportedModel(
                f"{what}: got an input of the name {name!r}, expected the name of a parameter of forward that is not "
                f"one of {sorted(RESERVED)}, which other inputs and outputs of the graphs or arguments of numpy.savez "
                "have; rename the parameter",
                code="FN-0731",
            )
        tensors[name] = as_input(f"{what} {name}" if parts.keys() != {X} else what, part)
    _check_accepted(what, module, tensors)
    lengths = {name: len(tensor) if tensor.dim() else 0 for name, tensor in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise UnsupportedModel(f"{what}: got {lengths} samples, expected the same number in each input", code="FN-0728")
    return tensors


def call_module(module: nn.Module, inputs: Tensors) -> object:
    """Return the output of a module for inputs by name."""
    args, named = arguments_of(module, inputs)
    output: object = module(*args, **named)
    return output


def arguments_of(module: nn.Module, inputs: Tensors) -> tuple[tuple[Tensor, ...], Tensors]:
    """Return the positional and the keyword arguments of a module for inputs by name."""
    if inputs.keys() == {X}:
        return (inputs[X],), {}
    parameters = inspect.signature(module.forward).parameters
    names = [name for name, parameter in parameters.items() if parameter.kind is BY_POSITION]
    positions = [*takewhile(inputs.__contains__, names)]
    named = {name: value for name, value in inputs.items() if name not in positions}
    return tuple(inputs[name] for name in positions), named


def rows_of(inputs: Tensors, index: Tensor | slice) -> Tensors:
    """Return some samples of each input."""
    return {name: value[index] for name, value in inputs.items()}


def num_samples(inputs: Tensors) -> int:
    """Return the number of samples."""
    return len(next(iter(inputs.values())))


def split_inputs(inputs: Tensors, size: int) -> list[Tensors]:
    """Return the inputs in parts of at most ``size`` samples."""
    return [rows_of(inputs, slice(start, start + size)) for start in range(0, num_samples(inputs), size)]


def forms_of(inputs: Tensors) -> str:
    """Return dtypes and shapes in words, for messages."""
    return ", ".join(
        f"{'' if inputs.keys() == {X} else f'{name} '}{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        for name, value in inputs.items()
    )


def are_alike(inputs: Tensors, others: Tensors) -> bool:
    """Return whether inputs have the same names, dtypes and shapes of a sample."""
    return inputs.keys() == others.keys() and all(
        (value.dtype, value.shape[1:]) == (others[name].dtype, others[name].shape[1:]) for name, value in inputs.items()
    )


def _positions(what: str, module: nn.Module, num: int) -> list[str]:
    """Return the names of the first ``num`` parameters of a module."""
    signature = inspect.signature(module.forward)
    names = [name for name, parameter in signature.parameters.items() if parameter.kind in (BY_POSITION, BY_NAME)]
    if not 0 < num <= len(names):
        raise UnsupportedModel(
            f"{what}: got a tuple of {num} tensors, expected at most {len(names)}, one for each named parameter of "
            f"{type(module).__name__}.forward{signature}; pass the inputs alone, without labels",
            code="FN-0732",
        )
    return names[:num]


def _check_accepted(what: str, module: nn.Module, inputs: Tensors) -> None:
    args, named = arguments_of(module, inputs)
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **named)
    except TypeError as exc:
        raise UnsupportedModel(
            f"{what}: got the inputs {list(inputs)}, expected those of {type(module).__name__}.forward{signature} "
            f"({exc}); {FORMS}",
            code="FN-0732",
        ) from exc


def numpy_inputs(inputs: Tensors) -> dict[str, "npt.NDArray[np.float32] | npt.NDArray[np.int32]"]:
    """Return the inputs as numpy arrays: float32 values or int32 tokens."""
    return {name: value.numpy() for name, value in inputs.items()}


def torch_inputs(inputs: Mapping[str, npt.NDArray[np.generic]]) -> Tensors:
    """Return numpy arrays as tensors, which share their memory."""
    return {name: torch.from_numpy(value) for name, value in inputs.items()}
