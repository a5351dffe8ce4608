"""Error feedback: the codec's error in an Update is added to the next one.

Without it, a coarse codec loses every part of a change that stays below its step. With it, such parts add up on the
device until the codec sends them.

Reference:
    Karimireddy et al. 2019, Error Feedback Fixes SignSGD and other Gradient Compression Schemes, arXiv 1901.09847,
    algorithm 2. Seide et al. 2014, 1-Bit Stochastic Gradient Descent, section 2.
"""

import numpy as np

from fanin.edge.codecs.stage import StageContext, State
from fanin.edge.codecs.vector import PARAMETERS, Vector

RESIDUAL = "residual"


class ErrorFeedback:
    """The stage ``error_feedback``. Its state is the residual: the accumulated error of the codec."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``Stage.tensors``."""
        return (RESIDUAL,)

    def apply(self, vector: Vector, state: State, context: StageContext) -> State:
        """See ``Stage.apply``."""
        target = (vector[PARAMETERS].astype(np.float64) + state[RESIDUAL]).astype(np.float32)
        decoded = context.send({**vector, PARAMETERS: target})
        return {RESIDUAL: (target - decoded[PARAMETERS]).astype(np.float32)}
