"""A small federation whose devices train nothing: the Plan, the Bundle and its devices."""

from pathlib import Path

from fanin.clients.testing import synthetic_bundle
from fanin.edge.bundle import Bundle
from fanin.edge.keys import SigningKey
from fanin.protos.messages import CodecSpec, Training
from fanin.protos.plans import AggregationPlan, CohortPlan, Plan, StopPlan
from support.hosted import Hosted
from support.peers import Peer

PUBLISHER = SigningKey(bytes(range(32)))
NUM_DEVICES = 3
SHAPES = {"a": (600, 500), "b": (3,)}
NUM_VALUES = 300_003
"""1.2 MB an Update: two Chunks, so that there is a whole one and a rest."""


def plan(num_rounds: int = 1, num_spare: int = 0) -> Plan:
    """NUM_DEVICES close a Round; ``num_spare`` more may be at work in it."""
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


def bundle_in(folder: Path) -> Bundle:
    """The Bundle, signed by PUBLISHER."""
    return synthetic_bundle(folder / "bundle", PUBLISHER, SHAPES)


def peers(host: Hosted, bundle: Bundle, num_devices: int = NUM_DEVICES) -> list[Peer]:
    """The devices of a Round."""
    return [Peer(host, bundle, index, host.folder / f"device-{index}") for index in range(num_devices)]


def undisturbed(folder: Path, num_rounds: int = 1) -> list[str]:
    """The Versions that the federation ends in when nothing happens to it."""
    host = Hosted(folder).start()
    try:
        bundle = bundle_in(folder)
        host.start_run(plan(num_rounds), bundle, PUBLISHER)
        devices = peers(host, bundle)
        for _ in range(num_rounds):
            for device in devices:
                device.take_part()
        return [event.version_sha256 for event in host.published()]
    finally:
        host.stop()
