"""Counts what ranks send each other: calls and payload bytes by mesh axis and kind, as they happen.

A counter sees every operator of ``c10d`` and ``_c10d_functional`` that this rank calls while it is entered. The payload
is the whole tensor that the collective is about, so that formulas hold to the byte: what each rank has after an
all-gather, what each brings to a reduce-scatter, the tensor of an all-reduce or a broadcast, what is sent of a message
(receiving it is not counted again). What crosses a wire is a share of it that depends on the algorithm:
``Amount.wire_bytes`` has that of a ring. DistributedDataParallel reduces outside of Python, where no counter
looks; ``make_visible`` has it do so inside.
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
"""The axis of a group that is none of the mesh's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One operator: its kind, and whether the payload is its second argument instead of its first."""

    kind: str
    second: bool = False
    gathers: bool = False


OPERATORS: Final[Mapping[str, Collective]] = MappingProxyType(
    {
        # The outputs come first in c10d: of a gather they are the payload, of a scatter the inputs behind them.
        "c10d::allreduce_": Collective(kind=ALL_REDUCE),
        "c10d::allreduce_coalesced_": Collective(kind=ALL_REDUCE),
        "c10d::reduce_": Collective(kind=ALL_REDUCE),
        "c10d::allgather_": Collective(kind=ALL_GATHER),
        "c10d::_allgather_base_": Collective(kind=ALL_GATHER),
        "c10d::allgather_coalesced_": Collective(kind=ALL_GATHER),
        "c10d::allgather_into_tensor_coalesced_": Collective(kind=ALL_GATHER),
        "c10d::gather_": Collective(kind=ALL_GATHER),
        "c10d::reduce_scatter_": Collective(kind=REDUCE_SCATTER, second=True),
        "c10d::_reduce_scatter_base_": Collective(kind=REDUCE_SCATTER, second=True),
        "c10d::reduce_scatter_tensor_coalesced_": Collective(kind=REDUCE_SCATTER, second=True),
        "c10d::scatter_": Collective(kind=REDUCE_SCATTER, second=True),
        "c10d::alltoall_": Collective(kind=ALL_TO_ALL, second=True),
        "c10d::alltoall_base_": Collective(kind=ALL_TO_ALL, second=True),
        "c10d::broadcast_": Collective(kind=BROADCAST),
        "c10d::send": Collective(kind=SEND),
        # These take what each rank brings; a gather's payload is that, times the ranks.
        "_c10d_functional::all_reduce": Collective(kind=ALL_REDUCE),
        "_c10d_functional::all_reduce_": Collective(kind=ALL_REDUCE),
        "_c10d_functional::all_reduce_coalesced": Collective(kind=ALL_REDUCE),
        "_c10d_functional::all_reduce_coalesced_": Collective(kind=ALL_REDUCE),
        "_c10d_functional::all_gather_into_tensor": Collective(kind=ALL_GATHER, gathers=True),
        "_c10d_functional::all_gather_into_tensor_out": Collective(kind=ALL_GATHER, gathers=True),
        "_c10d_functional::all_gather_into_tensor_coalesced": Collective(kind=ALL_GATHER, gathers=True),
        "_c10d_functional::reduce_scatter_tensor": Collective(kind=REDUCE_SCATTER),
        "_c10d_functional::reduce_scatter_tensor_out": Collective(kind=REDUCE_SCATTER),
        "_c10d_functional::reduce_scatter_tensor_coalesced": Collective(kind=REDUCE_SCATTER),
        "_c10d_functional::all_to_all_single": Collective(kind=ALL_TO_ALL),
        "_c10d_functional::broadcast": Collective(kind=BROADCAST),
        "_c10d_functional::broadcast_": Collective(kind=BROADCAST),
        "_c10d_functional::isend": Collective(kind=SEND),
    }
)
"""Barriers and receives are not here: they bring no payload of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How often, and how many bytes of payload."""

    num_calls: int = 0
    size_bytes: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(num_calls=self.num_calls + other.num_calls, size_bytes=self.size_bytes + other.size_bytes)

    def wire_bytes(self, kind: str, num_ranks: int) -> float:
        """What each rank of a ring of ``num_ranks`` sends for it (Patarasuk and Yuan 2009, section 3)."""
        if kind == SEND:
            return float(self.size_bytes)
        share = (num_ranks - 1) / num_ranks
        return self.size_bytes * share * (2 if kind == ALL_REDUCE else 1)


Counts = dict[tuple[str, str], Amount]
"""(axis, kind) to how much."""


def by_axis(counts: Mapping[tuple[str, str], Amount]) -> dict[str, int]:
    """Payload bytes of each axis, all kinds together."""
    found: dict[str, int] = {}
    for (axis, _), amount in counts.items():
        found[axis] = found.get(axis, 0) + amount.size_bytes
    return found


class ByteCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's hook for subclasses
    """Counts while it is entered::

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
            # The last one wins where axes of one rank have the same: nothing is sent in those.
            if group.size() > 1:
                self._ranks[tuple(dist.get_process_group_ranks(group))] = axis

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Count an operator and let it be."""
        if any(issubclass(kind, DTensor) for kind in types):
            # Let it take itself apart first: what it sends comes by again.
            return NotImplemented
        if func.namespace in NAMESPACES:
            self._see(func, args)
        return func(*args, **(kwargs or {}))

    def _see(self, func: torch._ops.OpOverload, args: tuple[object, ...]) -> None:
        # "c10d::send": without the overload.
        known = OPERATORS.get(func._schema.name)
        if known is None:
            return
        group = _group(args)
        size = sum(value.nbytes for value in _tensors(args[1 if known.second else 0]))
        key = (self._axis(group), known.kind)
        more = Amount(num_calls=1, size_bytes=size * group.size() if known.gathers else size)
        self.counts[key] = self.counts.get(key, Amount()) + more

    def _axis(self, group: dist.ProcessGroup) -> str:
        found = self._axes.get(group.group_name)
        return found or self._ranks.get(tuple(dist.get_process_group_ranks(group)), OTHER)


def make_visible(runner: DistributedDataParallel) -> None:
    """Let a counter see what DistributedDataParallel reduces: by a hook that does the same in Python.

    It takes the place of a communication hook, of which there can be one; any other hook is seen as well.
    """
    runner.register_comm_hook(None, allreduce_hook)


def _group(args: tuple[object, ...]) -> dist.ProcessGroup:
    """The group among an operator's arguments: boxed, as it is, or by its name, which comes last."""
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
