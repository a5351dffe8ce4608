"""The mesh of a datacenter job: the number of ranks along each axis.

``MeshShape`` names every axis and is checked once, before a process starts. The product of its axes is the world size.
``AXES`` is the order of the mesh, slowest axis first. Pipeline stages communicate least often, so their ranks may be
furthest apart. The ranks of ``tp`` communicate in every layer, so they are neighbours.

A shape is written ``pp=2,dp_shard=2,tp=2``. Axes of one rank are omitted, and a single process is ``none``. This module
needs no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from fanin.protos.errors import InvalidInput

PIPELINE: Final = "pp"
REPLICATE: Final = "dp_replicate"
SHARD: Final = "dp_shard"
TENSOR: Final = "tp"
AXES: Final = (PIPELINE, REPLICATE, SHARD, TENSOR)
SAMPLE_AXES: Final = (SHARD, REPLICATE)
"""The axes along which ranks have other samples. Sums over samples add up over them."""
LOSS_AXES: Final = (*SAMPLE_AXES, PIPELINE)
"""The axes over which sums of losses add up: only the last stage of a pipeline has a loss."""
ALONE: Final = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Number of ranks along each axis.

    Attributes:
        pp: pipeline stages; each rank holds some consecutive layers.
        dp_replicate: copies of the model; each trains on its own part of a batch.
        dp_shard: ranks that train on their own part of a batch and keep only a shard of the parameters.
        tp: ranks that split the matrices of each layer.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1:
                raise InvalidInput(f"mesh: got {axis} {size}, expected at least 1", code="FN-1265")

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """Parse a shape such as ``pp=2,tp=4`` or ``none``.

        Raises:
            InvalidInput: the text names an unknown axis, repeats one, or gives no number for it.
        """
        sizes: dict[str, int] = {}
        for part in () if text.strip() == ALONE else text.split(","):
            axis, _, number = (piece.strip() for piece in part.partition("="))
            if axis not in AXES or axis in sizes or not (number.isascii() and number.isdecimal()):
                raise InvalidInput(
                    f"mesh: got {part.strip()!r} in {text!r}, expected each of {', '.join(AXES)} at most once and as "
                    f"in {AXES[0]}=2, or {ALONE!r} alone",
                    code="FN-1265",
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
        """Number of processes that the shape needs."""
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def num_parts(self) -> int:
        """Number of parts of a global batch. Ranks that differ only along pp or tp receive the same samples."""
        return self.dp_replicate * self.dp_shard

    def used(self, axes: Sequence[str]) -> list[str]:
        """Return those of ``axes`` that have more than one rank, in the same order."""
        return [axis for axis in axes if self.sizes[axis] > 1]

    def batch_multiple(self, accumulate: int, microbatches: int) -> int:
        """Return the number of samples of which a global batch must be a multiple, so that its chunks are equal."""
        return self.num_parts * accumulate * microbatches

    def fit(self, world_size: int) -> "MeshShape":
        """Return the shape for another world size, with more or fewer copies of the model.

        ``pp`` and ``tp`` do not change. For the current world size the shape itself is returned. ``dp_shard`` does not
        shrink while there are enough ranks, so no rank receives more parameters than it has memory for.

        Raises:
            InvalidInput: ``world_size`` is not a multiple of ``pp x tp``.
        """
        ranks_per_part = self.pp * self.tp
        if world_size < 1 or world_size % ranks_per_part:
            raise InvalidInput(
                f"mesh {self}: got a world of {world_size}, expected a multiple of pp {self.pp} x tp {self.tp} = "
                f"{ranks_per_part} ranks: only the number of copies changes with the number of machines; start another "
                "number of processes, or change the mesh",
                code="FN-1266",
            )
        parts = world_size // ranks_per_part
        dp_shard = next(size for size in range(min(self.dp_shard, parts), parts + 1) if parts % size == 0)
        return replace(self, dp_replicate=parts // dp_shard, dp_shard=dp_shard)

    def check(self, world_size: int) -> None:
        """Raise InvalidInput unless the shape uses exactly ``world_size`` ranks."""
        if self.num_ranks != world_size:
            factors = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())
            raise InvalidInput(
                f"mesh: {factors} = {self.num_ranks} ranks, got a world of {world_size}; "
                f"start {self.num_ranks} processes or change the mesh",
                code="FN-1266",
            )
