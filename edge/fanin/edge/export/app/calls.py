"""The App's own code: the requirements for its module, and calls whose exceptions become errors that name a line."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from fanin.edge.export.refusals import Untraceable
from fanin.protos.errors import UnsupportedModel

T = TypeVar("T")


def guarded(what: str, root: nn.Module, call: Callable[[], T]) -> T:
    """Return the result of a call that runs the App's code.

    Args:
        what: Prefix of error messages.
        root: The outermost module of the call. An error names the innermost one.
        call: The call.

    Raises:
        Untraceable: The call raised another exception.
    """
    try:
        return call()
    except UnsupportedModel:
        raise
    except Exception as exc:  # the App's own code may raise anything
        from fanin.edge.export.diagnosis.raised import refusal

        raise refusal(what, root, exc) from exc


def succeeds(root: nn.Module, call: Callable[[], object]) -> bool:
    """Return whether a call that runs the code of ``root`` raises nothing."""
    try:
        guarded("", root, call)
    except UnsupportedModel:
        return False
    return True


def versions(module: nn.Module) -> dict[str, int]:
    """Return the number of writes to each parameter of a module."""
    return {name: value._version for name, value in module.named_parameters()}


def check_parameters(what: str, module: nn.Module, before: Mapping[str, int], call: Callable[[], object]) -> None:
    """Check that a pass has written no parameter.

    Args:
        what: Prefix of the message.
        module: The module after the pass.
        before: Its ``versions`` before the pass.
        call: Repeats the pass.

    Raises:
        Untraceable: A parameter has been written.
    """
    after = versions(module)
    changed = sorted(name for name, version in before.items() if after.get(name) != version)
    if changed:
        from fanin.edge.export.diagnosis.watched import place_of_change

        place = place_of_change(module, changed[0], call)
        raise Untraceable(
            f"{what}: {place} writes its parameters {changed} in forward, which a functional graph cannot do",
            "compute another tensor from them (an Embedding: without max_norm)",
            place,
        )


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
            f"{what}: got the class {module.__name__} as module, expected an instance; write {module.__name__}(...)"
        )
    if not isinstance(module, torch.nn.Module):
        raise UnsupportedModel(f"{what}: got a module of type {type(module).__name__}, expected a torch.nn.Module")
    kind = type(module).__name__
    if kind in INNER or isinstance(module, torch.jit.ScriptModule):
        advice = f"pass module.{INNER[kind]}" if kind in INNER else "pass the module that torch.jit was given"
        raise UnsupportedModel(f"{what}: got a module inside torch's {kind}, expected the module itself; {advice}")
    for path, layer in module.named_modules():
        for name, value in vars(layer).items():
            # torch cannot copy a tensor that autograd has computed.
            if isinstance(value, Tensor) and not value.is_leaf:
                where = f"module {path or 'itself'} ({type(layer).__name__})"
                raise UnsupportedModel(
                    f"{what}: {where} keeps {name}, which was computed from its parameters, expected a module that "
                    "computes it in forward; replace torch.nn.utils.weight_norm by "
                    "torch.nn.utils.parametrizations.weight_norm"
                )
