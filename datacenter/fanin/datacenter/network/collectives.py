"""The collectives that ranks speak by, as calls that can be checked: each held against numpy, for every type.

One of them is no backend's: an all-reduce around a ring, by messages alone, whose bytes are those of the formula.
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
"""Those that gloo takes, of torch 2.13: not int16."""
TOLERANCE: Final = 2.0**-7
"""bfloat16's, of a mean; all else is of numbers so small that it is exact."""
Values = npt.NDArray[np.complex128]
ReduceOp = dist.ReduceOp.RedOpType


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """``call`` takes what a rank brings, and gives what it then has; ``expected`` is the same in numpy, of what all
    bring (ranks, values). ``bus``: the factor from algbw to busbw, of so many ranks. ``reduces``: whether values are
    put together in a way that the caller chooses. ``shared``: whether each brings a part of what it is about.
    """

    kind: str
    call: Callable[[Tensor, ReduceOp], Tensor]
    expected: Callable[[Values, int, ReduceOp], Values]
    bus: Callable[[int], float]
    reduces: bool = False
    shared: bool = False


def _all_reduce(mine: Tensor, how: ReduceOp) -> Tensor:
    dist.all_reduce(mine, how)
    return mine


def _all_gather(mine: Tensor, how: ReduceOp) -> Tensor:
    whole = mine.new_empty(mine.numel() * dist.get_world_size())
    dist.all_gather_single(whole, mine)
    return whole


def _reduce_scatter(mine: Tensor, how: ReduceOp) -> Tensor:
    piece = mine.new_empty(mine.numel() // dist.get_world_size())
    dist.reduce_scatter_single(piece, mine, how)
    return piece


def _broadcast(mine: Tensor, how: ReduceOp) -> Tensor:
    dist.broadcast(mine, 0)
    return mine


def _all_to_all(mine: Tensor, how: ReduceOp) -> Tensor:
    given = torch.empty_like(mine)
    dist.all_to_all_single(given, mine)
    return given


def _send(mine: Tensor, how: ReduceOp) -> Tensor:
    given = torch.empty_like(mine)
    _hand_on(mine, given)
    return given


def _hand_on(mine: Tensor, given: Tensor) -> None:
    """To the next rank, and from the one before."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine, (rank + 1) % num_ranks),
            dist.P2POp(dist.irecv, given, (rank - 1) % num_ranks),
        ]
    ):
        work.wait()


def ring_all_reduce(mine: Tensor, how: ReduceOp = dist.ReduceOp.SUM) -> Tensor:
    """The sum over all ranks, by messages alone (Patarasuk and Yuan 2009, section 3).

    Pieces go around once to be added up, and once more to be told: 2 (p - 1) messages of a p-th each, fewer bytes than
    which no algorithm sends.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    pieces = list(mine.chunk(num_ranks))
    given = torch.empty_like(pieces[0])
    for step in range(2 * (num_ranks - 1)):
        _hand_on(pieces[(rank - step) % num_ranks], given)
        piece = pieces[(rank - step - 1) % num_ranks]
        if step < num_ranks - 1:
            piece += given
        else:
            piece.copy_(given)
    return mine


def _reduced(values: Values, how: ReduceOp) -> Values:
    by = {dist.ReduceOp.PRODUCT: np.multiply, dist.ReduceOp.MIN: np.minimum, dist.ReduceOp.MAX: np.maximum}
    found: Values = by.get(how, np.add).reduce(values, axis=0)
    return found / len(values) if how == dist.ReduceOp.AVG else found


def _part(values: Values, rank: int, of: int) -> Values:
    return np.split(values, of, axis=-1)[rank]


def _half(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


COLLECTIVES: Final[Mapping[str, Collective]] = MappingProxyType(
    {
        "all_reduce": Collective(
            kind=ALL_REDUCE,
            call=_all_reduce,
            expected=lambda values, rank, how: _reduced(values, how),
            bus=lambda num_ranks: 2 * _half(num_ranks),
            reduces=True,
        ),
        "all_gather": Collective(
            kind=ALL_GATHER,
            call=_all_gather,
            expected=lambda values, rank, how: values.reshape(-1),
            bus=_half,
            shared=True,
        ),
        "reduce_scatter": Collective(
            kind=REDUCE_SCATTER,
            call=_reduce_scatter,
            expected=lambda values, rank, how: _part(_reduced(values, how), rank, len(values)),
            bus=_half,
            reduces=True,
        ),
        "broadcast": Collective(
            kind=BROADCAST, call=_broadcast, expected=lambda values, rank, how: values[0], bus=lambda num_ranks: 1.0
        ),
        "all_to_all": Collective(
            kind=ALL_TO_ALL,
            call=_all_to_all,
            expected=lambda values, rank, how: np.concatenate([_part(row, rank, len(values)) for row in values]),
            bus=_half,
        ),
        "send and receive": Collective(
            kind=SEND, call=_send, expected=lambda values, rank, how: values[rank - 1], bus=lambda num_ranks: 1.0
        ),
        RING: Collective(
            kind=SEND,
            call=ring_all_reduce,
            expected=lambda values, rank, how: _reduced(values, how),
            bus=lambda num_ranks: 2 * _half(num_ranks),
        ),
    }
)


def ways(collective: Collective, dtype: torch.dtype) -> Iterator[ReduceOp]:
    """How values of a type are put together; where nothing is, one stands for all."""
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
    """(how many results were looked at, what is wrong with this rank's)."""
    num, wrong = 0, []
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    taken = {name: dtype for name, dtype in DTYPES.items() if backend == GLOO or name not in ("bool", "complex64")}
    rng = np.random.default_rng(1)
    for name, collective in collectives.items():
        for dtype_name, dtype in taken.items():
            for how in ways(collective, dtype):
                values = rng.integers(0, 3, (num_ranks, NUM_CHECKED * num_ranks)).astype(np.complex128)
                if how == dist.ReduceOp.PRODUCT:
                    # Each has one factor of two, so that no type overflows.
                    values = 1.0 + (np.indices(values.shape).sum(axis=0) % num_ranks == 0)
                if dtype == torch.bool:
                    values = np.minimum(values.real, 1.0).astype(np.complex128)
                mine = torch.from_numpy(values[rank]).to(torch.complex64)
                mine = (mine if dtype.is_complex else mine.real).to(device=device, dtype=dtype)
                found = collective.call(mine.clone(), how).cpu().to(torch.complex128).numpy()
                expected = collective.expected(values, rank, how)
                if dtype == torch.bool:
                    expected = np.minimum(expected.real, 1.0)
                num += 1
                if not np.allclose(found, expected, rtol=TOLERANCE, atol=0.0):
                    way = f" ({how.name})" if collective.reduces else ""
                    wrong.append(
                        f"{name}{way} of {dtype_name} on rank {rank}: got {found.real.tolist()}, expected "
                        f"{expected.real.tolist()}"
                    )
    return num, wrong
