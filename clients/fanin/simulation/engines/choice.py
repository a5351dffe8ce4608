"""The engine of a simulation: ``graph``, ``vmap``, or with ``auto`` the faster one for its Plan and its clients.

``auto`` measures a step of both on the App's own graphs, and computes the time of all Rounds. The initial trace of
``vmap`` takes seconds, so a simulation that trains for a shorter time is not measured any further.

``graph`` trains by the exported graph in onnxruntime, so its Versions are bit-identical with those of a Run on real
devices with that runtime. ``vmap`` trains the clients of a Round together in torch, and ``vmap:cuda`` on a GPU. Their
Versions differ in the rounding of train steps.
"""

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.base import Runtime, StepSettings
from fanin.edge.runtimes.graphs import probe_batch
from fanin.protos.errors import InvalidInput, UnsupportedModel
from fanin.protos.plans import Plan
from fanin.simulation.settings import SimulationSettings

if TYPE_CHECKING:
    from fanin.edge.export.app.app import App
    from fanin.edge.export.vectorized.step import VectorStep

ENGINES: Final = re.compile(r"graph|auto|vmap(:cuda(:\d{1,3})?)?")
EXPECTED: Final = "graph, vmap, vmap:cuda (or vmap:cuda:N, the GPU N), or auto"
MEASURED_S: Final = 0.2
"""Seconds for the measurement of one engine, after a step that warms it up."""
REPEAT_GRAPH: Final = "engine='graph' repeats this choice"
LEAST_TRACE_S: Final = 0.5
"""Seconds that the trace of a linear layer takes. Trainings that take less are not worth a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The engine of a simulation.

    Attributes:
        engine: ``graph`` or ``vmap``, with a GPU ``vmap:cuda``.
        step: The vectorized train step; None for ``graph``.
        reason: Why, as a line for the user; "" if the user chose.
    """

    engine: str
    step: "VectorStep | None" = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The train steps of a simulation.

    Attributes:
        num_epochs: Epochs of a client that trains in each Round.
        together: Clients that begin on one Version: the cohort, or with buffered Rounds the buffer.
        batches: Batches of an epoch of each client.
        has_one_size: Whether all Rounds have one batch size.
        has_copies: Whether each client also trains a copy of its own (Ditto).
    """

    num_epochs: int
    together: int
    batches: tuple[int, ...]
    has_one_size: bool = True
    has_copies: bool = False

    @classmethod
    def of(cls, plan: Plan, sizes: Sequence[int], batch_size: int) -> "Workload":
        """Return the workload of a Plan.

        Args:
            plan: The Plan.
            sizes: Number of training examples of each client.
            batch_size: Examples of a batch.
        """
        cohort = plan.cohort
        end = plan.stop.max_rounds + 1
        # A Plan may have billions of Rounds, and the epochs change with its schedule alone.
        starts = [1, *(change.from_round for change in plan.schedule if change.from_round < end), end]
        return cls(
            num_epochs=sum(
                (until - since) * (plan.training_in(since).epochs + plan.training.personal_epochs)
                for since, until in pairwise(starts)
            ),
            together=min(cohort.buffer if plan.aggregation.max_staleness else cohort.concurrency, len(sizes)),
            batches=tuple(-(-size // batch_size) for size in sizes),
            has_one_size=len({plan.training_in(since).batch_size or batch_size for since in starts[:-1]}) == 1,
            has_copies=plan.training.ditto_weight > 0.0,
        )

    def graph_seconds(self, step_s: float) -> float:
        """Return the seconds of all Rounds if a client's step takes ``step_s``."""
        return self.num_epochs * self.together * float(np.mean(self.batches)) * step_s

    def vmap_seconds(self, times: Mapping[int, float], max_clients: int) -> float:
        """Return the seconds of all Rounds by vectorized steps.

        A client with few batches leaves its group early. So a step has a constant cost, and a cost for each client.

        Args:
            times: Seconds of a step of 1 client, and of a full group, by the number of clients.
            max_clients: Clients of a group.
        """
        full = max(times)
        of_client = max(times[full] - times[1], 0.0) / max(full - 1, 1)
        ranked = np.sort(self.batches)
        # The expected number of clients in a Round with a batch 0, 1, ... A rare large client continues alone.
        num_active = self.together * (1 - np.searchsorted(ranked, np.arange(ranked[-1]), side="right") / len(ranked))
        num_steps = np.where(num_active < 1, num_active, np.ceil(num_active / max_clients)).sum()
        return self.num_epochs * float(num_steps * (times[1] - of_client) + num_active.sum() * of_client)


def check_engine_name(engine: object) -> None:
    """Raise InvalidInput unless the engine is known."""
    if not (isinstance(engine, str) and ENGINES.fullmatch(engine)):
        raise InvalidInput(f"simulate: engine: got {engine!r}, expected one of {EXPECTED}", code="FN-1102")


def is_vmap(engine: str) -> bool:
    """Return whether an engine is ``vmap``, on the processor or a GPU."""
    return engine.startswith("vmap")


def check_engine(settings: SimulationSettings) -> None:
    """Raise InvalidInput unless the engine is known and fits the other settings."""
    engine = settings.engine
    check_engine_name(engine)
    if is_vmap(engine) and settings.processes > 1:
        raise InvalidInput(
            f"simulate: processes: got {settings.processes} with the engine {engine}, expected 1: vmap trains the "
            "clients together in one process; set processes=1, or engine='graph'",
            code="FN-1101",
        )
    if engine == "auto" and (settings.resume is not None or settings.seeds):
        raise InvalidInput(
            "simulate: engine: got 'auto' with resume or seeds, expected 'graph' or 'vmap': each measurement may "
            "choose another engine; simulate once with 'auto', then pass its Result.engine",
            code="FN-1101",
        )


