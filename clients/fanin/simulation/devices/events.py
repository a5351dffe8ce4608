"""The event log of a simulation: the actions of each participant, with their virtual times.

The same arguments and seed give the same log, line by line. To replay a failed simulation, run it again with its seed.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationEvent:
    """One event.

    Attributes:
        seed: The seed of the simulation.
        time_s: Virtual time.
        client: The index of the client; None for the coordinator.
        event: What happened: one of ``DEVICE_EVENTS`` or ``COORDINATOR_EVENTS`` (docs/howto/devices.md lists them).
        round: The Round; 0 for none.
        detail: More about it, such as the text of an error.
    """

    seed: int
    time_s: float
    client: int | None
    event: str
    round: int
    detail: str = ""

    @property
    def line(self) -> str:
        """The event as one line of JSON."""
        return json.dumps(asdict(self))


OnEvent = Callable[[SimulationEvent], None]
