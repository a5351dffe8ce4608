"""The shape of a datacenter job: how many ranks stand along each axis.

One record names every axis and is checked once, before a process is spent: the product of the axes is the world.
The order of ``AXES`` is the order of the mesh, slowest first: stages of a pipeline speak least often and so may be
furthest apart, the ranks that share each layer speak most often and are neighbours. A shape is written
``pp=2,dp_shard=2,tp=2``; axes of one rank are left out, and one process by itself is ``none``. Needs no torch.
"""

from dataclasses import dataclass, replace
from typing import Final

from fanin.protos.errors import InvalidInput

PIPELINE: Final = "pp"
REPLICATE: Final = "dp_replicate"
SHARD: Final = "dp_shard"
TENSOR: Final = "tp"
AXES: Final = (PIPELINE, REPLICATE, SHARD, TENSOR)
ALONE: Final = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Number of ranks along each axis.

    ``pp`` ranks hold consecutive layers of one model; ``dp_replicate`` copies of it each take their part of a batch;
    the ranks of ``dp_shard`` take their part too, but keep only a share of the parameters; ``tp`` ranks split the
    matrices of each layer.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1:
                raise InvalidInput(f"mesh: got {axis} {size}, expected at least 1")

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """The shape that a text names, such as ``pp=2,tp=4`` or ``none``. Raises InvalidInput."""
        sizes: dict[str, int] = {}
        for part in () if text.strip() == ALONE else text.split(","):
            axis, _, number = (piece.strip() for piece in part.partition("="))
            if axis not in AXES or axis in sizes or not (number.isascii() and number.isdecimal()):
                raise InvalidInput(
                    f"mesh: got {part.strip()!r} in {text!r}, expected each of {', '.join(AXES)} at most once and as "
                    f"in {AXES[0]}=2, or {ALONE!r} alone"
                )
            sizes[axis] = int(number)
        return cls(**sizes)

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or ALONE

    @property
    def sizes(self) -> dict[str, int]:
        """Axis to number of ranks, in the order of the mesh."""
        return {PIPELINE: self.pp, REPLICATE: self.dp_replicate, SHARD: self.dp_shard, TENSOR: self.tp}

    @property
    def num_ranks(self) -> int:
        """How many processes the shape needs."""
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def num_parts(self) -> int:
        """In how many parts a global batch is split: ranks that differ along pp or tp alone see the same samples."""
        return self.dp_replicate * self.dp_shard

    def fit(self, world_size: int) -> "MeshShape":
        """The shape for another world, which has more copies or fewer; pp and tp stay, and so does this very world's.

        A copy is shared by no fewer ranks than before, as long as there are so many: no rank is then given more of the
        parameters than it had room for. Raises InvalidInput.
        """
        stays = self.pp * self.tp
        if world_size < 1 or world_size % stays:
            raise InvalidInput(
                f"mesh {self}: got a world of {world_size}, expected a multiple of pp {self.pp} x tp {self.tp} = "
                f"{stays} ranks: copies alone come and go with machines; start another number of processes, or "
                "change the mesh"
            )
        parts = world_size // stays
        dp_shard = next(size for size in range(min(self.dp_shard, parts), parts + 1) if parts % size == 0)
        return replace(self, dp_replicate=parts // dp_shard, dp_shard=dp_shard)

    def check(self, world_size: int) -> None:
        """Raise InvalidInput unless the shape uses exactly the ranks that there are."""
        if self.num_ranks != world_size:
            factors = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())
            raise InvalidInput(
                f"mesh: {factors} = {self.num_ranks} ranks, got a world of {world_size}; "
                f"start {self.num_ranks} processes or change the mesh"
            )
