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
from typing import Annotated, Final

import numpy as np

from fanin.edge.codecs.stage import StageContext, State
from fanin.edge.codecs.vector import PARAMETERS, Group, Vector, Weighting
from fanin.edge.tensors import Float32s, Float64s
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import StageSpec
from fanin.protos.plans.keys import Key
from fanin.protos.plans.named import checked_options

SCAFFOLD: Final = "scaffold"
"""The name of the stage."""
CONTROL: Final = "control"
NUM_DEVICES: Final = "num_devices"
MAX_DEVICES: Final = 1 << 40
WITH_DEVICES: Final = (SCAFFOLD, "feddyn")
"""The stages that need the number of all devices."""
ALL_DEVICES: Final = "The number of all devices that take part in the Run."


def declared_devices(stages: Iterable[StageSpec]) -> int | None:
    """Return the number of all devices that a stage of a Plan declares; None without such a stage.

    Raises:
        InvalidPlan: The options of the stage are wrong.
    """
    given = (
        checked_options(f"plan: stages: {stage.name}: options", Scaffold, stage.options, 0)
        for stage in stages
        if stage.name in WITH_DEVICES
    )
    return next((int(options[NUM_DEVICES]) for options in given), None)


def named_devices(stages: Iterable[StageSpec]) -> str:
    """Return the name of the stage that ``declared_devices`` reads; empty without one."""
    return next((stage.name for stage in stages if stage.name in WITH_DEVICES), "")


class Scaffold:
    """The stage ``scaffold``.

    Args:
        num_devices: N, the number of all devices in the Run.
    """

    def __init__(self, num_devices: Annotated[int, Key(text=ALL_DEVICES, at_least=1, at_most=MAX_DEVICES)]) -> None:
        self._num_devices = num_devices

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
            raise InvalidInput(
                "scaffold: got a training of 0 steps, expected at least one; report num_steps", code="FN-0386"
            )
        drift = vector[PARAMETERS].astype(np.float64) / (context.num_steps * context.learning_rate)
        change = (-drift - context.downlink[CONTROL]).astype(np.float32)
        decoded = context.send({**vector, CONTROL: change})
        return {CONTROL: (state[CONTROL] + decoded[CONTROL]).astype(np.float32)}

    def advance(self, auxiliary: Float64s, aggregate: Float64s, num_updates: int) -> Float64s:
        """See ``GroupStage.advance``: c + |S| / N times the mean change."""
        return auxiliary + (num_updates / self._num_devices) * aggregate
