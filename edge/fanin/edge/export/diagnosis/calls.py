"""The functions that a module's forward calls between its layers, each as a module with its recorded inputs.

``check`` tests a layer without layers inside as a unit. Every other torch function belongs to the forward of the module
around it, which gives it its name. The calls of a layer of the App's own are recorded too: they have its lines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fanin.edge.export.app.inputs.named import call_module
from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.export.refusals import is_apps, running_line

Function = Callable[..., object]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """One call in the forward of ``module``. ``layer`` repeats the call on ``inputs``.

    Attributes:
        module: Name of the module.
        kind: Its class.
        function: Name of the function.
        line: ``file:line`` of the call in the App's code; "" if it has none.
        layer: A module that repeats the call.
        inputs: Its inputs.
        is_complex: Whether the function returns complex numbers.
    """

    module: str
    kind: str
    function: str
    line: str
    layer: nn.Module
    inputs: tuple[Tensor, ...]
    is_complex: bool


class _FunctionModule(nn.Module):
    """A function as a module. Its tensor arguments are inputs, and its other arguments are constants."""

    def __init__(self, function: Function, arguments: Sequence[object], spec: TreeSpec) -> None:
        super().__init__()
        self._function, self._arguments, self._spec = function, arguments, spec

    def extra_repr(self) -> str:
        """Represent the call: two calls of one function with equal arguments have equal representations."""
        return f"{self._function}, {self._arguments}"

    def forward(self, *inputs: Tensor) -> object:
        """Call the function."""
        tensors = iter(inputs)
        filled = [next(tensors) if value is Tensor else value for value in self._arguments]
        args, kwargs = tree_unflatten(filled, self._spec)
        return self._function(*args, **kwargs)


class _Recorder(TorchFunctionMode):
    """Records the functions that modules with layers call themselves."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.calls: list[FunctionCall] = []
        self._running: list[tuple[str, nn.Module]] = []
        self._root = root

    def enter(self, name: str, module: nn.Module) -> None:
        """Note that the forward of a module begins."""
        self._running.append((name, module))

    def leave(self) -> None:
        """Note that the forward of the innermost module ends."""
        self._running.pop()

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        leaves, spec = tree_flatten((tuple(args), dict(kwargs or {})))
        # Copied before the call: a function that works in place changes them.
        inputs = tuple(value.detach().clone() for value in leaves if isinstance(value, Tensor))
        output = func(*args, **(kwargs or {}))
        name, module = self._running[-1] if self._running else ("", self._root)
        is_forward = module is self._root or any(True for _ in module.children()) or is_apps(module)
        first = output[0] if isinstance(output, tuple) and output else output
        if is_forward and isinstance(first, Tensor) and (first.is_floating_point() or first.is_complex()):
            arguments = [Tensor if isinstance(value, Tensor) else value for value in leaves]
            if any(value.is_floating_point() for value in inputs):
                self.calls.append(
                    FunctionCall(
                        module=name,
                        kind=type(module).__name__,
                        function=resolve_name(func) or str(func),
                        line=running_line(),
                        layer=_FunctionModule(func, arguments, spec),
                        inputs=inputs,
                        is_complex=first.is_complex(),
                    )
                )
        return output


def calls_between_layers(module: nn.Module, inputs: Tensors) -> list[FunctionCall]:
    """Return the calls of one pass over inputs by name that map floats to floats or complex numbers, in
    their order."""
    recorder = _Recorder(module)
    hooks = []
    for name, layer in module.named_modules():

        def enter(layer: nn.Module, inputs: object, name: str = name) -> None:
            recorder.enter(name, layer)

        def leave(layer: nn.Module, inputs: object, output: object) -> None:
            recorder.leave()

        hooks += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    try:
        with torch.no_grad(), recorder:
            call_module(module, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return recorder.calls
