"""The shape of a datacenter job: how many ranks stand along each axis, and the DeviceMesh made of it.

One record names every axis and is checked once, before a process is spent: the product of the axes is the world.
The order of ``AXES`` is the order of the mesh, slowest first; a further kind of parallelism is a further axis.
"""

from dataclasses import dataclass
from math import prod
from typing import Final

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fanin.protos.errors import InvalidInput

REPLICATE: Final = "dp_replicate"
AXES: Final = (REPLICATE,)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Number of ranks along each axis. ``dp_replicate``: whole copies of the model, each with its part of a batch."""

    dp_replicate: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1:
                raise InvalidInput(f"mesh: got {axis} {size}, expected at least 1")

    @property
    def sizes(self) -> dict[str, int]:
        """Axis to number of ranks, in the order of the mesh."""
        return {REPLICATE: self.dp_replicate}

    @property
    def num_ranks(self) -> int:
        """How many processes the shape needs."""
        return prod(self.sizes.values())

    def check(self, world_size: int) -> None:
        """Raise InvalidInput unless the shape uses exactly the ranks that there are."""
        if self.num_ranks != world_size:
            factors = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())
            raise InvalidInput(
                f"mesh: {factors} = {self.num_ranks} ranks, got a world of {world_size}; "
                f"start {self.num_ranks} processes or change the mesh"
            )


def build_mesh(shape: MeshShape, world_size: int) -> DeviceMesh:
    """The mesh of processes on the CPU; the process group must stand already. Raises InvalidInput."""
    shape.check(world_size)
    return init_device_mesh("cpu", tuple(shape.sizes.values()), mesh_dim_names=AXES)
