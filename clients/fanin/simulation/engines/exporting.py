"""The Bundle of a simulated App: exported, or without graphs if no graph format can express the module.

The engines ``vmap`` and ``auto`` then train and validate in torch alone. The engine ``graph`` needs the export.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.manifest import NO_GRAPHS
from fanin.edge.metrics.metric import INT8
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import Runtime
from fanin.protos.errors import InvalidPlan, UnsupportedModel
from fanin.protos.plans import EXPORT, Plan
from fanin.simulation.engines.choice import Chosen, Workload, device_of, vector_step, vmap_on
from fanin.simulation.workers import FORMAT

if TYPE_CHECKING:
    from fanin.edge.export.app.app import App

COST: Final = "the simulation trains and validates in torch; it has no Bundle for devices and no int8 values"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppBundle:
    """The Bundle of an App.

    Attributes:
        bundle: The Bundle.
        runtime: Runs its Signatures.
        refusal: Why the App has no export; "" if it has one.
        note: The cost of int8 on the App's validation data; "" if it is not measured.
    """

    bundle: Bundle
    runtime: Runtime
    refusal: str = ""
    note: str = ""


def app_bundle(app: "App", folder: Path, key: SigningKey, engine: str, recorded: Bundle | None) -> AppBundle:
    """Export an App, or return its Bundle without graphs.

    A simulation may start from a module that is not trained. So the cost of int8 is a note, and has no limit.

    Args:
        app: The App.
        folder: A new folder for the Bundle.
        key: Signs the Bundle.
        engine: The engine of the settings.
        recorded: The Bundle of a record, which takes the place of another export; None for none.

    Raises:
        UnsupportedModel: The App cannot be exported, and the engine is ``graph`` or torch cannot trace the App either.
    """
    from fanin.edge.export.build import export

    if recorded is not None and recorded.manifest.graph_formats == (NO_GRAPHS,):
        from fanin.edge.export.vectorized.runtime import TorchRuntime

        return AppBundle(bundle=recorded, runtime=TorchRuntime(app), refusal="its record has no export")
    if recorded is not None:
        return AppBundle(bundle=recorded, runtime=open_runtime(FORMAT))
    try:
        exported = export(app, folder, key, formats=(FORMAT,), max_drop=math.inf)
    except UnsupportedModel as exc:
        if engine == "graph":
            raise UnsupportedModel(f"{exc}{_vmap_advice(app)}", code=exc.code) from exc
        from fanin.edge.export.vectorized.runtime import TorchRuntime

        try:
            runtime = TorchRuntime(app)
        except UnsupportedModel as second:
            raise UnsupportedModel(_neither(str(exc), second), code="FN-1112") from exc
        return AppBundle(bundle=runtime.write(folder, key), runtime=runtime, refusal=str(exc))
    note = "".join(
        f"the initial model on the App's validation data: {quality}; fanin export has a limit on the cost of int8, "
        "a simulation has none"
        for quality in exported.measured.values()
    )
    return AppBundle(bundle=exported.bundle, runtime=open_runtime(FORMAT), note=note)


def _vmap_advice(app: "App") -> str:
    """Return the advice to simulate an App without an export; "" if that fails, too."""
    from fanin.edge.export.vectorized.runtime import TorchRuntime
    from fanin.edge.export.vectorized.step import VectorStep

    try:
        TorchRuntime(app)
        VectorStep(app)
    except UnsupportedModel:
        return ""
    return "; or engine='vmap' simulates it without an export (docs/howto/engines.md)"


def check_no_int8(plan: Plan) -> None:
    """Raise InvalidPlan if a Plan declares a value of the int8 model."""
    names = [each.name for each in plan.statistics if each.name.endswith(INT8)]
    names += [plan.evaluation.best] if plan.evaluation.best.endswith(INT8) else []
    names += ["stop.max_int8_drop"] if plan.stop.max_int8_drop > 0.0 else []
    names += ["int8.ranges"] if plan.int8.ranges != EXPORT else []
    if names:
        raise InvalidPlan(
            f"simulate: plan: got {', '.join(names)}, but without an export there is no int8 model; remove them, or "
            "use engine='graph'",
            code="FN-1111",
        )


def choose_vmap(refusal: str, app: "App", bundle: Bundle, workload: Workload, engine: str) -> Chosen:
    """Return the engine of an App without an export.

    Args:
        refusal: Why the App has no export.
        app: The App.
        bundle: Its Bundle without graphs, for training with the batch size of the Plan.
        workload: The train steps of the simulation.
        engine: The engine of the settings, for its device.

    Raises:
        InvalidInput: torch does not find the GPU.
        UnsupportedModel: The App's train step cannot be vectorized.
    """
    device = device_of(engine)
    try:
        step = vector_step(app, bundle, workload, device)
    except UnsupportedModel as exc:
        raise UnsupportedModel(_neither(refusal, exc), code="FN-1112") from exc
    vmap = vmap_on(device)
    return Chosen(engine=vmap, step=step, reason=f"engine {vmap} without an export: {COST}; {refusal}")


def _neither(refusal: str, exc: UnsupportedModel) -> str:
    """Return the text of both errors. An error that affects every format is in both."""
    return refusal if str(exc) == refusal else f"{refusal}; torch alone cannot train the clients either: {exc}"
