"""``DeviceModel``: how the devices of a simulation differ from each other."""

import math
import random
from dataclasses import dataclass
from typing import Final

from fanin.clients.testing.availability import Availability, Battery
from fanin.clients.testing.habits import Habits
from fanin.protos.errors import InvalidInput
from fanin.simulation.devices.distributions import Distribution, Fixed

NUMBERS: Final = ("examples_per_s", "bytes_down_per_s", "bytes_up_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """The differences between the devices of a simulation. Each number is drawn once for each client.

    The first three are a distribution, or a number that is the same for all devices.

    Attributes:
        examples_per_s: Examples on which a device trains in a second. None: a training takes about a second.
        bytes_down_per_s: Bandwidth of downloads. None: unlimited.
        bytes_up_per_s: Bandwidth of uploads. None: unlimited.
        availability: The pattern of presence: ``DailyWindow``, ``OnOff``, ``Traces``, or an Availability of your own.
            None: always.
        dropout: Share of trainings that a device gives up. It reports that to the coordinator.
        battery: The battery of each device. None: mains.
    """

    examples_per_s: Distribution | float | None = None
    bytes_down_per_s: Distribution | float | None = None
    bytes_up_per_s: Distribution | float | None = None
    availability: "Availability | Traces | None" = None
    dropout: float = 0.0
    battery: Battery | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            raise InvalidInput(f"devices: got dropout {self.dropout}, expected a share from 0 to below 1")
        for name in NUMBERS:
            _distribution(name, getattr(self, name))
        has_stays = callable(getattr(self.availability, "stays", None))
        if not (has_stays or isinstance(self.availability, Traces | None)):
            raise InvalidInput(
                f"devices: availability: got {self.availability!r}, expected DailyWindow, OnOff, Traces, or an object "
                "with the method stays; read_traces(path) returns the Traces of a file"
            )
        if not isinstance(self.battery, Battery | None):
            raise InvalidInput(f"devices: battery: got {self.battery!r}, expected Battery(work_s=..., charge_s=...)")

    def habits(self, client: int, num_examples: int, seed: int) -> Habits:
        """Return the habits of a client.

        Args:
            client: The index of the client.
            num_examples: Examples of one epoch of a training.
            seed: Seed of the simulation. The same seed, client and model give the same habits.
        """
        rngs = (random.Random(f"{seed}/devices/{client}/{what}") for what in ("speed", "down", "up"))
        rows = [_distribution(name, getattr(self, name)) for name in NUMBERS]
        speed, down, up = (None if each is None else each.draw(rng) for each, rng in zip(rows, rngs, strict=True))
        return Habits(
            work_s=STEADY.work_s if speed is None else (0.0, 0.0),
            epoch_s=0.0 if speed is None else num_examples / speed,
            quit=self.dropout,
            bytes_down_per_s=math.inf if down is None else down,
            bytes_up_per_s=math.inf if up is None else up,
            availability=self.availability.of(client) if isinstance(self.availability, Traces) else self.availability,
            battery=self.battery,
        )


def _distribution(name: str, value: Distribution | float | None) -> Distribution | None:
    """Return the distribution of a number of the model. Raises InvalidInput."""
    match value:
        case None:
            return None
        case bool() | str():
            pass
        case int() | float():
            return Fixed(value=value)
        case _ if callable(getattr(value, "draw", None)):
            return value
    raise InvalidInput(
        f"devices: {name}: got {value!r}, expected a number above 0, or a distribution such as "
        "Lognormal(median=50.0, sigma=1.0)"
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
