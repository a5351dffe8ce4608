"""The axes of a mesh on one rank: the groups of ranks for sums, and the rank's part of a batch.

Every room uses the groups of ``Axes``, so an axis has one meaning in training, evaluation, checkpoints and predictions:

- Sums over samples (counts, correct predictions) run over the ranks with other samples, ``SAMPLE_AXES``.
- Sums of losses also run over the stages, ``LOSS_AXES``. Only the last stage has a loss, and the others add zero.
- Ranks of ``tp`` have the same samples and the same loss, so no sum runs over them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fanin.datacenter.ranks.mesh import LOSS_AXES, PIPELINE, REPLICATE, SAMPLE_AXES, SHARD, MeshShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The axes of a mesh, seen from this rank.

    Attributes:
        shape: number of ranks along each axis.
        mesh: the ranks; None for a single process, which has no groups.
    """

    shape: MeshShape
    mesh: DeviceMesh | None

    @property
    def sample_groups(self) -> list[dist.ProcessGroup]:
        """The groups over which sums of samples add up."""
        return self._groups(SAMPLE_AXES)

    @property
    def loss_groups(self) -> list[dist.ProcessGroup]:
        """The groups over which sums of losses add up."""
        return self._groups(LOSS_AXES)

    @property
    def pipeline(self) -> dist.ProcessGroup | None:
        """The stages of this rank's pipeline, or None without a pipeline."""
        groups = self._groups((PIPELINE,))
        return groups[0] if groups else None

    @property
    def share(self) -> tuple[int, int]:
        """(index, count): the part of each global batch that this rank trains on, and the number of parts."""
        if self.mesh is None:
            return 0, 1
        index = self.mesh.get_local_rank(REPLICATE) * self.shape.dp_shard + self.mesh.get_local_rank(SHARD)
        return index, self.shape.num_parts

    def _groups(self, axes: Sequence[str]) -> list[dist.ProcessGroup]:
        return [] if self.mesh is None else [self.mesh.get_group(axis) for axis in self.shape.used(axes)]
