"""The backend that the settings of a simulation name."""

from fanin.protos.errors import InvalidInput
from fanin.simulation.backends.backend import Backend, ThisProcess
from fanin.simulation.backends.processes import WorkerProcesses
from fanin.simulation.backends.ray_cluster import RayCluster, RayTasks


def check_backend(processes: int, cluster: RayCluster | None, engine: str) -> None:
    """Raise InvalidInput unless the settings name one backend that fits the engine."""
    if processes < 1:
        raise InvalidInput(f"simulate: got {processes} processes, expected at least 1", code="FN-1202")
    if cluster is not None and processes > 1:
        raise InvalidInput(
            f"simulate: got {processes} processes and a Ray cluster, expected one of them; remove the other",
            code="FN-1101",
        )
    if cluster is not None and engine != "graph":
        raise InvalidInput(
            f"simulate: got a Ray cluster with the engine {engine!r}, expected 'graph': vmap trains the clients "
            "together in one process; set engine='graph'",
            code="FN-1101",
        )


def open_backend(processes: int, cluster: RayCluster | None) -> Backend:
    """Return the backend.

    Args:
        processes: Worker processes on this machine; 1 for none.
        cluster: A Ray cluster; None for none.

    Raises:
        RuntimeMissing: A library is not installed.
        InvalidInput: The cluster cannot be reached.
    """
    if cluster is not None:
        return RayTasks(cluster)
    return ThisProcess() if processes == 1 else WorkerProcesses(processes)
