"""Which slice of a whole tensor a rank has, also where two axes share a dimension that they do not divide.

FSDP2 over tensor parallelism cuts what the ranks of tp have of a dimension once more. Where that leaves a remainder,
torch 2.13 computes other bounds than it cuts at (97 rows over tp 2 and dp_shard 4: the last ranks have 10 and 12 rows
and are said to have 11 each), and its checkpoints go by what it computes: such tensors are ``is_crooked``.
"""

from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def slices(value: DTensor) -> tuple[slice, ...]:
    """The rank's own part, as slices of the whole tensor."""
    coordinates = value.device_mesh.get_coordinate()
    assert coordinates is not None, "a rank has no part of a mesh that it is not in"
    starts, sizes = [0] * value.ndim, list(value.shape)
    for axis, dim in _cuts(value):
        # As torch.chunk does: pieces of the rounded up size, and what is left for the last ones.
        piece = -(-sizes[dim] // value.device_mesh.size(axis))
        skipped = min(piece * coordinates[axis], sizes[dim])
        starts[dim] += skipped
        sizes[dim] = min(piece, sizes[dim] - skipped)
    assert tuple(sizes) == tuple(value.to_local().shape), f"{sizes} of {list(value.to_local().shape)}"
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def is_crooked(value: DTensor) -> bool:
    """Whether torch is wrong about where this tensor is cut."""
    pieces = [1] * value.ndim
    for axis, dim in _cuts(value):
        pieces[dim] *= value.device_mesh.size(axis)
    strided = any(isinstance(placement, _StridedShard) for placement in value.placements)
    return strided and any(size % number for size, number in zip(value.shape, pieces, strict=True))


def _cuts(value: DTensor) -> list[tuple[int, int]]:
    """Axes of the mesh and the dimensions they cut, in the order of cutting: where one is strided, later axes first."""
    found = [
        (axis, placement.dim)
        for axis, placement in enumerate(value.placements)
        if isinstance(placement, Shard | _StridedShard)
    ]
    strided = any(isinstance(placement, _StridedShard) for placement in value.placements)
    return found[::-1] if strided else found
