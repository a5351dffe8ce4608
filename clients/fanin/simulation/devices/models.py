"""``DeviceModel``: how the devices of a simulation differ from each other."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fanin.protos.errors import InvalidInput
from fanin.protos.numbers import is_number
from fanin.protos.texts import counted
from fanin.simulation.devices.attackers import Attackers
from fanin.simulation.devices.availability import Availability, Battery
from fanin.simulation.devices.distributions import Distribution, Fixed
from fanin.simulation.devices.habits import Habits
from fanin.simulation.devices.traces import RATES, DeviceTrace, Traces

NUMBERS: Final = RATES
MAX_NAMES: Final = 5
"""Names of devices in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """The differences between the devices of a simulation. Each number is drawn once for each client.

    The first three are a distribution, or a number that is the same for all devices.

    Attributes:
        examples_per_s: Examples on which a device trains in a second. None: a training takes about a second.
        bytes_down_per_s: Bandwidth of downloads. None: unlimited.
        bytes_up_per_s: Bandwidth of uploads. None: unlimited.
        availability: The pattern of presence: ``DailyWindow``, ``OnOff``, or an Availability of your own. None: always.
        dropout: Share of trainings that a device gives up. It reports that to the coordinator.
        battery: The battery of each device. None: mains.
        traces: Recorded devices, instead of the attributes that the traces have. Each attribute is in one of them, and
            all of them have the same devices.
        attackers: The clients that attack, and their attack. None: all are honest.
    """

    examples_per_s: Distribution | float | None = None
    bytes_down_per_s: Distribution | float | None = None
    bytes_up_per_s: Distribution | float | None = None
    availability: Availability | None = None
    dropout: float = 0.0
    battery: Battery | None = None
    traces: Traces | Sequence[Traces] = ()
    attackers: Attackers | None = None

    def __post_init__(self) -> None:
        if not (is_number(self.dropout) and 0.0 <= self.dropout < 1.0):
            raise InvalidInput(
                f"devices: got dropout {self.dropout!r}, expected a share from 0 to below 1", code="FN-1152"
            )
        for name in NUMBERS:
            _distribution(name, getattr(self, name))
        if self.availability is not None and not callable(getattr(self.availability, "stays", None)):
            raise InvalidInput(
                f"devices: availability: got {self.availability!r}, expected DailyWindow, OnOff, or an object with the "
                "method stays; the attribute of recorded devices is traces",
                code="FN-1153",
            )
        if not isinstance(self.battery, Battery | None):
            raise InvalidInput(
                f"devices: battery: got {self.battery!r}, expected Battery(work_s=..., charge_s=...)", code="FN-1153"
            )
        if not isinstance(self.attackers, Attackers | None):
            raise InvalidInput(
                f"devices: attackers: got {self.attackers!r}, expected Attackers(clients=..., attack=...)",
                code="FN-1850",
            )
        self._check_traces()

    def _check_traces(self) -> None:
        several: object = self.traces
        if not isinstance(several, Traces | list | tuple) or not all(isinstance(each, Traces) for each in self.sources):
            raise InvalidInput(
                f"devices: traces: got {several!r}, expected the result of read_traces(path), or several",
                code="FN-1156",
            )
        recorded = [name for each in self.sources for name in each.keys]
        for name in recorded:
            if recorded.count(name) > 1 or getattr(self, name) is not None:
                raise InvalidInput(
                    f"devices: {name}: got it twice, expected it once: in one of the traces, or as an attribute of the "
                    "model; remove the other one",
                    code="FN-1158",
                )
        for other in self.sources[1:]:
            _check_same_devices(self.sources[0], other)

    @property
    def sources(self) -> tuple[Traces, ...]:
        """The traces, also of a model with a single one."""
        return (self.traces,) if isinstance(self.traces, Traces) else tuple(self.traces)

    def has(self, name: str) -> bool:
        """Return whether the model or a trace has an attribute."""
        return getattr(self, name) is not None or any(name in each.keys for each in self.sources)

    def habits(self, client: int, num_examples: int, seed: int) -> Habits:
        """Return the habits of a client.

        Args:
            client: The index of the client.
            num_examples: Examples of one epoch of a training.
            seed: Seed of the simulation. The same seed, client and model give the same habits.
        """
        device = self._device(client, seed)
        attackers = self.attackers if self.attackers is not None and client in self.attackers.clients else None
        return Habits(
            work_s=STEADY.work_s if device.examples_per_s is None else (0.0, 0.0),
            epoch_examples=num_examples,
            examples_per_s=device.examples_per_s or math.inf,
            quit=self.dropout,
            bytes_down_per_s=device.bytes_down_per_s or math.inf,
            bytes_up_per_s=device.bytes_up_per_s or math.inf,
            availability=device.availability,
            battery=device.battery,
            attack=None if attackers is None else attackers.attack,
            claim=0 if attackers is None else attackers.claim,
        )

    def _device(self, client: int, seed: int) -> DeviceTrace:
        """Return the device of a client: recorded in the traces, or drawn."""
        rngs = (random.Random(f"{seed}/devices/{client}/{what}") for what in ("speed", "down", "up"))
        rows = [_distribution(name, getattr(self, name)) for name in NUMBERS]
        speed, down, up = (None if each is None else each.draw(rng) for each, rng in zip(rows, rngs, strict=True))
        device = DeviceTrace(
            availability=self.availability,
            examples_per_s=speed,
            bytes_down_per_s=down,
            bytes_up_per_s=up,
            battery=self.battery,
        )
        if self.sources:
            num = len(self.sources[0].devices)
            # One draw for all files: a client is one recorded device, and no mixture of several.
            index = client if client < num else random.Random(f"{seed}/devices/{client}/trace").randrange(num)
            for traces in self.sources:
                device = traces.devices[index].over(device)
        return device


def _check_same_devices(first: Traces, other: Traces) -> None:
    """Raise InvalidInput unless two traces have the same devices in the same order."""
    have_names = bool(first.names and other.names)
    if have_names and (partial := sorted(set(first.names) ^ set(other.names))):
        more = f" and {len(partial) - MAX_NAMES} more" if len(partial) > MAX_NAMES else ""
        raise InvalidInput(
            f"devices: traces: got {counted(len(partial), 'device')} that some of the traces do not have: "
            f"{', '.join(partial[:MAX_NAMES])}{more}; expected the same names in the column client of each file",
            code="FN-1158",
        )
    if len(first.devices) != len(other.devices) or (have_names and first.names != other.names):
        raise InvalidInput(
            f"devices: traces: got {len(first.devices)} and {counted(len(other.devices), 'device')}, expected the same "
            "devices in the same order",
            code="FN-1158",
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
        "Lognormal(median=50.0, sigma=1.0)",
        code="FN-1153",
    )


STEADY = Habits(work_s=(1.0, 1.1))
"""Every client takes about a virtual second to train. The fewer virtual seconds pass, the fewer idle clients poll."""
