"""FedNova: devices that do different numbers of steps, without a bias towards those that do more.

The change of device i is -eta * sum_k a_i,k * g_i,k: a sum of its gradients with weights a_i of its optimizer.
The device sends the change divided by the norm of these weights, and the rule ``fednova`` multiplies the mean by their
mean norm:

    x+ = x + tau_eff * sum_i p_i * change_i / |a_i|_1        tau_eff = sum_i p_i * |a_i|_1

    plain SGD        a_k = 1                                 |a|_1 = tau
    momentum rho     a_k = (1 - rho^(tau-k)) / (1 - rho)     |a|_1 = (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)
    proximal mu      a_k = (1 - eta mu)^(tau-1-k)            |a|_1 = (1 - (1 - eta mu)^tau) / (eta mu)

with k from 0 to tau - 1. ``LocalSteps.norm`` computes the weights of all of these, also together and with rates that
change, from the recursion of the optimizer. If all norms are equal, this is FedAvg.

Reference:
    Wang et al. 2020, Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, arXiv
    2007.07481, section 4 and equation 7.
"""

from typing import Final

import numpy as np

from fanin.edge.codecs.stage import StageContext, State
from fanin.edge.codecs.vector import PARAMETERS, Vector
from fanin.edge.runtimes.evaluations import OF_TRAINING, metric_count
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import EXAMPLES

FEDNOVA: Final = "fednova"
"""The name of the stage, and of its rule."""
NORM: Final = f"{OF_TRAINING}fednova_norm"
"""The norm of the weights as a statistic: a sum over the examples of a device."""


class FedNova:
    """The stage ``fednova``.

    Args:
        nesterov: Whether the train graph has Nesterov's form of the momentum, which no Bundle says.
    """

    def __init__(self, nesterov: bool = False) -> None:
        self._nesterov = nesterov

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``Stage.tensors``."""
        return ()

    @property
    def statistics(self) -> tuple[str, ...]:
        """See ``CountingStage.statistics``."""
        return (NORM,)

    def apply(self, vector: Vector, state: State, context: StageContext) -> State:
        """See ``Stage.apply``."""
        if not context.num_steps:
            raise InvalidInput(
                "fednova: got a training of 0 steps, expected at least one; report num_steps", code="FN-0386"
            )
        norm = context.steps.norm(nesterov=self._nesterov)
        context.report(NORM, metric_count(norm, context.counts.get(EXAMPLES, 0)))
        normalized = (vector[PARAMETERS].astype(np.float64) / norm).astype(np.float32)
        context.send({**vector, PARAMETERS: normalized})
        return {}
