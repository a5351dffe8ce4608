"""FedDyn: a linear and a quadratic term in the objective of each device, so that all devices agree where they end.

Device k minimizes, from the Version x that it received,

    L_k(y) - <g_k, y> + alpha / 2 |y - x|^2        g_k <- g_k - alpha (y - x) after the training

alpha is ``training.proximal_weight``: the train graph has the quadratic term as FedProx's proximal term, and the linear
one as SCAFFOLD's control input, here -g_k. The outer optimizer ``feddyn`` has the coordinator's part.

The paper's device adds the exact change to g_k. This one adds the coordinator's reading of it. So the coordinator's h
stays the mean of all g_k, up to rounding.

Reference:
    Acar et al. 2021, Federated Learning Based on Dynamic Regularization, arXiv 2111.04263, algorithm 1.
"""

from collections.abc import Mapping
from typing import Annotated, Final

import numpy as np

from fanin.edge.codecs.scaffold import ALL_DEVICES, CONTROL, MAX_DEVICES
from fanin.edge.codecs.stage import StageContext, State
from fanin.edge.codecs.vector import PARAMETERS, Group, Vector, Weighting
from fanin.edge.tensors import Float32s, Float64s
from fanin.protos.plans.keys import Key

FEDDYN: Final = "feddyn"
"""The name of the stage, and of its outer optimizer."""
LINEAR: Final = "linear"


class FedDyn:
    """The stage ``feddyn``.

    Args:
        num_devices: m, the number of all devices in the Run. The outer optimizer reads it.
    """

    def __init__(self, num_devices: Annotated[int, Key(text=ALL_DEVICES, at_least=1, at_most=MAX_DEVICES)]) -> None:
        self.num_devices = num_devices

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``Stage.tensors``: g_k."""
        return (LINEAR,)

    @property
    def groups(self) -> tuple[Group, ...]:
        """See ``GroupStage.groups``: none. The coordinator's part follows from the changes of the parameters."""
        return ()

    @property
    def weighting(self) -> Weighting:
        """See ``WeighingStage.weighting``: the paper's mean over devices."""
        return Weighting.ONE

    def prepare(self, state: State, downlink: Mapping[str, Float32s]) -> Mapping[str, Float32s]:
        """See ``GroupStage.prepare``: -g_k, which a step adds to the gradient."""
        return {CONTROL: -state[LINEAR]}

    def apply(self, vector: Vector, state: State, context: StageContext) -> State:
        """See ``Stage.apply``."""
        alpha, decoded = context.steps.training.proximal_weight, context.send(vector)
        return {LINEAR: (state[LINEAR] - alpha * decoded[PARAMETERS]).astype(np.float32)}

    def advance(self, auxiliary: Float64s, aggregate: Float64s, num_updates: int) -> Float64s:
        """See ``GroupStage.advance``: there is no auxiliary tensor to change."""
        return auxiliary
