"""Calls of the App's own code, whose exceptions become errors that name a module and a line."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from torch import nn

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


def succeeds(call: Callable[[], object]) -> bool:
    """Return whether a call that runs the App's code raises nothing."""
    # Any error: the App's own code may raise anything.
    with suppress(Exception):
        call()
        return True
    return False


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
            code="FN-0765",
        )
