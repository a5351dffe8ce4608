"""The gradients of a module's parameters: those that a hook changes, and parameters that no gradient reaches.

Like torch's optimizers, a train graph does not change a parameter without a gradient, not even by weight decay.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor, nn

from fanin.protos.errors import UnsupportedModel

MAX_SHOWN: Final = 8


def check_hooks(what: str, module: nn.Module) -> None:
    """Raise UnsupportedModel for a hook on the gradient of a parameter: copies of the module have none."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UnsupportedModel(
                f"{what}: parameter {name} has a hook on its gradient, which no train graph would call; expected the "
                "same in the forward: w * mask + w.detach() * (1 - mask) lets a part of w learn, and "
                "requires_grad_(False) none of it",
                code="FN-0764",
            )


def unused_parameters(module: nn.Module, call: Callable[[nn.Module], object]) -> frozenset[str]:
    """Return the names of the parameters that require a gradient, but do not affect the output.

    Args:
        module: The module. It is copied.
        call: Returns the part of a copy's output that the loss uses: a tensor, or a dict of them.

    Returns:
        The names; none if the call fails, or if no gradient reaches any parameter. The trace reports both.
    """
    gradients = _gradients(module, call)
    unused = frozenset(name for name, gradient in gradients.items() if gradient is None)
    return unused if len(unused) < len(gradients) else frozenset()


def output_learns(module: nn.Module, call: Callable[[nn.Module], object]) -> bool:
    """Return whether a gradient of the output reaches a parameter. See ``unused_parameters`` for the arguments."""
    return any(gradient is not None for gradient in _gradients(module, call).values())


def _gradients(module: nn.Module, call: Callable[[nn.Module], object]) -> dict[str, Tensor | None]:
    """Return the gradient of the output's sum in each parameter that requires one; None if it does not depend on it.

    Nothing if the call fails, or if the output has no gradient.
    """
    learned = [name for name, value in module.named_parameters() if value.requires_grad]
    trial = copy.deepcopy(module)
    values = [value for value in trial.parameters() if value.requires_grad]
    gradients: Sequence[Tensor | None] = ()
    # Any error: the module is the user's code.
    with suppress(Exception), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        output = call(trial)
        parts = [*output.values()] if isinstance(output, dict) else [output]
        total = torch.stack([part.sum() for part in parts if isinstance(part, Tensor)]).sum()
        gradients = torch.autograd.grad(total, values, allow_unused=True)
    return dict(zip(learned, gradients, strict=False))


def notes_on_unused(unused: frozenset[str]) -> list[str]:
    """Return a note on the parameters that never change."""
    names = sorted(unused)
    if not names:
        return []
    more = f" and {len(names) - MAX_SHOWN} more" * (len(names) > MAX_SHOWN)
    return [
        (
            f"the output does not depend on {', '.join(names[:MAX_SHOWN])}{more}: they travel, but never change; call "
            "requires_grad_(False) on them to leave them out"
        )
    ]
