"""A simulation on a Ray cluster of two nodes: the bits of one process, a killed worker, and shares of a GPU."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.backends import check_backend
from support.flower_apps import write_app
from torch import nn

from fanin.clients import FlowerSettings
from fanin.edge.export import App
from fanin.edge.runtimes.base import Inputs
from fanin.protos.errors import InvalidInput
from fanin.simulation import Iid, RayCluster, Result, SimulationSettings, load_data, partition, simulate
from fanin.simulation.backends.ray_cluster import RayTasks

pytestmark = pytest.mark.nightly
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A cluster of two nodes, each with its own raylet and room for one training.

    The second node has a GPU that exists only in Ray's records.
    """
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 200 << 20}
    with pytest.MonkeyPatch.context() as patch:
        # Ray assumes that the GPU exists, but no training uses it.
        patch.setenv("CUDA_VISIBLE_DEVICES", "0")
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **memory})
        nodes.add_node(num_cpus=1, num_gpus=1, **memory)
    # Workers find the modules of the tests, as on a cluster where these are installed.
    path = {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}}
    yield RayCluster(address=nodes.address, runtime_env=path)
    nodes.shutdown()


def node_of(_: int) -> tuple[str, str]:
    """Return the node of a task, and the GPUs that it may use."""
    time.sleep(0.5)
    return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "")


def test_ray_is_a_backend_on_both_nodes(cluster: RayCluster) -> None:
    before = signal.getsignal(signal.SIGTERM)
    backend = RayTasks(cluster)
    try:
        assert os.getpid() not in check_backend(backend)
        tasks = [backend.submit(node_of, number) for number in range(8)]
        assert len({task()[0] for task in tasks}) == 2
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        backend.close()
    assert not ray.is_initialized()


def test_clients_share_a_gpu(cluster: RayCluster) -> None:
    backend = RayTasks(replace(cluster, cpus=0.5, gpus=0.5))
    try:
        tasks = [backend.submit(node_of, number) for number in range(4)]
        results = [task() for task in tasks]
    finally:
        backend.close()
    assert len({node for node, _ in results}) == 1
    assert {gpus for _, gpus in results} == {"0"}
    with pytest.raises(InvalidInput, match="got 2 GPUs for a training, but the cluster has 1"):
        RayTasks(replace(cluster, gpus=2.0))
    ray.shutdown()


PLAN = {"training.learning_rate": 0.1, "codec.name": "int8", "stages": [{"name": "error_feedback"}]}


def graph_result(settings: SimulationSettings) -> Result:
    """Return the result of a simulation whose clients train by graphs."""
    torch.manual_seed(1)
    data = load_data("digits").train
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    app = App(
        name="digits", module=net, calibration=torch.from_numpy(data.inputs["x"][:64]), batch_size=8, num_classes=10
    )
    return simulate(app, partition(data, 6, Iid()), cohort=4, rounds=3, settings=settings)


def test_graphs_have_the_bits_of_one_process(cluster: RayCluster) -> None:
    settings = SimulationSettings(plan=PLAN, quiet=True)
    local_result, cluster_result = graph_result(settings), graph_result(replace(settings, cluster=cluster))
    assert local_result.failures == cluster_result.failures == ()
    assert cluster_result.is_complete
    assert local_result.digests == cluster_result.digests
    assert local_result.events == cluster_result.events


def kill_when_named(pids: Path, killed: Path) -> None:
    """Kill the process that writes its id to a file. Then create the file ``killed``."""
    while not pids.exists() or not pids.read_text().endswith("\n"):
        time.sleep(0.05)
    os.kill(int(pids.read_text()), signal.SIGKILL)
    killed.touch()


def test_a_worker_that_is_killed_while_it_trains_a_graph_loses_no_round(cluster: RayCluster, tmp_path: Path) -> None:
    pids, killed = tmp_path / "pids", tmp_path / "killed"

    def slow_accuracy(predictions: Inputs, targets: Inputs) -> float:
        """Return the accuracy. The first call waits until its process is killed."""
        with contextlib.suppress(FileExistsError), pids.open("x") as file:
            print(os.getpid(), file=file, flush=True)
            while not killed.exists():
                time.sleep(0.05)
        return float((predictions == targets).mean())

    plan = PLAN | {"statistics": [{"name": "evaluate.slow", "bound": 4096 << 16}]}
    settings = SimulationSettings(plan=plan, metrics={"slow": slow_accuracy}, quiet=True)
    thread = threading.Thread(target=kill_when_named, args=(pids, killed), daemon=True)
    thread.start()
    cluster_result = graph_result(replace(settings, cluster=cluster))
    thread.join()
    assert cluster_result.is_complete and cluster_result.failures == ()
    assert [row.num_clients for row in cluster_result.rounds] == [0, 4, 4, 4]
    local_result = graph_result(settings)
    assert cluster_result.digests == local_result.digests
    # The training of the killed worker was repeated, and counts once.
    assert cluster_result.clients == local_result.clients


APP = """
import os
import time
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp


class Client(NumPyClient):
    def __init__(self, context):
        self.context = context

    def get_parameters(self, config):
        return [np.zeros(4, "float32")]

    def fit(self, parameters, config):
        folder = Path(self.context.run_config["folder"])
        rounds = self.context.state["seen"]["rounds"] if "seen" in self.context.state else 0
        self.context.state["seen"] = ConfigRecord({"rounds": rounds + 1})
        if config["server-round"] == 2 and self.context.node_config["partition-id"] == 1:
            with (folder / "pids").open("a") as file:
                print(os.getpid(), file=file)
            while not (folder / "killed").exists():
                time.sleep(0.05)
        return [parameters[0] + np.random.standard_normal(4).astype("float32") * (rounds + 1)], 3, {}


def client_fn(context):
    return Client(context).to_client()


app = ClientApp(client_fn=client_fn)
"""


def test_a_worker_that_is_killed_loses_no_round(cluster: RayCluster, tmp_path: Path) -> None:
    folder = write_app(tmp_path / "app", "ray_app", APP)
    app = FlowerSettings(app="ray_app:app", folder=folder, run_config=f'folder="{tmp_path}"')
    settings = SimulationSettings(plan={"training.learning_rate": 1, "codec.name": "fixed32"}, quiet=True)
    pids = tmp_path / "pids"
    thread = threading.Thread(target=kill_when_named, args=(pids, tmp_path / "killed"), daemon=True)
    thread.start()
    cluster_result = simulate(app, 4, cohort=4, rounds=3, settings=replace(settings, cluster=cluster))
    thread.join()
    # The task ran in two workers, the first of which was killed.
    workers = pids.read_text().split()
    assert len(workers) == 2 and workers[0] != workers[1]
    assert cluster_result.is_complete and cluster_result.failures == ()
    assert [row.num_clients for row in cluster_result.rounds] == [0, 4, 4, 4]
    local_result = simulate(app, 4, cohort=4, rounds=3, settings=settings)
    assert local_result.digests == cluster_result.digests
    assert np.isfinite(cluster_result.parameters).all()
