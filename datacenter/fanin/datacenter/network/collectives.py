"""The collectives between ranks, and a check of each against numpy for every dtype.

One of them is not implemented by a backend: an all-reduce over a ring of point-to-point messages. Its bytes must equal
the formula of a ring.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from fanin.datacenter.network.counters import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, SEND

RING: Final = "ring by hand"
GLOO: Final = "gloo"
NUM_CHECKED: Final = 6
"""Values for each rank in a check."""
DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        str(dtype).removeprefix("torch."): dtype
        for dtype in (
            *(torch.uint8, torch.int8, torch.int32, torch.int64),
            *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
            *(torch.bool, torch.complex64),
        )
    }
)
"""The dtypes that gloo supports in torch 2.13. It does not support int16."""
TOLERANCE: Final = 2.0**-7
"""Relative tolerance, needed for a mean in bfloat16. All other results are exact, because the values are small."""
Values = npt.NDArray[np.complex128]
ReduceOp = dist.ReduceOp.RedOpType


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective, with its reference in numpy.

    Attributes:
        kind: its kind in ``network.counters``.
        call: runs it on this rank's tensor (values,) and returns the result.
        expected: the result by numpy, from the tensors of all ranks (ranks, values), the rank and the reduction.
        bus: factor from algbw to busbw for a number of ranks.
        reduces: whether the caller chooses the reduction.
        shared: whether each rank contributes only a part of the full tensor.
    """

    kind: str
    call: Callable[[Tensor, ReduceOp], Tensor]
    expected: Callable[[Values, int, ReduceOp], Values]
    bus: Callable[[int], float]
    reduces: bool = False
    shared: bool = False


def _all_reduce(tensor: Tensor, op: ReduceOp) -> Tensor:
    dist.all_reduce(tensor, op)
    return tensor


def _all_gather(tensor: Tensor, op: ReduceOp) -> Tensor:
    gathered = tensor.new_empty(tensor.numel() * dist.get_world_size())
    dist.all_gather_single(gathered, tensor)
    return gathered


def _reduce_scatter(tensor: Tensor, op: ReduceOp) -> Tensor:
    chunk = tensor.new_empty(tensor.numel() // dist.get_world_size())
    dist.reduce_scatter_single(chunk, tensor, op)
    return chunk


def _broadcast(tensor: Tensor, op: ReduceOp) -> Tensor:
    dist.broadcast(tensor, 0)
    return tensor


def _all_to_all(tensor: Tensor, op: ReduceOp) -> Tensor:
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor)
    return received


def _send(tensor: Tensor, op: ReduceOp) -> Tensor:
    received = torch.empty_like(tensor)
    _send_to_next(tensor, received)
    return received


def _send_to_next(tensor: Tensor, received: Tensor) -> None:
    """Send a tensor to the next rank, and receive one from the previous rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, (rank + 1) % num_ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % num_ranks),
        ]
    ):
        work.wait()


def ring_all_reduce(tensor: Tensor, op: ReduceOp = dist.ReduceOp.SUM) -> Tensor:
    """Sum a tensor over all ranks with point-to-point messages only, in place.

    The chunks travel around the ring once to be summed, and once more to be distributed. Each rank sends 2 (p - 1)
    messages of 1 / p of the tensor. No algorithm sends fewer bytes.

    Reference:
        Patarasuk and Yuan 2009, section 3.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    chunks = list(tensor.chunk(num_ranks))
    received = torch.empty_like(chunks[0])
    for step in range(2 * (num_ranks - 1)):
        _send_to_next(chunks[(rank - step) % num_ranks], received)
        chunk = chunks[(rank - step - 1) % num_ranks]
        if step < num_ranks - 1:
            chunk += received
        else:
            chunk.copy_(received)
    return tensor


def _reduced(values: Values, op: ReduceOp) -> Values:
    reductions = {dist.ReduceOp.PRODUCT: np.multiply, dist.ReduceOp.MIN: np.minimum, dist.ReduceOp.MAX: np.maximum}
    total: Values = reductions.get(op, np.add).reduce(values, axis=0)
    return total / len(values) if op == dist.ReduceOp.AVG else total


def _part(values: Values, rank: int, num_ranks: int) -> Values:
    return np.split(values, num_ranks, axis=-1)[rank]


