"""A coordinator and its Runs in this process, for tests on a virtual clock."""

import asyncio
import random
from dataclasses import dataclass, replace
from pathlib import Path

from fanin.clients.operator import ref_of
from fanin.clients.testing import synthetic_bundle
from fanin.edge.bundle import Bundle
from fanin.edge.keys import SigningKey
from fanin.edge.versions import sign_delegation, sign_version
from fanin.protos.chunks import cut
from fanin.protos.messages import CodecSpec, Training
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, StopPlan
from fanin.protos.runs import StartRun
from fanin.server.blobs import Blobs
from fanin.server.coordinator import Coordinator, Limits
from fanin.server.disk import Durability
from fanin.server.lanes import Lane, inline
from fanin.server.observe import LogObserver
from fanin.server.runs import Runs
from fanin.server.state import open_state
from fanin.server.work import Tools

PUBLISHER = SigningKey(bytes(range(32)))


def plan(**changes: object) -> Plan:
    """Four devices, four Updates a Round."""
    fields = {"concurrency": 4, "buffer": 4, "quorum": 4, "deadline_s": 600.0, "max_rounds": 3} | changes
    max_staleness = int(fields.pop("max_staleness", 0))
    stop = StopPlan(max_rounds=int(fields.pop("max_rounds")))
    codec = fields.pop("codec", CodecSpec(name="fixed32", max_shift=0))
    return Plan(
        name="virtual",
        cohort=CohortPlan(**fields),
        training=Training(epochs=1, learning_rate=0.1, seed=7),
        codec=codec,
        aggregation=AggregationPlan(max_staleness=max_staleness),
        stop=stop,
    )


@dataclass
class Place:
    """A coordinator over a folder, with inline lanes."""

    tools: Tools
    runs: Runs
    coordinator: Coordinator


def open_place(folder: Path, order_seed: int = 0, blobs: Blobs | None = None, store_lane: Lane = inline) -> Place:
    """A coordinator on the running loop's clock; ``blobs`` may be ones that misbehave, the store's lane a slow one."""
    loop = asyncio.get_running_loop()
    tools = open_state(folder / "state", Durability.PROCESS, (store_lane, inline), loop.time, LogObserver())
    if blobs is not None:
        tools = replace(tools, blobs=blobs)
    runs = Runs(tools)
    return Place(tools=tools, runs=runs, coordinator=Coordinator(runs, tools, Limits(), random.Random(order_seed)))


def bundle_in(folder: Path) -> Bundle:
    """A small Bundle without graphs."""
    return synthetic_bundle(folder / "bundle", PUBLISHER, {"a": (3, 5), "b": (7,)})


async def start(runs: Runs, bundle: Bundle, wanted: Plan, run_id: str = "run") -> None:
    """Publish a Bundle and start a Run of it, as an operator does over gRPC."""
    for data in (bundle.signed.data, *(bundle.artifact(name) for name in bundle.manifest.artifacts)):
        for ref, piece in cut(data):
            await runs.put_chunk(ref.sha256, piece)
    await runs.publish_bundle(ref_of(bundle.signed))
    run_key = await runs.prepare_run(run_id)
    version = sign_version(
        PUBLISHER,
        parent=None,
        run_id=run_id,
        bundle_sha256=bundle.sha256,
        parameters=bundle.manifest.artifacts["initial"],
    )
    delegation = sign_delegation(PUBLISHER, run_id=run_id, bundle_sha256=bundle.sha256, run_public_key=run_key)
    await runs.start_run(StartRun(run_id=run_id, plan=wanted, version=version, delegation=delegation))
