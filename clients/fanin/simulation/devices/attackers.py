"""``Attackers``: the clients of a simulation that attack, and their examples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fanin.clients.data.examples import Examples
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import MAX_COUNT
from fanin.protos.numbers import is_number
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.devices.attacks import Attack, check_labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Attackers:
    """The clients of a simulation that attack.

    Attributes:
        clients: Their indices.
        attack: The attack of all of them.
        claim: The number of examples that each of them reports; 0: its own.
    """

    clients: Sequence[int]
    attack: Attack
    claim: int = 0

    def __post_init__(self) -> None:
        several: object = self.clients
        if (
            not isinstance(several, Sequence)
            or isinstance(several, str)
            or not all(isinstance(each, int | np.integer) and each >= 0 for each in several)
            or not len(several)
            or len(set(several)) < len(several)
        ):
            raise InvalidInput(
                f"attackers: clients: got {several!r}, expected different indices of clients, such as range(5)",
                code="FN-1850",
            )
        if not isinstance(self.attack, Attack):
            raise InvalidInput(
                f"attackers: attack: got {self.attack!r}, expected an attack such as SignFlip(), or an object of a "
                "subclass of Attack",
                code="FN-1850",
            )
        if not (is_number(self.claim) and self.claim == int(self.claim) and 0 <= self.claim <= MAX_COUNT):
            raise InvalidInput(
                f"attackers: claim: got {self.claim!r}, expected examples from 0 to {MAX_COUNT}", code="FN-1850"
            )

    def check(self, num_clients: int) -> None:
        """Raise InvalidInput unless all attackers are clients."""
        if max(self.clients) >= num_clients:
            raise InvalidInput(
                f"attackers: clients: got {max(self.clients)}, expected indices below the number of clients, "
                f"{num_clients}",
                code="FN-1850",
            )

    def poison(self, clients: Partition) -> Partition:
        """Return the examples of the clients, with those of the attackers as the attack changes them.

        Raises:
            InvalidInput: An attacker is no client, or the attack does not fit the examples.
        """
        self.check(len(clients))
        if not self.attack.poisons:
            return clients
        data = clients.examples
        check_labels("attackers", data)
        num_classes = int(data.y.max()) + 1
        inputs, y = {name: array.copy() for name, array in data.inputs.items()}, data.y.copy()
        for client in self.clients:
            rows, poisoned = clients.indices[client], self.attack.examples(clients[client], num_classes)
            for name, array in poisoned.inputs.items():
                inputs[name][rows] = array
            y[rows] = poisoned.y
        return Partition(examples=Examples(inputs=inputs, y=y), indices=clients.indices)


def check_flower_attackers(attackers: Attackers | None, num_clients: int) -> None:
    """Raise InvalidInput unless the clients of a Flower app can attack like this: such an app loads its own data."""
    if attackers is None:
        return
    attackers.check(num_clients)
    if attackers.attack.poisons:
        raise InvalidInput(
            f"attackers: attack: got {attackers.attack!r} with a Flower app, which loads its own data, expected an "
            "attack on the change; change the data in the app instead",
            code="FN-1850",
        )
