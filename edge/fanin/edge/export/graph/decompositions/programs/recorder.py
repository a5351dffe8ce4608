"""``Recorder``: the operators that a function calls, as a graph of plain operators; ``Views``: views of any strides.

``make_fx`` follows a function with a proxy for each tensor, and ``FunctionalTensorMode`` removes changes in place. Both
take several times as long as the operators on fake tensors. The graphs of an export have one size for each tensor, and
seldom change one in place, so it is enough to note each operator.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Graph, Node
from torch.fx.node import Argument
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.fx.traceback import get_current_meta
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

Form = Callable[..., object]
Keywords = dict[str, Argument]
aten = torch.ops.aten
SAME: Final = frozenset({aten.alias.default, aten.detach.default})
"""Operators whose result is their input."""
COPIES: Final = MappingProxyType({aten.lift_fresh_copy.default: aten.clone.default})
"""Copies of constants, which are inputs of a program."""
MAX_COMPARED: Final = 1 << 22
V = TypeVar("V")


class NotRecorded(Exception):
    """An operator changes a tensor that is read again, or reads one that is neither an input nor a result."""


def view_of_rows(x: Tensor, shape: Sequence[int]) -> object:
    """Compute ``aten.view`` of a tensor whose strides do not allow it as one of a copy: a graph has no strides.

    A fake tensor may have other strides than the real one of the trace: those of a form's result, or those that torch
    declares for an operator.
    """
    if x.is_contiguous():
        return NotImplemented
    with _disable_current_modes():
        try:
            torch.empty_strided(x.shape, x.stride(), device="meta").view(shape)
        except (RuntimeError, ValueError):
            pass
        else:
            return NotImplemented
    return aten.view.default(x.contiguous(), shape)


class Views(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, ``aten.view`` is ``view_of_rows``.

    Attributes:
        num_copies: Number of views of a copy so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_copies = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Argument, ...] = (), kwargs: Keywords | None = None
    ) -> object:
        """Call an operator."""
        form: Form = view_of_rows
        value = form(*args) if func is aten.view.default else NotImplemented
        if value is NotImplemented:
            return func(*args, **(kwargs or {}))
        self.num_copies += 1
        return value


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators on fake tensors that are called in its context.

    Args:
        forms: Functions that replace operators, also within other forms.

    Attributes:
        graph: The operators so far, with their shapes in ``meta``.
    """

    def __init__(self, forms: Mapping[OpOverload, Form]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self._forms: dict[OpOverload, Form] = {aten.view.default: view_of_rows, **forms}
        self._nodes: dict[int, Node] = {}
        # The tensors of each storage. While they exist, no other tensor gets the number of one of them.
        self._sharing: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._inputs: set[int] = set()
        self._stale: set[int] = set()
        # The storages of tensors whose view is one of a copy.
        self._copied: set[int] = set()

    def input(self, name: str, value: Tensor, meta: Mapping[str, object]) -> None:
        """Add an input."""
        node = self.graph.placeholder(name)
        node.meta = dict(meta)
        self._note(value, node)
        self._inputs.add(_storage(value))

    def output(self, values: Argument) -> None:
        """End the graph with these results. Raises NotRecorded."""
        self.graph.output(self._as_nodes(values))

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Argument, ...] = (), kwargs: Keywords | None = None
    ) -> object:
        """Note an operator, or call its form. Raises NotRecorded."""
        kwargs = kwargs or {}
        func = COPIES.get(func, func)
        if func.namespace == "prim":
            # A question about a tensor, such as its device.
            return func(*args, **kwargs)
        form = self._forms.get(func)
        for replacement in (form, func.decompose):
            if replacement is not None:
                with self:
                    value = replacement(*args, **kwargs)
                if value is not NotImplemented:
                    if func is aten.view.default:
                        self._copied |= {_storage(each) for each in (args[0], value) if isinstance(each, Tensor)}
                    return self._alias(value) if any(value is each for each in args) else value
        if func._schema.is_mutable:
            return self._changed(func, args, kwargs)
        if func in SAME:
            return self._alias(args[0])
        value = func(*args, **kwargs)
        results = value if isinstance(value, tuple | list) else (value,)
        # An operator without a result is a check.
        if value is None or any(isinstance(each, Tensor) for each in results):
            node = self.graph.call_function(func, self._as_nodes(args), self._as_nodes(kwargs))
            node.meta = _meta(value)
            for number, each in enumerate(results):
                if isinstance(each, Tensor):
                    self._note(each, node if each is value else self._item(node, number, each))
        return value

    def _changed(self, func: OpOverload, args: tuple[Argument, ...], kwargs: Keywords) -> object:
        """Note the plain form of an operator in place. Its first tensor then has the result.

        Other tensors that share changed memory must not be read afterwards.

        Raises:
            NotRecorded: The operator has no plain form, or changes an input, which is a result of the graph, or a
                tensor whose view is one of a copy.
        """
        name = func._schema.name.partition("::")[2]
        plain, target = counterpart(func, name.removesuffix("_")) if name.endswith("_") else None, args[0]
        if plain is None:
            raise NotRecorded
        if not isinstance(target, Tensor) or _storage(target) in self._inputs | self._copied:
            raise NotRecorded
        with self:
            value = plain(*args, **kwargs)
        if value.dtype != target.dtype or value.shape != target.shape:
            raise NotRecorded
        others = (each for each in self._sharing[_storage(target)] if each is not target)
        self._stale |= {id(each) for each in others if _overlap(each, target)}
        self._nodes[id(target)] = self._node_of(value)
        return target

    def _alias(self, value: object) -> object:
        """Return another tensor with the same node: torch refuses a view that is its own source."""
        if not isinstance(value, Tensor):
            return value
        alias = aten.alias.default(value)
        self._note(alias, self._node_of(value))
        return alias

    def _item(self, node: Node, number: int, value: Tensor) -> Node:
        item = self.graph.call_function(operator.getitem, (node, number))
        item.meta = _meta(value)
        return item

    def _note(self, value: Tensor, node: Node) -> None:
        self._nodes[id(value)] = node
        self._sharing[_storage(value)].append(value)

    def _as_nodes(self, values: V) -> V:
        nodes: V = tree_map_only(Tensor, self._node_of, values)
        return nodes

    def _node_of(self, value: object) -> Node:
        node = self._nodes.get(id(value))
        if node is None or id(value) in self._stale:
            raise NotRecorded
        return node


