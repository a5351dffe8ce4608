"""The source module of each node of a trace, so that an error on a device can name the module.

The nodes of a gradient belong to the module whose forward they differentiate.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from torch import Tensor, nn
from torch.autograd.graph import Node as Backward
from torch.fx import Node
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils._pytree import tree_leaves

ANNOTATION: Final = "module"
"""Key of the module's name among the annotations of a node."""
Scope = AbstractContextManager[None]


def origin_of(node: Node) -> str:
    """Return the name of the module that a node of a trace comes from; "" for the App's own module, or if unknown."""
    return str(node.meta.get("custom", {}).get(ANNOTATION, ""))


@contextmanager
def recorded_origins(root: nn.Module) -> Iterator[None]:
    """Within the context, mark each node that is traced with the name of the module of ``root`` that runs."""
    recorder = _Recorder()
    hooks = []
    for name, module in root.named_modules():

        def enter(module: nn.Module, inputs: object, name: str = name) -> None:
            recorder.enter(name, inputs)

        def leave(module: nn.Module, inputs: object, output: object) -> None:
            recorder.leave(output)

        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        with preserve_node_meta():
            try:
                yield
            finally:
                # Before torch restores the annotations from before this context.
                recorder.close()
    finally:
        for hook in hooks:
            hook.remove()


class _Recorder:
    """The modules that run now, and the steps of the gradient that have a module."""

    def __init__(self) -> None:
        self._running: list[tuple[str, Scope]] = []
        self._known: set[Backward] = set()
        self._marks: list[Scope] = []

    def enter(self, name: str, inputs: object) -> None:
        """Note that the forward of a module begins.

        The operators behind its inputs that have no module yet belong to the outer module.
        """
        self._claim(inputs)
        scope = annotate({ANNOTATION: name})
        scope.__enter__()
        self._running.append((name, scope))

    def leave(self, output: object) -> None:
        """Note that the forward of the innermost module ends."""
        self._claim(output)
        _, scope = self._running.pop()
        scope.__exit__(None, None, None)

    def close(self) -> None:
        """End the scopes of modules and of steps that raised an error, the innermost first."""
        while self._running:
            self._running.pop()[1].__exit__(None, None, None)
        while self._marks:
            self._marks.pop().__exit__(None, None, None)

    def _claim(self, tensors: object) -> None:
        """Give the steps of the gradient behind some tensors that have no module yet to the innermost module."""
        waiting = [value.grad_fn for value in tree_leaves(tensors) if isinstance(value, Tensor)]
        while waiting:
            step = waiting.pop()
            if step is None or step in self._known:
                continue
            self._known.add(step)
            waiting += [following for following, _ in step.next_functions]
            if self._running:
                _mark(step, self._running[-1][0], self._marks)


def _mark(step: Backward, name: str, scopes: list[Scope]) -> None:
    """Mark the nodes that a step of the gradient will trace; ``scopes`` are those of the steps that run."""

    def begin(gradients: object) -> None:
        scopes.append(annotate({ANNOTATION: name}))
        scopes[-1].__enter__()

    def end(gradients: object, output_gradients: object) -> None:
        scopes.pop().__exit__(None, None, None)

    step.register_prehook(begin)
    step.register_hook(end)
