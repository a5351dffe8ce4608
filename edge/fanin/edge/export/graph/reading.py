"""Detection of code that reads a tensor's value during a trace, or whose shapes depend on one.

The graph would store that value as a constant and return the results of the example batch for every batch. The tracer
itself detects ``item()`` and ``if``. It detects neither values that leave torch in another way (``tolist()``,
``numpy()``), nor operators whose result shape depends on values (``x[x > 0]``). A tensor that depends on no input may
be read: it is a constant.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Self

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.distributions import Distribution
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fanin.edge.export.module.plain.writing import check_write, write_at
from fanin.edge.export.refusals import MixedPrecision, ShapeRead, ValueRead

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


MASKS: Final = (torch.bool, torch.uint8)
"""Types of an index that selects as many positions as it has values that are true."""


class NoReading(TorchFunctionMode):
    """While active, reading a tensor that depends on an input of the traced graph raises ValueRead.

    A function within ``torch.autocast`` raises MixedPrecision.

    A write to a part of a tensor is replaced, or raises ViewWrite (``module.plain.writing``).

    ``torch.distributions`` do not check their arguments meanwhile: each check reads a value.
    """

    def __enter__(self) -> Self:
        """Activate the mode."""
        self._checks = Distribution._validate_args
        Distribution.set_default_validate_args(False)
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]  # torch's has no types

    def __exit__(self, *error: object) -> None:
        """End the mode."""
        Distribution.set_default_validate_args(self._checks)
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's has no types

    def __torch_function__(
        self,
        func: Callable[..., object],
        _: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Check each torch function before it is called."""
        if torch.is_autocast_enabled("cpu"):
            raise MixedPrecision(str(torch.get_autocast_dtype("cpu")))
        if func == DATA:
            (tensor,) = args
            assert isinstance(tensor, Tensor), "the getter is that of tensors"
            return tensor.detach()
        if func in READS and any(isinstance(value, Tensor) and _moves(value) for value in args):
            name = resolve_name(func) or str(func)
            raise ValueRead(f"{name.removeprefix('torch.').removesuffix('__').replace('Tensor.__', '')}()")
        if func == Tensor.__setitem__ and isinstance(args[0], Tensor) and write_at(args[0], *args[1:]):
            return None
        check_write(func, args)
        return func(*args, **(kwargs or {}))


class FixedShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """While active in a trace of real tensors, an operator whose result has no fixed shape raises ShapeRead.

    The tracer would store the shape that the result has for the example batch.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types

    def __torch_dispatch__(
        self,
        func: OpOverload,
        _: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Check each operator before it is called."""
        if torch.Tag.dynamic_output_shape in func.tags and get_proxy_mode() is not None:
            is_index = func is torch.ops.aten.index.Tensor
            # The indices alone: a mask may itself be indexed by numbers.
            arguments = args[1] if is_index else (args, kwargs)
            tensors = [value for value in tree_leaves(arguments) if isinstance(value, Tensor)]
            if any(_moves(value) for value in tensors if not is_index or value.dtype in MASKS):
                raise ShapeRead("an index of true and false" if is_index else f"{func.overloadpacket}")
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
