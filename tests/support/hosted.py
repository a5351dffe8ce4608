"""The production coordinator behind real gRPC and TLS, on a thread of the test's process.

It is for stories that need no separate process. It starts in tens of milliseconds, and its log is in ``caplog``.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from fanin.clients.administrator import Administrator
from fanin.clients.operator import Operator
from fanin.clients.transport import Connection
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.protos.messages import Role, RoundOpened, RunInfo, VersionPublished
from fanin.protos.plans import Plan
from fanin.server.access.authority import local_identity
from fanin.server.access.connections import Connections
from fanin.server.access.interceptors import Waits
from fanin.server.access.limits import Limits
from fanin.server.access.rates import Sources
from fanin.server.access.registry import Registry
from fanin.server.care.forecast import DiskWatch, published_rounds
from fanin.server.care.pruner import Pruner
from fanin.server.fleet.coordinator import Coordinator
from fanin.server.folder import open_state
from fanin.server.rounds.worker import LogObserver
from fanin.server.runs.catalog import Runs
from fanin.server.runs.stream import LiveStream
from fanin.server.service import Services, bind_server
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import ThreadLane
from fanin.server.telemetry.instruments import Instruments

NAMES = ("localhost", "127.0.0.1")
START_S = 20.0


@dataclass
class Hosted:
    """A coordinator that serves from ``folder / "state"``.

    ``names`` are the names in its certificate; ``listen`` is the host part of its address.
    """

    folder: Path
    names: tuple[str, ...] = NAMES
    limits: Limits = field(default_factory=Limits)
    first_request_s: float = 30.0
    wall: Callable[[], float] = time.time
    connections: Connections = field(default_factory=Connections)
    # Tests of refusals share a coordinator and an address.
    wrong_burst: int = 1_000_000
    instruments: Instruments = field(default_factory=lambda: Instruments(time.time))
    port: int = 0
    listen: str = "127.0.0.1"
    ca: bytes = b""
    device_token: str = ""
    operator_token: str = ""
    _ready: threading.Event = field(default_factory=threading.Event)
    _loop: asyncio.AbstractEventLoop | None = None
    _stop: asyncio.Event | None = None
    _thread: threading.Thread | None = None

    @property
    def state(self) -> Path:
        """The coordinator's folder."""
        return self.folder / "state"

    @property
    def address(self) -> str:
        """The address of the coordinator."""
        return f"{self.listen}:{self.port}"

    def start(self) -> "Hosted":
        """Start to serve, on the previous port if there was one."""
        self._ready.clear()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="hosted coordinator")
        self._thread.start()
        assert self._ready.wait(START_S), "the coordinator did not start"
        return self

    def stop(self) -> None:
        """Stop serving. Durable state is kept."""
        if self._loop is not None and self._stop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._loop = self._stop = self._thread = None

    @contextmanager
    def operator(self, token: str = "") -> Iterator[Operator]:
        """Yield an operator with its own connection."""
        line = Connection(self.address, self.ca)
        try:
            yield Operator(line, token or self.operator_token)
        finally:
            line.close()

    @contextmanager
    def administrator(self, token: str = "") -> Iterator[Administrator]:
        """Yield an administrator with its own connection."""
        with Administrator.connect(self.address, self.ca, token or self.operator_token) as administrator:
            yield administrator

    def start_run(self, plan: Plan, bundle: Bundle, publisher: SigningKey, run_id: str = "run") -> RunInfo:
        """Publish a Bundle and start a Run of it."""
        with self.operator() as operator:
            operator.publish_bundle(bundle)
            return operator.start_run(run_id, plan, bundle, publisher)

    def published_versions(self, run_id: str = "run") -> list[VersionPublished]:
        """Wait until the Run rests. Return its Versions."""
        with self.operator() as operator:
            events = [entry.event for entry in operator.watch(run_id)]
        return [event for event in events if isinstance(event, VersionPublished)]

    def await_round(self, run_id: str, round_number: int) -> None:
        """Return when this Round has been opened. If that does not happen, wait until the test times out."""
        with self.operator() as operator:
            for entry in operator.watch(run_id):
                if isinstance(entry.event, RoundOpened) and entry.event.round == round_number:
                    return
        raise AssertionError(f"run {run_id} has ended without a round {round_number}")

    def num_tasks(self) -> int:
        """Return the number of tasks in the coordinator's event loop."""

        async def count() -> int:
            # Without the task that counts.
            return len(asyncio.all_tasks()) - 1

        assert self._loop is not None, "only one that serves has tasks"
        return asyncio.run_coroutine_threadsafe(count(), self._loop).result(START_S)

    def block(self, seconds: float) -> None:
        """Block the coordinator's event loop for this time. Return at once."""
        assert self._loop is not None, "only one that serves has a loop"
        self._loop.call_soon_threadsafe(time.sleep, seconds)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        store, disk = ThreadLane(1, "store"), ThreadLane(2, "disk")
        state = open_state(self.state, Durability.PROCESS, (store, disk), self.wall)
        registry = Registry(state.devices, self.wall)
        if not self.operator_token:
            self.device_token, self.operator_token = registry.new_token(Role.DEVICE), registry.new_token(Role.ADMIN)
        identity = local_identity(self.state / "tls", self.names, datetime.now(UTC))
        runs = Runs(state.stores, state.files, LogObserver())
        coordinator = Coordinator(runs, state.stores, state.files, self.limits, random.Random(0))
        waits = Waits(first_request_s=self.first_request_s, read_s=self.limits.stall_s)
        services = Services(
            coordinator=coordinator,
            runs=runs,
            stream=(stream := LiveStream(runs, state.history)),
            registry=registry,
            stores=state.stores,
            pruner=Pruner(state.stores, state.files),
            disk=DiskWatch(self.state, partial(published_rounds, state.stores), time.time),
            waits=waits,
            connections=self.connections,
            sources=Sources(time.monotonic, time.time, self.wrong_burst),
            instruments=self.instruments,
            # Tests check every line.
            max_refused_lines=1_000_000,
        )
        bound = bind_server(services, lambda: identity, self.address)
        self.port = bound.port
        await runs.start()
        await bound.start()
        self.ca = identity.ca_certificate
        self._ready.set()
        await self._stop.wait()
        stream.close()
        await coordinator.stop()
        await bound.drain(1.0)
        await runs.stop()
        store.close()
        disk.close()
