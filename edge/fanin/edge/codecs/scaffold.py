"""SCAFFOLD: control variates against the drift of devices whose data differ.

Each device i keeps a control variate c_i, and each Version has their mean c. A step of the training on a device adds
c - c_i to the gradient. The device then sends the change of its c_i together with the change of the parameters.

The paper's device adds the exact change to its c_i. This one adds the coordinator's reading of the change, after the
rounding of the codec. So c stays the mean of all c_i, up to the rounding of float32.

Reference:
    Karimireddy et al. 2020, SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, arXiv 1910.06378,
    algorithm 1, with option II for c_i.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from fanin.edge.codecs.stage import StageContext, State, check_options
from fanin.edge.codecs.vector import PARAMETERS, Group, Vector, Weighting
from fanin.edge.tensors import Float32s, Float64s
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.protos.messages import StageSpec

SCAFFOLD: Final = "scaffold"
"""The name of the stage."""
CONTROL: Final = "control"
NUM_DEVICES: Final = "num_devices"
MAX_DEVICES: Final = 1 << 40


def declared_devices(stages: Iterable[StageSpec]) -> int | None:
    """Return the number of devices that the stage scaffold of a Plan declares; None without this stage."""
    return next((int(stage.options[NUM_DEVICES]) for stage in stages if stage.name == SCAFFOLD), None)


class Scaffold:
    """The stage ``scaffold``.

    Args:
        num_devices: N, the number of all devices in the Run.
    """

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices

    @classmethod
    def of(cls, options: Mapping[str, float]) -> "Scaffold":
        """Return the stage for the options of a Plan. Raises InvalidPlan."""
        check_options(SCAFFOLD, options, (NUM_DEVICES,))
        num_devices = options[NUM_DEVICES]
        if not 1 <= num_devices <= MAX_DEVICES or num_devices != int(num_devices):
            raise InvalidPlan(
                f"plan: stages: scaffold: got {NUM_DEVICES} {num_devices:g}, expected a whole number from 1 to "
                f"{MAX_DEVICES}: all devices that take part in the Run"
            )
        return cls(int(num_devices))

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``Stage.tensors``: c_i."""
        return (CONTROL,)

    @property
    def groups(self) -> tuple[Group, ...]:
        """See ``GroupStage.groups``: the change of c_i. All devices count the same in it."""
        return (Group(name=CONTROL, weighting=Weighting.ONE),)

    def prepare(self, state: State, downlink: Mapping[str, Float32s]) -> Mapping[str, Float32s]:
        """See ``GroupStage.prepare``: c - c_i."""
        return {CONTROL: downlink[CONTROL] - state[CONTROL]}

    def apply(self, vector: Vector, state: State, context: StageContext) -> State:
        """See ``Stage.apply``."""
        if not context.num_steps:
            raise InvalidInput("scaffold: got a training of 0 steps, expected at least one; report num_steps")
        drift = vector[PARAMETERS].astype(np.float64) / (context.num_steps * context.learning_rate)
        change = (-drift - context.downlink[CONTROL]).astype(np.float32)
        decoded = context.send({**vector, CONTROL: change})
        return {CONTROL: (state[CONTROL] + decoded[CONTROL]).astype(np.float32)}

    def advance(self, auxiliary: Float64s, aggregate: Float64s, num_updates: int) -> Float64s:
        """See ``GroupStage.advance``: c + |S| / N times the mean change."""
        return auxiliary + (num_updates / self._num_devices) * aggregate
