"""q-FedAvg: devices with a larger loss count more, so that the losses of all devices become more alike.

With F_i, the loss of device i at the Version that it received, and its change c_i, the coordinator computes

    x+ = x + sum_i F_i^q c_i / sum_i h_i        h_i = q F_i^(q-1) |c_i|^2 / eta + F_i^q

The paper has delta = -(L F^q c) and h = q F^(q-1) |L c|^2 + L F^q with L = 1 / eta: the same after a division by L.
Each device counts the same. With q = 0 it is the mean over devices.

The loss is F_i + 1e-10, as in the paper's code, because F^(q-1) has no value at 0 for q below 1.

Reference:
    Li et al. 2020, Fair Resource Allocation in Federated Learning, arXiv 1905.10497, algorithm 2.
"""

from typing import Annotated, Final

import numpy as np

from fanin.edge.codecs.stage import StageContext, State
from fanin.edge.codecs.vector import PARAMETERS, Vector, Weighting
from fanin.edge.runtimes.evaluations import METRIC_UNIT, VERSION_LOSS
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import EXAMPLES, MAX_SUM
from fanin.protos.plans.keys import Key

QFEDAVG: Final = "qfedavg"
"""The name of the stage, and of its rule."""
SCALE: Final = "qfedavg_scale"
"""The number h of a device as a statistic."""
SCALE_UNIT: Final = 1 << 24
"""h is counted in units of 2^-24: up to 2^32, with 6e-8 as the smallest step."""
LEAST_LOSS: Final = 1e-10
MAX_Q: Final = 16


class QFedAvg:
    """The stage ``qfedavg``.

    Args:
        q: The exponent of the loss. 0.0 weighs all devices alike.
    """

    def __init__(self, q: Annotated[float, Key(text="The exponent of the loss.", at_least=0, at_most=MAX_Q)]) -> None:
        self._q = q

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``Stage.tensors``."""
        return ()

    @property
    def statistics(self) -> tuple[str, ...]:
        """See ``CountingStage.statistics``."""
        return (VERSION_LOSS, SCALE)

    @property
    def weighting(self) -> Weighting:
        """See ``WeighingStage.weighting``."""
        return Weighting.ONE

    def apply(self, vector: Vector, state: State, context: StageContext) -> State:
        """See ``Stage.apply``."""
        counts, q = context.counts, self._q
        if not counts.get(EXAMPLES) or VERSION_LOSS not in counts:
            raise InvalidInput(
                f"qfedavg: got no loss of the version, expected the count {VERSION_LOSS!r} of the trainer; train with "
                "the graphs of the bundle, or count it",
                code="FN-0386",
            )
        loss = max(counts[VERSION_LOSS] / METRIC_UNIT / counts[EXAMPLES], 0.0) + LEAST_LOSS
        change, weight = vector[PARAMETERS].astype(np.float64), loss**q
        scale = q * loss ** (q - 1.0) * float(np.square(change).sum()) / context.learning_rate + weight
        context.report(SCALE, round(min(scale * SCALE_UNIT, MAX_SUM)))
        with np.errstate(over="ignore"):
            context.send({**vector, PARAMETERS: (weight * change).astype(np.float32)})
        return {}
