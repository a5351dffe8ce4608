"""Detection of code that reads a tensor's value during a trace.

The graph would store that value as a constant and return the results of the example batch for every batch. The tracer
itself detects ``item()`` and ``if``. It does not detect values that leave torch in another way (``tolist()``,
``numpy()``). A tensor that depends on no input may be read: it is a constant.
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
"""Functions that return Python or numpy values of a tensor."""
DATA: Final = inspect.getattr_static(Tensor, "data").__get__
"""The getter of ``tensor.data``. The tracer loses track of it, but not of ``tensor.detach()``, which is equal."""


class ValueRead(RuntimeError):
    """The module's code reads the value of a tensor that depends on the graph's inputs."""


class NoReading(TorchFunctionMode):
    """While active, reading a tensor that depends on an input of the traced graph raises ValueRead."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        _: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Check each torch function before it is called."""
        if func == DATA:
            (tensor,) = args
            assert isinstance(tensor, Tensor), "the getter is that of tensors"
            return tensor.detach()
        if func in READS and any(isinstance(value, Tensor) and _moves(value) for value in args):
            name = resolve_name(func) or str(func)
            raise ValueRead(f"{name.removeprefix('torch.').removesuffix('__').replace('Tensor.__', '')}()")
        return func(*args, **(kwargs or {}))


def _moves(tensor: Tensor) -> bool:
    """Return whether a tensor depends on an input of the graph that is being traced."""
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
