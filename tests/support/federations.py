"""A small federation whose devices do not train: the Plan, the Bundle and the devices."""

from collections.abc import Mapping
from pathlib import Path

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.messages import CodecSpec, Training
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, StopPlan
from fanin.simulation import synthetic_bundle
from support.hosted import Hosted
from support.peers import Peer, Place

PUBLISHER = SigningKey(bytes(range(32)))
NUM_DEVICES = 3
SHAPES = {"a": (600, 500), "b": (3,)}
"""1.2 MB an Update: a full Chunk and a partial one."""
NUM_VALUES = 300_003
SMALL_SHAPES = {"a": (3, 5), "b": (7,)}
"""88 bytes an Update, few compared with the database."""


def plan(num_rounds: int = 1, num_spare: int = 0) -> Plan:
    """Return a Plan in which NUM_DEVICES close a Round; ``num_spare`` more may be at work in it."""
    return Plan(
        name="story",
        cohort=CohortPlan(
            concurrency=NUM_DEVICES + num_spare, buffer=NUM_DEVICES, quorum=NUM_DEVICES, deadline_s=300.0
        ),
        training=Training(epochs=1, learning_rate=0.1, seed=5),
        codec=CodecSpec(name="fixed32", max_shift=0),
        aggregation=AggregationPlan(),
        stop=StopPlan(max_rounds=num_rounds),
    )


def bundle_in(folder: Path, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Bundle:
    """Return the Bundle, signed by PUBLISHER."""
    return synthetic_bundle(folder / "bundle", PUBLISHER, shapes)


def peers(host: Place, bundle: Bundle, folder: Path, num_devices: int = NUM_DEVICES) -> list[Peer]:
    """Return the devices of a Round, each with a folder in ``folder``."""
    return [Peer(host, bundle, index, folder / f"device-{index}") for index in range(num_devices)]


def expected_digests(folder: Path, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> list[str]:
    """Run one Round without faults. Return the digests of its Versions."""
    host = Hosted(folder).start()
    try:
        bundle = bundle_in(folder, shapes)
        host.start_run(plan(), bundle, PUBLISHER)
        for device in peers(host, bundle, folder):
            device.take_part()
        return [event.version_sha256 for event in host.published_versions()]
    finally:
        host.stop()
