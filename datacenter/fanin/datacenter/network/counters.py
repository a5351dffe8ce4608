"""Counts the calls and payload bytes that a rank sends, by mesh axis and kind of collective.

``ByteCounter`` counts the operators of ``c10d`` and ``_c10d_functional`` that a rank calls in its ``with`` block. The
payload is the full tensor of a collective, so it can be compared with formulas exactly:

- all-gather: the output;
- reduce-scatter: the input;
- all-reduce and broadcast: the tensor;
- message: the tensor, counted by its sender only.

The bytes on the wire depend on the algorithm; ``Amount.wire_bytes`` returns those of a ring. DistributedDataParallel
reduces outside of Python, invisible to the counter. Call ``make_visible`` first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

ALL_GATHER: Final = "all_gather"
REDUCE_SCATTER: Final = "reduce_scatter"
ALL_REDUCE: Final = "all_reduce"
BROADCAST: Final = "broadcast"
ALL_TO_ALL: Final = "all_to_all"
SEND: Final = "send"
NAMESPACES: Final = frozenset({"c10d", "_c10d_functional"})
OTHER: Final = "other"
"""The axis of a group that does not belong to the mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedOperator:
    """The rule that counts an operator.

    Attributes:
        kind: the kind of collective.
        second: whether the payload is the second argument instead of the first.
        gathers: whether the payload is the argument times the number of ranks.
    """

    kind: str
    second: bool = False
    gathers: bool = False


