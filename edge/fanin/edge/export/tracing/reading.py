"""A tensor's value that Python reads while a graph is traced would stand in the graph as a constant: it is refused.

The tracer itself sees ``item()`` and ``if``; what leaves torch by another door (``tolist()``, ``numpy()``) it does not,
and the value of the example batch would be every batch's. What depends on no input may be read: it is a constant.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode, resolve_name

READS: Final = frozenset(
    {
        *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__),
        *(Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__complex__),
        *(Tensor.is_nonzero, torch.is_nonzero, Tensor.equal, torch.equal, Tensor.allclose, torch.allclose),
    }
)
"""What gives Python values of a tensor's."""
DATA: Final = inspect.getattr_static(Tensor, "data").__get__
"""``tensor.data``: the tracer loses sight of it, and of ``tensor.detach()``, which is the same, it does not."""


class ValueRead(RuntimeError):
    """The module's code asked for the value of a tensor that depends on the graph's inputs."""


class NoReading(TorchFunctionMode):
    """While this is entered, reading what depends on an input of the graph that is traced raises ValueRead."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        _: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """What torch asks for every function that is called."""
        if func == DATA:
            (tensor,) = args
            assert isinstance(tensor, Tensor), "only tensors have data of this kind"
            return tensor.detach()
        if func in READS and any(isinstance(value, Tensor) and _moves(value) for value in args):
            name = resolve_name(func) or str(func)
            raise ValueRead(f"{name.removeprefix('torch.').removesuffix('__').replace('Tensor.__', '')}()")
        return func(*args, **(kwargs or {}))


def _moves(tensor: Tensor) -> bool:
    """Whether a tensor depends on an input of the graph that is being traced."""
    if isinstance(tensor, FakeTensor):
        return tensor.constant is None
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    if slot is None or slot.constant is not None:
        return False
    known: set[Node] = set()
    waiting = [slot.proxy.node]
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder":
            return True
        if node not in known:
            known.add(node)
            waiting += node.all_input_nodes
    return False
