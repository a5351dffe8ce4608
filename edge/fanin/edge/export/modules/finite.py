"""The first part of a module that returns NaN or infinity, for errors about values that are not finite.

Infinity within a module is no error: a mask of attention may use it. So the search runs only after a pass has failed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fanin.edge.export.refusals import running_line

KINDS: Final = {"NaN": torch.isnan, "infinity": torch.isinf}
"""Values that are not finite. NaN often follows from an earlier infinity, so the first place of each is reported."""


class _Watch(TorchFunctionMode):
    """Keeps the first place of each kind of value that is not finite."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.places: dict[str, str] = {}
        self.running = [("", root)]

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        output = func(*args, **(kwargs or {}))
        floats = [value for value in tree_leaves(output) if isinstance(value, Tensor) and value.is_floating_point()]
        for kind, is_of in KINDS.items():
            if kind not in self.places and any(bool(is_of(value).any()) for value in floats):
                (name, module), line = self.running[-1], running_line()
                place = f"module {name or 'itself'} ({type(module).__name__})"
                self.places[kind] = f"{place}{f' at {line}' if line else ''} returns {kind}"
        return output


def first_not_finite(module: nn.Module, call: Callable[[], object]) -> str:
    """Return which module returns NaN first in a call, and which infinity, with the App's lines; "" if none does.

    Args:
        module: The module that the call runs.
        call: A call that raises nothing.
    """
    watch, hooks = _Watch(module), []
    for name, layer in module.named_modules():

        def enter(layer: nn.Module, inputs: object, name: str = name) -> None:
            watch.running.append((name, layer))

        def leave(layer: nn.Module, inputs: object, output: object) -> None:
            watch.running.pop()

        hooks += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    try:
        with torch.no_grad(), watch:
            call()
    finally:
        for hook in hooks:
            hook.remove()
    return ", then ".join(watch.places.values())
