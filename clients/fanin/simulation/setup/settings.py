"""The options of a simulation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fanin.clients.data.examples import Examples
from fanin.protos.plans import Plan
from fanin.simulation.devices.events import OnEvent
from fanin.simulation.devices.models import DeviceModel
from fanin.simulation.rows import RoundRow


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """The options of a simulation.

    Attributes:
        test: Examples on which each Version is evaluated, in float and in int8. The Plan's ``evaluation.every`` and
            ``evaluation.metrics`` apply.
        plan: Further keys of the Plan with their values, by dotted name (docs/plan.md); or a Plan.
        seed: Seed of all random choices, 0 or more.
        validation_fraction: Share of each client's examples that it holds out for its own evaluation.
        engine: ``graph`` trains by the exported graph in onnxruntime, with the bits of a Run on real devices. ``vmap``
            trains the clients of a Round together in torch, which is faster for small models; rounding differs.
            ``auto`` measures both and takes the faster one.
        processes: Processes that train clients side by side; 1 trains them in this process. The Versions are the same.
        stop_on_failure: Whether an error in the training of a client ends the simulation.
        devices: How fast the devices are, how they are connected, and when they are there.
        on_round: Called with each row as soon as its Round has ended.
        on_event: Called with each event of the event log, in the order of the virtual clock.
        quiet: Whether the simulation prints no progress on standard error.
    """

    test: Examples | None = None
    plan: Mapping[str, object] | Plan = field(default_factory=dict)
    seed: int = 0
    validation_fraction: float = 0.1
    engine: str = "graph"
    processes: int = 1
    stop_on_failure: bool = False
    devices: DeviceModel = field(default_factory=DeviceModel)
    on_round: Callable[[RoundRow], None] = lambda row: None
    on_event: OnEvent = lambda event: None
    quiet: bool = False
