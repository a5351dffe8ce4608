"""Slices of a sharded tensor: the true bounds of a rank's shard, and the cases in which torch reports other bounds.

FSDP2 on top of tensor parallelism splits a dimension that tp has already split. If the sizes leave a remainder, torch
2.13 reports bounds that differ from the actual split. Example: of 97 rows over tp 2 and dp_shard 4 the last ranks hold
10 and 12 rows, and torch reports 11 for each. DCP relies on the reported bounds, so such tensors need special care:
``is_misaligned`` detects them.
"""

from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def slices(value: DTensor) -> tuple[slice, ...]:
    """Return this rank's shard as slices of the global tensor."""
    coordinates = value.device_mesh.get_coordinate()
    assert coordinates is not None, "a rank has no part of a mesh that it is not in"
    starts, sizes = [0] * value.ndim, list(value.shape)
    for axis, dim in _cuts(value):
        # As torch.chunk does: equal pieces of the rounded-up size, and the remainder in the last ones.
        piece = -(-sizes[dim] // value.device_mesh.size(axis))
        skipped = min(piece * coordinates[axis], sizes[dim])
        starts[dim] += skipped
        sizes[dim] = min(piece, sizes[dim] - skipped)
    assert tuple(sizes) == tuple(value.to_local().shape), f"{sizes} of {list(value.to_local().shape)}"
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def is_misaligned(value: DTensor) -> bool:
    """Return whether torch reports wrong bounds for the shards of this tensor."""
    pieces = [1] * value.ndim
    for axis, dim in _cuts(value):
        pieces[dim] *= value.device_mesh.size(axis)
    strided = any(isinstance(placement, _StridedShard) for placement in value.placements)
    return strided and any(size % number for size, number in zip(value.shape, pieces, strict=True))


def _cuts(value: DTensor) -> list[tuple[int, int]]:
    """Return (mesh axis, dim) pairs in the order of splitting: later axes first if any placement is strided."""
    cuts = [
        (axis, placement.dim)
        for axis, placement in enumerate(value.placements)
        if isinstance(placement, Shard | _StridedShard)
    ]
    strided = any(isinstance(placement, _StridedShard) for placement in value.placements)
    return cuts[::-1] if strided else cuts
