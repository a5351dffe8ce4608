"""Tasks of a Ray cluster: the clients of a Round train on its nodes. This is the only module that imports ray.

Ray schedules the tasks, moves the objects and repeats the tasks of a worker or a node that is lost. A placed value is
an object of Ray's object store: it travels to a node once, and the workers of the node share it. A task depends on its
job alone, so a repeated one has the same result.

Reference:
    Ray 2.60, https://docs.ray.io/en/latest/ray-core/fault-tolerance.html.
"""

import logging
import os
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import grpc

from fanin.protos.errors import InvalidInput, RuntimeMissing
from fanin.simulation.backends.backend import Placed

if TYPE_CHECKING:
    import ray

T = TypeVar("T")
J = TypeVar("J")
R = TypeVar("R")
AUTO: Final = "auto"
"""The cluster of this machine, as Ray names it."""
CONNECT_S: Final = 5.0
"""Ray itself tries to connect to an absent cluster for minutes."""
ANSWER_S: Final = 10.0
"""Time for the answer of a head that is busy. A head without load answers in milliseconds."""
CHECK_ALIVE: Final = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A call to the head of a cluster whose request may be empty. Ray has no public function with a time limit for it."""
MAX_RETRIES: Final = 3
"""Times that Ray repeats a training whose worker is lost, its own default. A training that crashes each worker ends."""
START: Final = "start one with `ray start --head`, or name another one"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """A Ray cluster on which clients train.

    Attributes:
        address: ``HOST:PORT`` of its head, or ``auto`` for the cluster of this machine. "": the variable
            ``RAY_ADDRESS``, or ``auto``. A process that has called ``ray.init`` uses that cluster.
        cpus: CPUs of one training.
        gpus: GPUs of one training. With 0.25, four clients share a GPU.
        runtime_env: The ``runtime_env`` of Ray, such as ``{"working_dir": "."}``.
    """

    address: str = ""
    cpus: float = 1.0
    gpus: float = 0.0
    runtime_env: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.cpus >= 0.0 or not self.gpus >= 0.0 or self.cpus + self.gpus == 0.0:
            raise InvalidInput(
                f"ray: got cpus {self.cpus:g} and gpus {self.gpus:g}, expected 0 or more, and not both 0: Ray would "
                "start all trainings at the same time",
                code="FN-1106",
            )
        if self.gpus > 1.0 and self.gpus != int(self.gpus):
            raise InvalidInput(
                f"ray: got gpus {self.gpus:g}, expected a share below 1, or a whole number", code="FN-1106"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValue(Generic[T]):
    """A value in the object store. See Placed."""

    ref: "ray.ObjectRef[T]" = field(compare=False)
    key: str

    def get(self) -> T:
        """Read the value; its arrays stay in the store. See Placed."""
        import ray

        value: T = ray.get(self.ref)
        return value


class RayTasks:
    """Tasks of a Ray cluster. See Backend.

    Raises:
        RuntimeMissing: ray is not installed.
        InvalidInput: The cluster cannot be reached, or has too few CPUs or GPUs for a training.
    """

    def __init__(self, cluster: RayCluster) -> None:
        try:
            import ray
        except ModuleNotFoundError as exc:
            if exc.name != "ray":
                raise
            raise RuntimeMissing(
                "simulate: got a Ray cluster, but ray is not installed here; pip install 'fanin[ray]'", code="FN-1104"
            ) from exc
        self._owns = not ray.is_initialized()
        if self._owns:
            _connect(cluster)
        self._cluster = cluster
        self._remote: dict[object, ray.remote_function.RemoteFunction] = {}
        _check_resources(cluster, ray.cluster_resources())

    def place(self, value: T) -> Placed[T]:
        """Put the value into the object store. See Backend."""
        import ray

        return StoredValue(ref=ray.put(value), key=uuid.uuid4().hex)

    def submit(self, task: Callable[[J], R], job: J, due_s: float = 0.0) -> Callable[[], R]:
        """Start a task on the cluster. See Backend."""
        import ray

        if task not in self._remote:
            options = {"num_cpus": self._cluster.cpus, "num_gpus": self._cluster.gpus, "max_retries": MAX_RETRIES}
            self._remote[task] = ray.remote(**options)(task)
        ref = self._remote[task].remote(job)

        def result() -> R:
            try:
                value: R = ray.get(ref)
            except ray.exceptions.RayTaskError as exc:
                # The error of the task; that of Ray has the traceback of the worker.
                raise exc.cause from exc
            return value

        return result

    def close(self) -> None:
        """End the tasks, and leave the cluster if this object has joined it. See Backend."""
        import ray

        if self._owns:
            ray.shutdown()


def _connect(cluster: RayCluster) -> None:
    """Join the cluster. Raises InvalidInput."""
    import ray

    address = cluster.address or os.environ.get("RAY_ADDRESS", "") or AUTO
    _check_address(address)
    try:
        with _same_sigterm():
            ray.init(
                address=address,
                runtime_env=dict(cluster.runtime_env) or None,
                logging_level=logging.WARNING,
                # The command writes its result to stdout. Ray keeps the workers' output in its own logs.
                log_to_driver=False,
            )
    except (OSError, ValueError, RuntimeError) as exc:
        raise InvalidInput(
            f"ray: no cluster at {address} ({' '.join(str(exc).split())}); {START}", code="FN-1107"
        ) from exc


def _check_address(address: str) -> None:
    """Raise InvalidInput unless the head of a cluster answers at an address of the form HOST:PORT."""
    scheme, _, target = address.rpartition("://")
    host, colon, port = target.rpartition(":")
    if address == AUTO or not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as exc:
        raise InvalidInput(f"ray: no cluster at {address} ({exc}); {START}", code="FN-1107") from exc
    # The server of ray:// is another one, and Ray waits for it 30 s at most. With TLS, the keys of Ray are needed.
    if not scheme and os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        _check_answer(target)


def _check_answer(address: str) -> None:
    """Raise InvalidInput unless the head of a cluster answers a call in time: any process can listen at a port."""
    # Ray, too, connects without a proxy.
    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(CHECK_ALIVE)
        try:
            call(b"", timeout=ANSWER_S)
        except grpc.RpcError as exc:
            code, details = exc.code(), exc.details()
            if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                # It is a cluster with access control. Ray has the token, and its own error without one.
                return
            reason = (
                f"no answer in {ANSWER_S:g} s" if code is grpc.StatusCode.DEADLINE_EXCEEDED else details or code.name
            )
            raise InvalidInput(
                f"ray: got the address {address}, where a process listens that is not the head of a Ray cluster "
                f"({reason}); {START}",
                code="FN-1107",
            ) from exc


def _check_resources(cluster: RayCluster, resources: Mapping[str, float]) -> None:
    """Raise InvalidInput if no training could ever start."""
    for name, needed in (("CPU", cluster.cpus), ("GPU", cluster.gpus)):
        if needed > resources.get(name, 0.0):
            raise InvalidInput(
                f"ray: got {needed:g} {name}s for a training, but the cluster has {resources.get(name, 0.0):g}; "
                "request fewer, or add nodes",
                code="FN-1106",
            )


@contextmanager
def _same_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM. Ray sets one that ends the event loop between two steps of a task."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
