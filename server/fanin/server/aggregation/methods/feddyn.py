"""The outer optimizer of FedDyn.

With m devices in the Run, of which the set P sent an Update, and the mean A of their changes,

    h <- h - alpha |P| / m * A        x+ = x + A - h / alpha

The state is ``drift``, -h / alpha: alpha is needed on the devices alone.

    drift <- drift + |P| / m * A      x+ = x + A + drift

The state belongs to a lineage, as the states of the devices do. After a rollback and a Version from outside, all
devices begin with g_k = 0, so h begins with 0: otherwise it would not be the mean of the g_k, and the Run would end
elsewhere.

Reference:
    Acar et al. 2021, Federated Learning Based on Dynamic Regularization, arXiv 2111.04263, algorithm 1.
"""

from collections.abc import Mapping
from typing import Final, TypeVar

from fanin.edge.codecs.scaffold import declared_devices
from fanin.edge.tensors import Float64s
from fanin.protos.plans import Plan

DRIFT: Final = "drift"
T = TypeVar("T")


class FedDynStep:
    """The step of a Round of FedDyn. See ``OuterOptimizer``.

    Args:
        num_devices: m.
        num_updates: |P|.
    """

    def __init__(self, num_devices: int, num_updates: int = 0) -> None:
        self._num_devices = num_devices
        self._share = num_updates / num_devices

    def of_round(self, num_updates: int) -> "FedDynStep":
        """Return the step of a Round with this many Updates."""
        return FedDynStep(self._num_devices, num_updates)

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``OuterOptimizer.tensors``."""
        return (DRIFT,)

    def begin(self, parameters: Float64s) -> Mapping[str, Float64s]:
        """See ``OuterOptimizer.begin``."""
        return {DRIFT: parameters * 0.0}

    def step(
        self, state: Mapping[str, Float64s], parameters: Float64s, aggregate: Float64s, _number: int
    ) -> tuple[Mapping[str, Float64s], Float64s]:
        """See ``OuterOptimizer.step``."""
        drift = state[DRIFT] + self._share * aggregate
        return {DRIFT: drift}, parameters + aggregate + drift


def feddyn_of(plan: Plan) -> FedDynStep:
    """Return the outer optimizer of a Plan with the stage ``feddyn`` (``checks``)."""
    return FedDynStep(declared_devices(plan.stages) or 1)


def state_before(
    optimizer: object, names: tuple[str, ...], recorded: Mapping[str, T], *, is_first: bool
) -> dict[str, T]:
    """Return the recorded state with which an optimizer begins a Round.

    Args:
        optimizer: The optimizer.
        names: The tensors of its state.
        recorded: The state that the Version of the Round has.
        is_first: Whether that Version begins a lineage.
    """
    ends = is_first and isinstance(optimizer, FedDynStep)
    return {} if ends else {name: recorded[name] for name in names if name in recorded}
