"""The step from the auxiliary tensors of a Version to those of the next one.

A stage that adds a group to the vector has an auxiliary tensor of the same name in each Version
(``edge.codecs.stage``). The stage computes it from the aggregate of its group, elementwise and in float64. The result
is rounded to float32, stored as a blob and signed with the Version. The first Version of a lineage stores no auxiliary
tensors; they are zero. A stage sees the values of trained parameters alone; those of statistics and counters stay zero.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext

import numpy as np

from fanin.edge.codecs.stage import GroupStage, Stage
from fanin.edge.codecs.stages import STAGES
from fanin.edge.codecs.trained import TrainedPart
from fanin.edge.codecs.vector import VectorLayout
from fanin.edge.tensors import Float32s
from fanin.server.aggregation.checked import Part
from fanin.server.aggregation.sets import Aggregate


class AuxiliaryStep:
    """The step of all auxiliary tensors of a Round, each in slices.

    Args:
        aggregate: The aggregate of the Round.
        layout: The layout of the vector.
        stages: The stages of the Run, by name.
        num_updates: Number of Updates in the Round.
    """

    def __init__(
        self, aggregate: Aggregate, layout: VectorLayout, stages: Mapping[str, Stage], num_updates: int
    ) -> None:
        self._aggregate = aggregate
        self._layout = layout
        self._num_updates = num_updates
        self._owners = {
            group.name: (name, stage)
            for name, stage in stages.items()
            if isinstance(stage, GroupStage)
            for group in stage.groups
        }

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors, in the order in which a Version has them."""
        return tuple(sorted(self._owners))

    def tensor(self, name: str, before: Iterable[Float32s]) -> Iterator[Float32s]:
        """Yield a next tensor in slices, each as long as the slice of the tensor before.

        Raises:
            InvalidPlan: The stage raised an error, or its result is not the expected number of finite values.
        """
        owner, stage = self._owners[name]
        part = Part(
            name=f"stage {owner}",
            advice="correct the stage",
            beyond="lower training.learning_rate, or correct the stage",
        )
        begin, _ = self._layout.span(name)
        first, places = 0, TrainedPart(self._layout.table)
        for piece in before:
            last = first + piece.size
            aggregate, _ = places.split(self._aggregate.part(begin + first, begin + last), first)
            trained, averaged = places.split(piece, first)
            with nullcontext() if type(stage) in STAGES.values() else part.blamed("advance"):
                after = stage.advance(trained.astype(np.float64), aggregate, self._num_updates)
            rounded = part.rounded("advance", f" for the tensor {name!r}", after, trained.size)
            yield places.join(rounded, np.zeros_like(averaged), first)
            first = last
