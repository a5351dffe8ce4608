"""``DeviceModel``: how the devices of a simulation differ from each other."""

import math
import random
from dataclasses import dataclass

from fanin.clients.testing.availability import Availability, Battery
from fanin.clients.testing.habits import Habits
from fanin.protos.errors import InvalidInput
from fanin.simulation.devices.distributions import Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """The differences between the devices of a simulation. Each number is drawn once for each client.

    Attributes:
        examples_per_s: Examples on which a device trains in a second. None: a training takes about a second.
        bytes_down_per_s: Bandwidth of downloads. None: unlimited.
        bytes_up_per_s: Bandwidth of uploads. None: unlimited.
        availability: The pattern of presence: ``DailyWindow``, ``OnOff``, ``Traces``, or an Availability of your own.
            None: always.
        dropout: Share of trainings that a device gives up. It reports that to the coordinator.
        battery: The battery of each device. None: mains.
    """

    examples_per_s: Distribution | None = None
    bytes_down_per_s: Distribution | None = None
    bytes_up_per_s: Distribution | None = None
    availability: "Availability | Traces | None" = None
    dropout: float = 0.0
    battery: Battery | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            raise InvalidInput(f"devices: got dropout {self.dropout}, expected a share from 0 to below 1")

    def habits(self, client: int, num_examples: int, seed: int) -> Habits:
        """Return the habits of a client.

        Args:
            client: The index of the client.
            num_examples: Examples of one training, over all its epochs.
            seed: Seed of the simulation. The same seed, client and model give the same habits.
        """
        rngs = (random.Random(f"{seed}/devices/{client}/{what}") for what in ("speed", "down", "up"))
        rows = (self.examples_per_s, self.bytes_down_per_s, self.bytes_up_per_s)
        speed, down, up = (None if each is None else each.draw(rng) for each, rng in zip(rows, rngs, strict=True))
        work_s = STEADY.work_s if speed is None else (num_examples / speed,) * 2
        return Habits(
            work_s=work_s,
            quit=self.dropout,
            bytes_down_per_s=math.inf if down is None else down,
            bytes_up_per_s=math.inf if up is None else up,
            availability=self.availability.of(client) if isinstance(self.availability, Traces) else self.availability,
            battery=self.battery,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """The recorded presence of several devices. Client ``i`` has trace ``i`` modulo their number."""

    traces: tuple[Availability, ...]

    def __post_init__(self) -> None:
        if not self.traces:
            raise InvalidInput("traces: got none, expected the trace of at least one device")

    def of(self, client: int) -> Availability:
        """Return the trace of a client."""
        return self.traces[client % len(self.traces)]


STEADY = Habits(work_s=(1.0, 1.1))
"""Every client takes about a virtual second to train. The fewer virtual seconds pass, the fewer idle clients poll."""
