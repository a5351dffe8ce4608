"""A coordinator and its Runs in this process, for tests on a virtual clock."""

import asyncio
import random
from dataclasses import dataclass, replace
from pathlib import Path

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.messages import CodecSpec, Training
from fanin.protos.plans import AggregationPlan, CohortPlan, EvaluationPlan, Int8Plan, Plan, StopPlan
from fanin.server.access.limits import Limits
from fanin.server.fleet.coordinator import Coordinator
from fanin.server.folder import open_state
from fanin.server.rounds.worker import LogObserver
from fanin.server.runs.catalog import Runs
from fanin.server.runs.data import DataSource, NoData
from fanin.server.runs.recorded_setup import Parts
from fanin.server.storage.blobs import FolderBlobs
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import Lane, inline
from fanin.server.storage.stores import CoordinatorState
from fanin.simulation import synthetic_bundle
from fanin.simulation.federation.federation import start_run

PUBLISHER = SigningKey(bytes(range(32)))
SHAPES = {"a": (3, 5), "b": (7,)}


AGGREGATION = ("max_staleness", "rule", "rule_options", "outer_optimizer", "outer_options")


def plan(**changes: object) -> Plan:
    """Return a Plan with four devices and four Updates a Round."""
    fields = {"concurrency": 4, "buffer": 4, "quorum": 4, "deadline_s": 600.0, "max_rounds": 3} | changes
    aggregation = {key: fields.pop(key) for key in tuple(fields) if key in AGGREGATION}
    stop = StopPlan(max_rounds=int(fields.pop("max_rounds")))
    codec = fields.pop("codec", CodecSpec(name="fixed32", max_shift=0))
    stages, ranges = fields.pop("stages", ()), fields.pop("ranges", "export")
    return Plan(
        name="virtual",
        cohort=CohortPlan(**fields),
        training=Training(epochs=1, learning_rate=0.1, seed=7),
        codec=codec,
        stages=stages,
        aggregation=AggregationPlan(**aggregation),
        stop=stop,
        evaluation=EvaluationPlan(data="digits" if ranges == "data" else ""),
        int8=Int8Plan(ranges=ranges),
    )


@dataclass
class Place:
    """A coordinator over a folder, with inline lanes."""

    state: CoordinatorState
    runs: Runs
    coordinator: Coordinator


def open_place(
    folder: Path,
    order_seed: int = 0,
    blobs: FolderBlobs | None = None,
    store_lane: Lane = inline,
    data: DataSource | None = None,
) -> Place:
    """Return a coordinator on the running loop's clock. Tests may pass faulty ``blobs`` or a slow ``store_lane``."""
    loop = asyncio.get_running_loop()
    state = open_state(folder / "state", Durability.PROCESS, (store_lane, inline), loop.time)
    if blobs is not None:
        state = replace(state, files=replace(state.files, blobs=blobs))
    return place_over(state, order_seed, data)


def place_over(state: CoordinatorState, order_seed: int = 0, data: DataSource | None = None) -> Place:
    """Return a coordinator over an opened folder."""
    runs = Runs(state.stores, state.files, LogObserver(), Parts(data=data or NoData()))
    coordinator = Coordinator(runs, state.stores, state.files, Limits(), random.Random(order_seed))
    return Place(state=state, runs=runs, coordinator=coordinator)


def bundle_in(folder: Path, *, scaffold: bool = False) -> Bundle:
    """Return a small Bundle without graphs, with or without inputs for control variates."""
    return synthetic_bundle(folder / "bundle", PUBLISHER, SHAPES, scaffold=scaffold)


async def start(runs: Runs, bundle: Bundle, plan: Plan, run_id: str = "run") -> None:
    """Publish a Bundle and start a Run of it."""
    await start_run(runs, run_id, plan, bundle, PUBLISHER)