def counterpart(func: OpOverload, name: str) -> OpOverload | None:
    """Return the operator of another name with the same arguments, or None: names of overloads differ.

    ``aten.pow_.Scalar`` takes a tensor and a number, as ``aten.pow.Tensor_Scalar``; ``aten.pow.Scalar`` takes a number
    and a tensor.
    """
    packet = getattr(getattr(torch.ops, func.namespace), name, None)
    if not isinstance(packet, OpOverloadPacket):
        return None
    names = packet.overloads()  # type: ignore[no-untyped-call]  # torch's has no types
    overloads = (getattr(packet, each) for each in names)
    return next((each for each in overloads if _arguments(each) == _arguments(func)), None)


def _arguments(func: OpOverload) -> list[tuple[str, str, object]]:
    return [(each.name, str(each.type), each.default_value) for each in func._schema.arguments]


def _storage(value: Tensor) -> int:
    number: int = value.untyped_storage()._cdata
    return number


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors of one storage share an element; True if they are too large to tell quickly."""
    if first.numel() + second.numel() > MAX_COMPARED:
        return True
    return bool(np.intersect1d(_places(first), _places(second)).size)


def _places(value: Tensor) -> npt.NDArray[np.int64]:
    """Return the places of a tensor's elements in its storage (numel,)."""
    places = np.array([value.storage_offset()])
    for size, stride in zip(value.shape, value.stride(), strict=True):
        places = (places[:, None] + stride * np.arange(size)).reshape(-1)
    return places


def _meta(value: object) -> dict[str, object]:
    """Return what later passes read from a node: its value, and where it comes from."""
    meta = {**get_current_meta(), "val": value}
    meta.pop("tensor_meta", None)
    if isinstance(value, Tensor):
        meta["tensor_meta"] = _extract_tensor_metadata(value)
    return meta