def choose(settings: SimulationSettings, app: "App", bundle: Bundle, runtime: Runtime, workload: Workload) -> Chosen:
    """Return the engine to use: with ``auto`` the faster one for all Rounds, without the time of the initial trace.

    Args:
        settings: The settings, with the engine that the user asks for.
        app: The App.
        bundle: Its Bundle, for training with the batch size of the Plan.
        runtime: Runs the graphs.
        workload: The train steps of the simulation.

    Raises:
        InvalidInput: torch does not find the GPU.
        UnsupportedModel: The engine is ``vmap``, and the App's train step cannot be vectorized.
    """
    engine = settings.engine
    if engine == "graph":
        return Chosen(engine="graph")
    graph_s = 0.0
    if engine == "auto":
        graph_s = workload.graph_seconds(_graph_seconds(bundle, runtime) / settings.processes)
        if graph_s < LEAST_TRACE_S:
            reason = f"graph trains all rounds in {graph_s:.2g} s, and vmap begins with a trace of the module"
            return Chosen(engine="graph", reason=f"engine graph: {reason}; {REPEAT_GRAPH}")
    device = device_of(engine)
    began_s = time.perf_counter()
    try:
        step = vector_step(app, bundle, workload, device)
    except UnsupportedModel as exc:
        if is_vmap(engine):
            # The App has an export, so this engine can train it.
            raise UnsupportedModel(f"{exc}; use engine='graph'", code=exc.code) from exc
        cost = f"all rounds train in about {graph_s:.2g} s by graph"
        return Chosen(engine="graph", reason=f"engine graph, because vmap is not possible: {exc}; {cost}")
    if is_vmap(engine):
        return Chosen(engine=engine, step=step)
    trace_s = time.perf_counter() - began_s
    together = min(workload.together, step.max_clients)
    times = {num: num * _vmap_seconds(step, bundle, num) for num in {1, together}}
    vmap_s = workload.vmap_seconds(times, step.max_clients)
    vmap = vmap_on(device)
    both = f"{graph_s:.2g} s by graph and {vmap_s:.2g} s by {vmap}"
    reason = f"all rounds train in about {both}, whose trace took {trace_s:.2g} s"
    if vmap_s >= graph_s:
        return Chosen(engine="graph", reason=f"engine graph: {reason}; {REPEAT_GRAPH}")
    # The trace is done. It would be done again.
    again = "" if vmap_s + trace_s < graph_s else ", and engine='graph' is faster next time"
    return Chosen(engine=vmap, step=step, reason=f"engine {vmap}: {reason}; engine='{vmap}' repeats this choice{again}")


def vmap_on(device: str) -> str:
    """Return the name of the engine ``vmap`` on a device."""
    return "vmap" if device == "cpu" else f"vmap:{device}"


def device_of(engine: str) -> str:
    """Return the device of an engine. For ``auto``, it is the GPU if torch finds one. Raises InvalidInput."""
    from fanin.edge.export.vectorized.gpu import gpus

    num_gpus, torch = gpus()
    if engine == "auto":
        return "cuda" if num_gpus else "cpu"
    device = engine.partition(":")[2] or "cpu"
    if device != "cpu" and int(device.partition(":")[2] or 0) >= num_gpus:
        raise InvalidInput(
            f"simulate: engine: got {engine!r}, but {torch} finds {num_gpus} CUDA GPUs here; use engine='vmap' for the "
            "processor, or install a torch for this GPU",
            code="FN-1110",
        )
    return device


def vector_step(app: "App", bundle: Bundle, workload: Workload, device: str) -> "VectorStep":
    """Return the vectorized train step of an App, for the batch size of a Bundle. Raises UnsupportedModel."""
    from fanin.edge.export.vectorized.step import VectorStep

    if not workload.has_one_size:
        raise UnsupportedModel(
            "simulate: got a Plan whose schedule changes training.batch_size, expected one size for the engine vmap; "
            "remove the change, or use engine='graph'",
            code="FN-1111",
        )
    if workload.has_copies:
        raise UnsupportedModel(
            "simulate: got training.ditto_weight above 0, expected none for the engine vmap: clients that train "
            "together start from one Version, and each has a copy of its own; use engine='graph'",
            code="FN-1834",
        )
    return VectorStep(app.for_batches(bundle.manifest.batch_size), device)


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
    return seconds_of(lambda: step(state, batches, settings)) / num_clients


def _graph_seconds(bundle: Bundle, runtime: Runtime) -> float:
    parameters, batch = bundle.completed(bundle.initial_parameters()), probe_batch(bundle.manifest)
    step = runtime.open_train(bundle)
    state, settings = step.begin(parameters), StepSettings(learning_rate=0.0)
    return seconds_of(lambda: step(state, batch, settings))


def seconds_of(call: Callable[[], object]) -> float:
    """Return the median time of a call in seconds. On a busy machine the shortest time is not typical of a training."""
    call()
    times, ends_s = [], time.perf_counter() + MEASURED_S
    while time.perf_counter() < ends_s:
        began_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)
