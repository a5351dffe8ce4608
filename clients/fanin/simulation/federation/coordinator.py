"""A production coordinator in this process, on the running event loop's clock, that can stop and start again.

Coordinator, round machine, store, spool, fold and outer step are production code. The lanes run inline, because a
thread would escape the virtual clock. A new life resumes from the state of the old one, in a folder or in memory.
"""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fanin.protos.errors import Unavailable
from fanin.protos.messages import FIRST_EPOCH, LoggedEvent
from fanin.server.access.limits import Limits
from fanin.server.aggregation.rules import StrategySource
from fanin.server.fleet.coordinator import Coordinator
from fanin.server.folder import open_state
from fanin.server.protocols.events import Effect
from fanin.server.runs.catalog import Runs
from fanin.server.runs.data import DataSource, NoData
from fanin.server.runs.recorded_setup import Parts
from fanin.server.selection.policies import POLICIES, SelectionPolicy
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import inline
from fanin.server.storage.memory.state import MemoryState
from fanin.server.storage.protocols.files import BlobReader
from fanin.server.storage.stores import CoordinatorState
from fanin.server.strategies.process import Strategies
from fanin.simulation.federation.loopback import InterruptibleFleet
from fanin.simulation.federation.unreliable import Note

COORDINATOR: Final = "coordinator"
PAUSE_S: Final = 1.0
"""Pause of an operator after a broken connection, before the next try."""


@dataclass(slots=True, kw_only=True)
class Life:
    """One life of the coordinator, from a start to a stop."""

    state: CoordinatorState
    runs: Runs
    fleet: InterruptibleFleet


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """The options of a simulated coordinator.

    Attributes:
        limits: Its limits.
        policies: Selection policies of the caller by name, in addition to those of fanin and the installed ones.
        strategies: Runs the Flower strategies that the Plan names.
        data: Returns the data sets that the Plan may name, over the blobs of the coordinator.
    """

    limits: Limits = field(default_factory=Limits)
    policies: Mapping[str, SelectionPolicy] = field(default_factory=dict)
    strategies: StrategySource = field(default_factory=Strategies)
    data: Callable[[BlobReader], DataSource] = lambda blobs: NoData()


class SimulatedCoordinator:
    """A coordinator over a folder, or in memory. ``seed`` determines its random choices and the key of each Run."""

    def __init__(self, folder: Path | None, seed: int, options: CoordinatorOptions, note: Note) -> None:
        self._folder = folder
        self._memory = MemoryState()
        self._seed = seed
        self._options = options
        self._note = note
        self._rng = random.Random(f"{seed}/coordinator")
        self._life: Life | None = None

    @property
    def life(self) -> Life:
        """The current life. Raises Unavailable while the coordinator is down."""
        if self._life is None:
            raise Unavailable("the simulated coordinator is down", code="FN-1115")
        return self._life

    async def start(self) -> None:
        """Start to serve from the durable state, like a new process."""
        clock = asyncio.get_running_loop().time
        if self._folder is None:
            state = self._memory.open(clock)
        else:
            state = open_state(self._folder, Durability.PROCESS, (inline, inline), clock)
        options = self._options
        policies, data = {**POLICIES, **options.policies}, options.data(state.blobs)
        parts = Parts(
            policies=policies,
            strategies=options.strategies,
            data=data,
            roster=_Everyone(),
            draw_seed=self._noise_seed,
        )
        runs = Runs(state.stores, state.files, _Noting(self._note), parts)
        rng = random.Random(self._rng.random())
        coordinator = Coordinator(runs, state.stores, state.files, options.limits, rng)
        await runs.start()
        self._life = Life(state=state, runs=runs, fleet=InterruptibleFleet(coordinator))
        self._note(COORDINATOR, "serves")

    async def stop(self) -> None:
        """Break all connections and end at once. Only durable state survives."""
        life, self._life = self._life, None
        if life is not None:
            self._note(COORDINATOR, "stops")
            await life.fleet.hang_up()
            await life.runs.stop()

    def _noise_seed(self, run_id: str, round_number: int) -> bytes:
        """Derive the seed of a Round's noise from that of the simulation, so that its Versions are reproducible."""
        return hashlib.sha256(f"{self._seed}/{run_id}/noise/{round_number}".encode()).digest()

    async def seed_run_key(self, run_id: str) -> None:
        """Derive the key of a Run from the seed, so that signatures and ids are reproducible."""
        new_key = hashlib.sha256(f"{self._seed}/{run_id}".encode()).digest()
        stores = self.life.state.stores
        await stores.runs.run_key(run_id, FIRST_EPOCH, new_key, stores.wall())

    async def watch(self, run_id: str) -> AsyncIterator[LoggedEvent]:
        """Yield the events of a Run, past and future, until it ends; continue after a restart."""
        sequence = 0
        while True:
            try:
                life = self.life
                async for entry in life.fleet.stream(life.runs.watch(run_id, sequence)):
                    sequence = entry.sequence + 1
                    yield entry
                return
            except Unavailable:
                await asyncio.sleep(PAUSE_S)


class _Noting:
    """An Observer that logs each finished effect."""

    def __init__(self, note: Note) -> None:
        self._note = note

    def starting(self, run_id: str, effect: Effect) -> None:
        """See Observer."""

    def finished(self, run_id: str, effect: Effect) -> None:
        """See Observer."""
        self._note(COORDINATOR, f"{run_id}: {effect}")


class _Everyone:
    """The roster of a simulation, whose devices are all there from its start."""

    def __contains__(self, _device: object) -> bool:
        return True
