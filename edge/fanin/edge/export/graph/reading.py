"""Detection of code that reads a tensor's value during a trace, or whose shapes depend on one.

The graph would store that value as a constant and return the results of the example batch for every batch. The tracer
itself detects ``item()`` and ``if``. It detects neither values that leave torch in another way (``tolist()``,
``numpy()``), nor operators whose result shape depends on values (``x[x > 0]``). A tensor that does not depend on the
values of an input may be read: it is a constant.
"""

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Final, Self

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.distributions import Distribution
from torch.fx import Node, map_arg
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, _ProxyTensor, get_proxy_mode, get_proxy_slot
from torch.fx.node import Argument
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fanin.edge.export.refusals import ChanceRead, MixedPrecision, ShapeRead, ValueRead

READS: Final = frozenset(
    {
        *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__),
        *(Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__complex__),
        *(Tensor.is_nonzero, torch.is_nonzero, Tensor.equal, torch.equal, Tensor.allclose, torch.allclose),
    }
)
"""Functions that return Python or numpy values of a tensor."""
DRAWS: Final = frozenset({torch.rand, torch.rand_like})
Limit = Callable[[float], bool]
COMPARISONS: Final[Mapping[Callable[..., object], tuple[Limit, Limit]]] = MappingProxyType(
    {
        function: (below, above)
        for below, above, functions in (
            (lambda limit: limit >= 1.0, lambda limit: limit <= 0.0, (Tensor.__lt__, Tensor.lt, torch.lt)),
            (lambda limit: limit >= 1.0, lambda limit: limit < 0.0, (Tensor.__le__, Tensor.le, torch.le)),
            (lambda limit: limit < 0.0, lambda limit: limit >= 1.0, (Tensor.__gt__, Tensor.gt, torch.gt)),
            (lambda limit: limit <= 0.0, lambda limit: limit >= 1.0, (Tensor.__ge__, Tensor.ge, torch.ge)),
        )
        for function in functions
    }
)
"""For each comparison of a value in [0, 1) with a limit: whether the result is always true, and always false."""
NUMS: Final = (2, 3)
"""Numbers of samples for which a value must be the same."""
DATA: Final = inspect.getattr_static(Tensor, "data").__get__
"""The getter of ``tensor.data``. The tracer loses track of it, but not of ``tensor.detach()``, which is equal."""


MASKS: Final = (torch.bool, torch.uint8)
"""Types of an index that selects as many positions as it has values that are true."""


class NoReading(TorchFunctionMode):
    """While active, reading a tensor that depends on an input of the traced graph raises ValueRead.

    A function within ``torch.autocast`` raises MixedPrecision.

    A single random value is no constant, but its comparison with a limit out of (0, 1) is one: a layer that is skipped
    with probability 0 (``torch.rand([]) < 0.0``). Another branch on it raises ChanceRead.

    ``torch.distributions`` do not check their arguments meanwhile: each check reads a value.
    """

    def __init__(self) -> None:
        super().__init__()
        # By identity. The tensors are kept, so that their numbers are not used again.
        self._draws: dict[int, Tensor] = {}

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
        if func in COMPARISONS and id(args[0]) in self._draws:
            return self._compared(func, args, kwargs or {})
        if func in READS and id(args[0]) in self._draws:
            raise ChanceRead(f"by {_named(func)}")
        if func in READS:
            values = [_constant(value) if isinstance(value, Tensor) else value for value in args]
            if any(value is None for value in values):
                raise ValueRead(_named(func))
            return func(*values, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func in DRAWS and isinstance(result, Tensor) and result.numel() == 1:
            self._draws[id(result)] = result
        return result

    def _compared(self, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Compare a random value with a limit. The result may be read if it is always the same."""
        is_true, is_false = COMPARISONS[func]
        limit = args[1] if len(args) > 1 else None
        result = func(*args, **kwargs)
        assert isinstance(result, Tensor), "a comparison returns a tensor"
        if isinstance(limit, int | float) and (is_true(limit) or is_false(limit)):
            return torch.tensor(is_true(limit)).reshape(result.shape)
        self._draws[id(result)] = result
        return result


def _named(func: Callable[..., object]) -> str:
    """Return the name of a function in messages."""
    name = resolve_name(func) or str(func)
    return f"{name.removeprefix('torch.').removesuffix('__').replace('Tensor.__', '')}()"


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


def _constant(tensor: Tensor) -> Tensor | None:
    """Return a tensor whose values may be read; None if they depend on the values of an input of the traced graph.

    They may depend on its shape. In a graph for any number of samples they must be the same for two numbers of them.
    """
    if isinstance(tensor, FakeTensor) and tensor.constant is not None:
        return tensor
    mode, slot = get_proxy_mode(), _slot(tensor)
    if mode is None or slot is None:
        return None if isinstance(tensor, FakeTensor) else tensor
    if slot.constant is not None:
        return tensor
    assert isinstance(mode.tracer, PythonKeyTracer), "the tracer of a module"
    node, root = slot.proxy.node, mode.tracer.root
    sources = _sources(node)
    if any(each.op == "placeholder" for each in sources):
        return None
    with _disable_current_modes():
        value, other = (_computed(node, sources, root, num) for num in NUMS)
    return value if torch.equal(value, other) else None


def _computed(node: Node, sources: Container[Node], root: nn.Module, num: int) -> Tensor:
    """Return the values of a node of a traced graph for a number of samples."""
    known: dict[Node, Argument] = {}
    for each in node.graph.nodes:
        if each not in sources:
            continue
        if each.op == "get_attr":
            known[each] = attrgetter(str(each.target))(root)
        elif _is_size_of_input(each):
            known[each] = num
        else:
            assert callable(each.target), "a traced graph calls operators"
            args, kwargs = map_arg((each.args, each.kwargs), known.__getitem__)
            known[each] = each.target(*args, **kwargs)
    value = known[node]
    assert isinstance(value, Tensor), "the node is one of a tensor"
    return value


def _is_size_of_input(node: Node) -> bool:
    """Return whether a node is the number of samples, the only size of an input that a graph may leave free."""
    return node.target is torch.ops.aten.sym_size.int and node.all_input_nodes[0].op == "placeholder"


def _sources(node: Node) -> set[Node]:
    """Return a node and all nodes that its values depend on."""
    sources: set[Node] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each not in sources:
            sources.add(each)
            waiting += [] if _is_size_of_input(each) else each.all_input_nodes
    return sources


def _slot(tensor: Tensor) -> _ProxyTensor | None:
    """Return the place of a tensor in the graph that is being traced."""
    mode = get_proxy_mode()
    return None if mode is None else get_proxy_slot(tensor, mode.tracer, None)


def _moves(tensor: Tensor) -> bool:
    """Return whether a tensor depends on an input of the graph that is being traced."""
    if isinstance(tensor, FakeTensor):
        return tensor.constant is None
    slot = _slot(tensor)
    if slot is None or slot.constant is not None:
        return False
    return any(each.op == "placeholder" for each in _sources(slot.proxy.node))