def _half(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


COLLECTIVES: Final[Mapping[str, Collective]] = MappingProxyType(
    {
        "all_reduce": Collective(
            kind=ALL_REDUCE,
            call=_all_reduce,
            expected=lambda values, rank, op: _reduced(values, op),
            bus=lambda num_ranks: 2 * _half(num_ranks),
            reduces=True,
        ),
        "all_gather": Collective(
            kind=ALL_GATHER,
            call=_all_gather,
            expected=lambda values, rank, op: values.reshape(-1),
            bus=_half,
            shared=True,
        ),
        "reduce_scatter": Collective(
            kind=REDUCE_SCATTER,
            call=_reduce_scatter,
            expected=lambda values, rank, op: _part(_reduced(values, op), rank, len(values)),
            bus=_half,
            reduces=True,
        ),
        "broadcast": Collective(
            kind=BROADCAST, call=_broadcast, expected=lambda values, rank, op: values[0], bus=lambda num_ranks: 1.0
        ),
        "all_to_all": Collective(
            kind=ALL_TO_ALL,
            call=_all_to_all,
            expected=lambda values, rank, op: np.concatenate([_part(row, rank, len(values)) for row in values]),
            bus=_half,
        ),
        "send and receive": Collective(
            kind=SEND, call=_send, expected=lambda values, rank, op: values[rank - 1], bus=lambda num_ranks: 1.0
        ),
        RING: Collective(
            kind=SEND,
            call=ring_all_reduce,
            expected=lambda values, rank, op: _reduced(values, op),
            bus=lambda num_ranks: 2 * _half(num_ranks),
        ),
    }
)


def reductions_of(collective: Collective, dtype: torch.dtype) -> Iterator[ReduceOp]:
    """Yield the reductions that a collective supports for a dtype. One that reduces nothing is called once."""
    yield dist.ReduceOp.SUM
    if not collective.reduces:
        return
    if dtype.is_floating_point or dtype.is_complex:
        yield dist.ReduceOp.AVG
    if not dtype.is_complex:
        yield from (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)


def check(
    device: torch.device, backend: str, collectives: Mapping[str, Collective] = COLLECTIVES
) -> tuple[int, list[str]]:
    """Compare every collective with numpy, for every dtype and reduction. All ranks call this function together.

    Args:
        device: where the tensors are stored.
        backend: ``gloo``, or another backend, for which bool and complex64 are left out.
        collectives: the collectives to check.

    Returns:
        (number of results that were compared, descriptions of this rank's wrong results).
    """
    num, faults, rank = 0, list[str](), dist.get_rank()
    dtypes = {name: dtype for name, dtype in DTYPES.items() if backend == GLOO or name not in ("bool", "complex64")}
    rng = np.random.default_rng(1)
    for name, collective in collectives.items():
        for dtype_name, dtype in dtypes.items():
            for op in reductions_of(collective, dtype):
                values = _values(rng, dtype, op)
                tensor = torch.from_numpy(values[rank]).to(torch.complex64)
                tensor = (tensor if dtype.is_complex else tensor.real).to(device=device, dtype=dtype)
                result = collective.call(tensor.clone(), op).cpu().to(torch.complex128).numpy()
                expected = collective.expected(values, rank, op)
                if dtype == torch.bool:
                    expected = np.minimum(expected.real, 1.0)
                num += 1
                if not np.allclose(result, expected, rtol=TOLERANCE, atol=0.0):
                    reduction = f" ({op.name})" if collective.reduces else ""
                    faults.append(
                        f"{name}{reduction} of {dtype_name} on rank {rank}: got {result.real.tolist()}, expected "
                        f"{expected.real.tolist()}"
                    )
    return num, faults


def _values(rng: np.random.Generator, dtype: torch.dtype, op: ReduceOp) -> Values:
    """Return the values of all ranks (ranks, values), so small that every dtype holds the result exactly."""
    num_ranks = dist.get_world_size()
    values = rng.integers(0, 3, (num_ranks, NUM_CHECKED * num_ranks)).astype(np.complex128)
    if op == dist.ReduceOp.PRODUCT:
        # Each product has one factor of two, so that no dtype overflows.
        values = 1.0 + (np.indices(values.shape).sum(axis=0) % num_ranks == 0)
    return np.minimum(values.real, 1.0).astype(np.complex128) if dtype == torch.bool else values