OPERATORS: Final[Mapping[str, CountedOperator]] = MappingProxyType(
    {
        # In c10d the outputs come first. They are the payload of a gather; that of a scatter is the inputs after them.
        "c10d::allreduce_": CountedOperator(kind=ALL_REDUCE),
        "c10d::allreduce_coalesced_": CountedOperator(kind=ALL_REDUCE),
        "c10d::reduce_": CountedOperator(kind=ALL_REDUCE),
        "c10d::allgather_": CountedOperator(kind=ALL_GATHER),
        "c10d::_allgather_base_": CountedOperator(kind=ALL_GATHER),
        "c10d::allgather_coalesced_": CountedOperator(kind=ALL_GATHER),
        "c10d::allgather_into_tensor_coalesced_": CountedOperator(kind=ALL_GATHER),
        "c10d::gather_": CountedOperator(kind=ALL_GATHER),
        "c10d::reduce_scatter_": CountedOperator(kind=REDUCE_SCATTER, second=True),
        "c10d::_reduce_scatter_base_": CountedOperator(kind=REDUCE_SCATTER, second=True),
        "c10d::reduce_scatter_tensor_coalesced_": CountedOperator(kind=REDUCE_SCATTER, second=True),
        "c10d::scatter_": CountedOperator(kind=REDUCE_SCATTER, second=True),
        "c10d::alltoall_": CountedOperator(kind=ALL_TO_ALL, second=True),
        "c10d::alltoall_base_": CountedOperator(kind=ALL_TO_ALL, second=True),
        "c10d::broadcast_": CountedOperator(kind=BROADCAST),
        "c10d::send": CountedOperator(kind=SEND),
        # The argument is the tensor of one rank. The payload of a gather is this tensor times the number of ranks.
        "_c10d_functional::all_reduce": CountedOperator(kind=ALL_REDUCE),
        "_c10d_functional::all_reduce_": CountedOperator(kind=ALL_REDUCE),
        "_c10d_functional::all_reduce_coalesced": CountedOperator(kind=ALL_REDUCE),
        "_c10d_functional::all_reduce_coalesced_": CountedOperator(kind=ALL_REDUCE),
        "_c10d_functional::all_gather_into_tensor": CountedOperator(kind=ALL_GATHER, gathers=True),
        "_c10d_functional::all_gather_into_tensor_out": CountedOperator(kind=ALL_GATHER, gathers=True),
        "_c10d_functional::all_gather_into_tensor_coalesced": CountedOperator(kind=ALL_GATHER, gathers=True),
        "_c10d_functional::reduce_scatter_tensor": CountedOperator(kind=REDUCE_SCATTER),
        "_c10d_functional::reduce_scatter_tensor_out": CountedOperator(kind=REDUCE_SCATTER),
        "_c10d_functional::reduce_scatter_tensor_coalesced": CountedOperator(kind=REDUCE_SCATTER),
        "_c10d_functional::all_to_all_single": CountedOperator(kind=ALL_TO_ALL),
        "_c10d_functional::broadcast": CountedOperator(kind=BROADCAST),
        "_c10d_functional::broadcast_": CountedOperator(kind=BROADCAST),
        "_c10d_functional::isend": CountedOperator(kind=SEND),
    }
)
"""The counted operators. Barriers and receives are not listed, because they have no payload of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """The number of calls, and their payload in bytes."""

    num_calls: int = 0
    size_bytes: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(num_calls=self.num_calls + other.num_calls, size_bytes=self.size_bytes + other.size_bytes)

    def wire_bytes(self, kind: str, num_ranks: int) -> float:
        """Return the bytes that each rank of a ring sends.

        Args:
            kind: the kind of collective.
            num_ranks: ranks of the ring.

        Reference:
            Patarasuk and Yuan 2009, section 3.
        """
        if kind == SEND:
            return float(self.size_bytes)
        share = (num_ranks - 1) / num_ranks
        return self.size_bytes * share * (2 if kind == ALL_REDUCE else 1)


Counts = dict[tuple[str, str], Amount]
"""(mesh axis, kind of collective) to the amount that was sent."""


def by_axis(counts: Mapping[tuple[str, str], Amount]) -> dict[str, int]:
    """Return the payload bytes of each axis, all kinds together."""
    sizes: dict[str, int] = {}
    for (axis, _), amount in counts.items():
        sizes[axis] = sizes.get(axis, 0) + amount.size_bytes
    return sizes


class ByteCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's hook for subclasses
    """Counts the collectives that this rank calls in a ``with`` block.

    Example::

        with ByteCounter(mesh) as counter:
            engine.step(batch)
        counter.counts[("dp_shard", "all_gather")].size_bytes
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.counts: Counts = {}
        self._axes: dict[str, str] = {}
        self._ranks: dict[tuple[int, ...], str] = {}
        for axis in mesh.mesh_dim_names or ():
            group = mesh.get_group(axis)
            self._axes[group.group_name] = axis
            # Axes of one rank may have the same ranks. Nothing is sent along them, so they are left out.
            if group.size() > 1:
                self._ranks[tuple(dist.get_process_group_ranks(group))] = axis

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Count an operator, and call it."""
        if any(issubclass(kind, DTensor) for kind in types):
            # A DTensor dispatches its collectives again as operators on plain tensors.
            return NotImplemented
        if func.namespace in NAMESPACES:
            self._count(func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, func: torch._ops.OpOverload, args: tuple[object, ...]) -> None:
        # The name of the schema has no overload, for example "c10d::send".
        operator = OPERATORS.get(func._schema.name)
        if operator is None:
            return
        group = _group(args)
        size = sum(value.nbytes for value in _tensors(args[1 if operator.second else 0]))
        key = (self._axis(group), operator.kind)
        amount = Amount(num_calls=1, size_bytes=size * group.size() if operator.gathers else size)
        self.counts[key] = self.counts.get(key, Amount()) + amount

    def _axis(self, group: dist.ProcessGroup) -> str:
        axis = self._axes.get(group.group_name)
        return axis or self._ranks.get(tuple(dist.get_process_group_ranks(group)), OTHER)


def make_visible(runner: DistributedDataParallel) -> None:
    """Make DistributedDataParallel reduce its gradients in Python, so that a counter can count them.

    This registers a communication hook, of which there can be only one. A counter also counts any other hook.
    """
    runner.register_comm_hook(None, allreduce_hook)


def _group(args: tuple[object, ...]) -> dist.ProcessGroup:
    """Return the process group among an operator's arguments: boxed, plain, or by its name, which comes last."""
    for value in reversed(args):
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str):
            return _resolve_process_group(GroupName(value))
    raise AssertionError(f"no process group in {args}")


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
