"""The requirements for the module of an App, checked before the module runs."""

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from fanin.protos.errors import UnsupportedModel

INNER: Final[Mapping[str, str]] = MappingProxyType(
    {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
)
"""The attribute with the module itself, by the class of torch that wraps it."""


def check_module(what: str, module: object) -> None:
    """Raise UnsupportedModel unless this is a module of torch that can be copied.

    Args:
        what: Prefix of error messages.
        module: The value of the App's argument ``module``.
    """
    if isinstance(module, type):
        raise UnsupportedModel(
            f"{what}: got the class {module.__name__} as module, expected an instance; write {module.__name__}(...)",
            code="FN-0714",
        )
    if not isinstance(module, torch.nn.Module):
        raise UnsupportedModel(
            f"{what}: got a module of type {type(module).__name__}, expected a torch.nn.Module", code="FN-0714"
        )
    kind = type(module).__name__
    if kind in INNER or isinstance(module, torch.jit.ScriptModule):
        advice = f"pass module.{INNER[kind]}" if kind in INNER else "pass the module that torch.jit was given"
        raise UnsupportedModel(
            f"{what}: got a module inside torch's {kind}, expected the module itself; {advice}", code="FN-0714"
        )
    for path, layer in module.named_modules():
        for name, value in vars(layer).items():
            # torch cannot copy a tensor that autograd has computed.
            if isinstance(value, Tensor) and not value.is_leaf:
                where = f"module {path or 'itself'} ({type(layer).__name__})"
                raise UnsupportedModel(
                    f"{what}: {where} keeps {name}, which was computed from its parameters, expected a module that "
                    "computes it in forward; replace torch.nn.utils.weight_norm by "
                    "torch.nn.utils.parametrizations.weight_norm",
                    code="FN-0716",
                )
    check_copies(what, module)


def check_copies(what: str, module: torch.nn.Module) -> None:
    """Raise UnsupportedModel, with the attribute, unless ``copy.deepcopy`` copies the module: an App keeps its own."""
    # The values of tensors need no copy here.
    tensors = {id(value): value for value in (*module.parameters(), *module.buffers())}
    try:
        copy.deepcopy(module, dict(tensors))
    except Exception as exc:  # the code of any attribute
        for path, layer in module.named_modules():
            others = {id(inner): inner for inner in layer.modules()}
            for name, value in vars(layer).items():
                where = f"module {path or 'itself'} ({type(layer).__name__}) with {name}"
                _check_copy(f"{what}: {where}", value, others | tensors)
        raise _uncopied(f"{what}: module {type(module).__name__}", exc) from exc


def _check_copy(what: str, value: object, memo: dict[int, object]) -> None:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception as exc:  # the code of the attribute
        raise _uncopied(what, exc) from exc


def _uncopied(what: str, exc: Exception) -> UnsupportedModel:
    return UnsupportedModel(
        f"{what} cannot be copied ({type(exc).__name__}: {' '.join(str(exc).split())}), expected a module for "
        "copy.deepcopy; keep such an object outside of the module, or give its class a __deepcopy__",
        code="FN-0716",
    )
