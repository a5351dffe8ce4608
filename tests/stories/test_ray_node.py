"""A node of a Ray cluster is lost in the middle of a Round: the Round completes, with bit-identical Versions."""

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from support.flower_apps import write_app

from fanin.clients import FlowerSettings
from fanin.simulation import RayCluster, SimulationSettings, simulate

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = pytest.mark.nightly
ray = pytest.importorskip("ray")

WAIT_S: Final = 120.0
NUM_CLIENTS: Final = 4
APP: Final = """
import time
from pathlib import Path

import numpy as np
import ray
from flwr.app import ConfigRecord
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

LOST_IN, NUM_CLIENTS = 2, 4


class Client(NumPyClient):
    def __init__(self, context):
        self.context = context

    def get_parameters(self, config):
        # The results are too large for the memory of their owner: they are objects on the node of their training.
        return [np.zeros(100_000, "float32")]

    def fit(self, parameters, config):
        folder = Path(self.context.run_config["folder"])
        number = self.context.node_config["partition-id"]
        rounds = self.context.state["seen"]["rounds"] if "seen" in self.context.state else 0
        self.context.state["seen"] = ConfigRecord({"rounds": rounds + 1})
        if config["server-round"] == LOST_IN and ray.is_initialized():
            with (folder / "trainings").open("a") as file:
                print(number, ray.get_runtime_context().get_node_id(), file=file)
            time.sleep(1)
            num_begun = len((folder / "trainings").read_text().splitlines())
            while num_begun == NUM_CLIENTS and not (folder / "lost").exists():
                time.sleep(0.05)
        noise = np.random.standard_normal(parameters[0].shape).astype("float32")
        return [parameters[0] + noise * (rounds + 1)], 3, {}


def client_fn(context):
    return Client(context).to_client()


app = ClientApp(client_fn=client_fn)
"""


@pytest.fixture
def nodes() -> Iterator["Cluster"]:
    """A head that trains nothing, and two nodes with room for one training each."""
    from ray.cluster_utils import Cluster

    before, memory = signal.getsignal(signal.SIGTERM), {"object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **memory})
    for _ in range(2):
        cluster.add_node(num_cpus=1, **memory)
    yield cluster
    cluster.shutdown()
    # Each node of this process has set a handler.
    signal.signal(signal.SIGTERM, before)


def trainings_of(path: Path) -> list[tuple[int, str]]:
    """Return the client and the node of each training of the Round, in the order of their starts."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(number), node) for number, node in (line.split() for line in lines)]


def test_a_node_that_is_lost_loses_no_round(nodes: "Cluster", tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "ray_node_app", APP)
    app = FlowerSettings(app="ray_node_app:app", folder=folder, run_config=f'folder="{tmp_path}"')
    settings = SimulationSettings(plan={"training.learning_rate": 1, "codec.name": "fixed32"}, quiet=True)
    path = {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}}
    cluster = RayCluster(address=nodes.address, runtime_env=path)
    log = tmp_path / "trainings"
    lost: list[tuple[int, str]] = []

    def remove_node() -> None:
        deadline = time.monotonic() + WAIT_S
        # All trainings have begun. The last one waits, and another one has ended on its node.
        while time.monotonic() < deadline and len(trainings_of(log)) < NUM_CLIENTS:
            time.sleep(0.05)
        time.sleep(2.0)
        lost.append(trainings_of(log)[-1])
        for node in list(nodes.worker_nodes):
            if node.node_id == lost[0][1]:
                nodes.remove_node(node, allow_graceful=False)
        (tmp_path / "lost").touch()

    thread = threading.Thread(target=remove_node, daemon=True)
    thread.start()
    cluster_result = simulate(
        app, NUM_CLIENTS, cohort=NUM_CLIENTS, rounds=3, settings=replace(settings, cluster=cluster)
    )
    thread.join()
    (client, node), trainings = lost[0], trainings_of(log)
    assert node in {node_id for _, node_id in trainings[: NUM_CLIENTS - 1]}
    # The training ran again on the other node. So did one that had ended on the lost node before its result was
    # collected.
    repeats = trainings[NUM_CLIENTS:]
    assert client in {number for number, _ in repeats}
    assert node not in {node_id for _, node_id in repeats}
    assert cluster_result.is_complete and cluster_result.failures == ()
    assert [row.num_clients for row in cluster_result.rounds] == [0, *[NUM_CLIENTS] * 3]
    local_result = simulate(app, NUM_CLIENTS, cohort=NUM_CLIENTS, rounds=3, settings=settings)
    assert local_result.digests == cluster_result.digests
