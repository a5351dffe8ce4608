"""What a module's forward calls between its layers: each function by itself, with what it was given.

A layer without layers in it is looked at as a whole; all else that torch is asked for stands in the forward of the
module around it, and has no name but that one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Function = Callable[..., object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function that the forward of ``module`` called; ``layer`` calls it again on ``inputs``."""

    module: str
    kind: str
    function: str
    layer: nn.Module
    inputs: tuple[Tensor, ...]


class _Call(nn.Module):
    """A function as a layer: of its arguments the tensors are given, the others kept."""

    def __init__(self, function: Function, arguments: Sequence[object], spec: TreeSpec) -> None:
        super().__init__()
        self._function, self._arguments, self._spec = function, arguments, spec

    def extra_repr(self) -> str:
        """Calls of one function with the same arguments are alike."""
        return f"{self._function}, {self._arguments}"

    def forward(self, *inputs: Tensor) -> object:
        """What the function says."""
        given = iter(inputs)
        filled = [next(given) if value is Tensor else value for value in self._arguments]
        args, kwargs = tree_unflatten(filled, self._spec)
        return self._function(*args, **kwargs)


class _Recorder(TorchFunctionMode):
    """Notes what is called while a module that has layers is at work itself."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._at_work: list[tuple[str, nn.Module]] = []
        self._root = root

    def enter(self, name: str, module: nn.Module) -> None:
        """The module's forward begins."""
        self._at_work.append((name, module))

    def leave(self) -> None:
        """It is done."""
        self._at_work.pop()

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        leaves, spec = tree_flatten((tuple(args), dict(kwargs or {})))
        # As they are now: what works in place changes them.
        inputs = tuple(value.detach().clone() for value in leaves if isinstance(value, Tensor))
        said = func(*args, **(kwargs or {}))
        name, module = self._at_work[-1] if self._at_work else ("", self._root)
        if (module is self._root or any(True for _ in module.children())) and _is_float(said):
            arguments = [Tensor if isinstance(value, Tensor) else value for value in leaves]
            if any(value.is_floating_point() for value in inputs):
                self.calls.append(
                    Call(
                        module=name,
                        kind=type(module).__name__,
                        function=resolve_name(func) or str(func),
                        layer=_Call(func, arguments, spec),
                        inputs=inputs,
                    )
                )
        return said


def _is_float(said: object) -> bool:
    first = said[0] if isinstance(said, tuple) and said else said
    return isinstance(first, Tensor) and first.is_floating_point()


def calls_between_layers(module: nn.Module, x: Tensor) -> list[Call]:
    """The calls of one pass over x, from floats to floats, in their order."""
    recorder = _Recorder(module)
    hooks = []
    for name, layer in module.named_modules():

        def enter(found: nn.Module, given: object, name: str = name) -> None:
            recorder.enter(name, found)

        def leave(found: nn.Module, given: object, said: object) -> None:
            recorder.leave()

        hooks += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    try:
        with torch.no_grad(), recorder:
            module(x)
    finally:
        for hook in hooks:
            hook.remove()
    return recorder.calls
