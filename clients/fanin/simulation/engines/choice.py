"""The engine of a simulation: ``graph``, ``vmap``, or with ``auto`` the faster one in a short measurement.

``graph`` trains by the exported graph in onnxruntime, so its Versions have the bits of a Run on real devices with that
runtime. ``vmap`` trains the clients of a Round together in torch; its Versions differ in the rounding of train steps.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.base import Runtime, StepSettings
from fanin.edge.runtimes.graphs import probe_batch
from fanin.protos.errors import InvalidInput, UnsupportedModel
from fanin.simulation.setup.settings import SimulationSettings

if TYPE_CHECKING:
    from fanin.edge.export.app import App
    from fanin.edge.export.vectorized.step import VectorStep

Engine = Literal["graph", "vmap"]
ENGINES: Final = ("graph", "vmap", "auto")
MEASURED_S: Final = 0.2
"""Seconds for the measurement of one engine, after a step that warms it up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The engine of a simulation.

    Attributes:
        engine: ``graph`` or ``vmap``.
        step: The vectorized train step; None for ``graph``.
        reason: Why, as a line for the user; "" if the user chose.
    """

    engine: Engine
    step: "VectorStep | None" = None
    reason: str = ""


def check_engine(settings: SimulationSettings) -> None:
    """Raise InvalidInput unless the engine is known and fits the other settings."""
    engine = settings.engine
    if engine not in ENGINES:
        raise InvalidInput(f"simulate: engine: got {engine!r}, expected one of {', '.join(ENGINES)}")
    if engine == "vmap" and settings.processes > 1:
        raise InvalidInput(
            f"simulate: processes: got {settings.processes} with the engine vmap, expected 1: vmap trains the clients "
            "together in one process; set processes=1, or engine='graph'"
        )
    if engine == "auto" and (settings.resume is not None or settings.seeds):
        raise InvalidInput(
            "simulate: engine: got 'auto' with resume or seeds, expected 'graph' or 'vmap': each measurement may "
            "choose another engine; simulate once with 'auto', and take Result.engine"
        )


def choose(settings: SimulationSettings, app: "App", bundle: Bundle, runtime: Runtime, cohort: int) -> Chosen:
    """Return the engine to use.

    Args:
        settings: The settings, with the engine that the user asks for.
        app: The App.
        bundle: Its Bundle.
        runtime: Runs the graphs.
        cohort: Number of clients of a Round.

    Raises:
        UnsupportedModel: The engine is ``vmap``, and the App's train step cannot be vectorized.
    """
    engine = settings.engine
    if engine == "graph":
        return Chosen(engine="graph")
    from fanin.edge.export.vectorized.step import VectorStep

    try:
        step = VectorStep(app)
    except UnsupportedModel as exc:
        if engine == "vmap":
            raise
        return Chosen(engine="graph", reason=f"engine graph, because vmap is not possible: {exc}")
    if engine == "vmap":
        return Chosen(engine="vmap", step=step)
    together = min(cohort, step.max_clients)
    vmap_s = _vmap_seconds(step, bundle, together)
    graph_s = _graph_seconds(bundle, runtime) / settings.processes
    reason = f"a client's train step takes {graph_s * 1e3:.2f} ms by graph, {vmap_s * 1e3:.2f} ms by vmap"
    if vmap_s < graph_s:
        return Chosen(engine="vmap", step=step, reason=f"engine vmap: {reason}; engine='vmap' repeats this choice")
    return Chosen(engine="graph", reason=f"engine graph: {reason}; engine='graph' repeats this choice")


def _vmap_seconds(step: "VectorStep", bundle: Bundle, num_clients: int) -> float:
    """Return the seconds of one train step of one client, among ``num_clients``."""
    from fanin.edge.export.vectorized.step import VectorSettings

    parameters = bundle.initial_parameters()
    state = step.begin(parameters, num_clients)
    settings = VectorSettings(
        learning_rates=[0.0] * num_clients,
        proximal_weight=0.0,
        anchor=parameters,
        controls=[None] * num_clients,
        random_keys=[0] * num_clients,
    )
    batches = [probe_batch(bundle.manifest)] * num_clients
    return _seconds(lambda: step(state, batches, settings)) / num_clients


def _graph_seconds(bundle: Bundle, runtime: Runtime) -> float:
    parameters, batch = bundle.initial_parameters(), probe_batch(bundle.manifest)
    step = runtime.open_train(bundle)
    state, settings = step.begin(parameters), StepSettings(learning_rate=0.0)
    return _seconds(lambda: step(state, batch, settings))


def _seconds(call: Callable[[], object]) -> float:
    """Return the shortest time of a call."""
    call()
    best, ends_s = float("inf"), time.perf_counter() + MEASURED_S
    while time.perf_counter() < ends_s:
        began_s = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began_s)
    return best
