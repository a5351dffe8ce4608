"""The work of simulated clients: epochs or steps of each client's own, and stragglers.

In each Round, a share of all clients are stragglers. A straggler does a random number of epochs, from 1 to all, and
sends its partial work. With ``drop`` it gives up instead, so that the Round selects another client. Who is a straggler,
and how much it does, follows from the seed of the Run, the Round and the client alone.

Reference:
    Li et al. 2020, Federated Optimization in Heterogeneous Networks (FedProx), arXiv 1812.06127, section 5.2: for 0, 50
    and 90 % of the devices, x epochs, x uniform in [1, E]; FedAvg drops these devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

import numpy as np

from fanin.clients.device.training.work import PlannedWork, TooLittleWork, WorkPolicy, all_steps
from fanin.edge.tensors import Int64s
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import Assignment
from fanin.protos.numbers import is_number
from fanin.protos.plans.keys import shown

STREAM: Final = 0x776F726B
"""Separates the draws of the work from the order of the training."""
OfClients = Sequence[float] | Callable[[int, int], float]
"""A number for each client, or a function ``(client, round_number) -> number``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientWork:
    """The work of the clients of a simulation.

    Attributes:
        epochs: Most epochs of each client in a Round, above 0; None: those of the Plan.
        steps: Most steps of each client in a Round, at least 1; None: those of the epochs.
        stragglers: Share of all clients that do a random number of epochs, from 1 to those that they would do.
        drop: Whether stragglers give up, instead of sending their partial work. The Round replaces them by other
            clients. To aggregate fewer Updates, as FedAvg does in the paper, set ``cohort.buffer`` of the Plan to the
            number of clients that are left.

    Raises:
        InvalidInput: A value is out of its range.
    """

    epochs: OfClients | None = None
    steps: OfClients | None = None
    stragglers: float = 0.0
    drop: bool = False

    def __post_init__(self) -> None:
        if not is_number(self.stragglers) or not 0.0 <= self.stragglers <= 1.0:
            raise InvalidInput(
                f"work: stragglers: got {self.stragglers!r}, expected a share from 0.0 to 1.0", code="FN-1811"
            )
        if self.drop and self.stragglers == 1.0:
            raise InvalidInput(
                "work: drop: got it with stragglers 1.0, expected a share below 1.0: no client would be left",
                code="FN-1811",
            )
        for name, values in (("epochs", self.epochs), ("steps", self.steps)):
            if values is None or callable(values):
                continue
            given: object = values
            if isinstance(given, str) or not isinstance(given, Sequence | np.ndarray):
                raise InvalidInput(
                    f"work: {name}: got {shown(values)}, expected a number for each client, or a function (client, "
                    f"round) of one; for one number for all clients, write lambda client, round_number: {values!r}",
                    code="FN-1811",
                )
            for client, value in enumerate(values):
                _checked(name, client, value)

    def bound(self, num_clients: int) -> "BoundWork":
        """Return the work of this many clients. Raises InvalidInput for a list of another length."""
        for name, values in (("epochs", self.epochs), ("steps", self.steps)):
            if values is not None and not callable(values) and len(values) != num_clients:
                raise InvalidInput(
                    f"work: {name}: got {len(values)} numbers, expected one for each of the {num_clients} clients",
                    code="FN-1811",
                )
        return BoundWork(work=self, num_clients=num_clients)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundWork:
    """The work of a number of clients."""

    work: ClientWork
    num_clients: int

    def of(self, client: int) -> WorkPolicy:
        """Return the policy of a client."""
        return all_steps if self.work == ClientWork() else partial(self._steps, client)

    def _steps(self, client: int, assignment: Assignment, planned: PlannedWork) -> int:
        work, number, seed = self.work, assignment.round, assignment.training.seed
        epochs = float(planned.num_epochs)
        if work.epochs is not None:
            epochs = min(epochs, _number("epochs", work.epochs, client, number))
        steps = planned.steps_of(epochs)
        if work.steps is not None:
            steps = min(steps, int(_number("steps", work.steps, client, number)))
        if work.stragglers and _order(seed, number, self.num_clients)[client] < self._num_stragglers:
            if work.drop:
                raise TooLittleWork(
                    f"training: client {client} is a straggler of round {number}, and the simulation drops those; "
                    "remove work.drop to count their partial work",
                    code="FN-1810",
                )
            draw = np.random.default_rng(np.random.SeedSequence((STREAM, seed, number, client)))
            steps = min(steps, planned.steps_of(float(draw.integers(1, max(int(epochs), 1), endpoint=True))))
        return steps

    @property
    def _num_stragglers(self) -> int:
        return int(self.work.stragglers * self.num_clients + 0.5)


ALL_WORK: Final = BoundWork(work=ClientWork(), num_clients=0)
"""All steps of each client."""


@lru_cache(maxsize=4)
def _order(seed: int, number: int, num_clients: int) -> Int64s:
    """Return the rank of each client in a Round (num_clients,). The first ones are the stragglers."""
    return np.random.default_rng(np.random.SeedSequence((STREAM, seed, number))).permutation(num_clients)


def _number(name: str, values: OfClients, client: int, number: int) -> float:
    value = values(client, number) if callable(values) else values[client]
    return _checked(name, client, value)


def _checked(name: str, client: int, value: object) -> float:
    least = "a whole number of at least 1" if name == "steps" else "a number above 0"
    # A number of numpy is a number, too.
    number = value.item() if isinstance(value, np.number) else value
    if not is_number(number) or not number > 0.0 or (name == "steps" and number % 1.0):
        raise InvalidInput(f"work: {name}: got {value!r} for client {client}, expected {least}", code="FN-1811")
    return float(number)
