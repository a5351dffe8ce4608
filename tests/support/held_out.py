"""Versions of a linear model to evaluate: the data set, the Run, and the evaluator with its real process."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fanin.clients.versions import next_version
from fanin.edge.assembly.assemble import assemble
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.tensors import Float32s
from fanin.protos.chunks import cut
from fanin.protos.messages import Command, Stop, VersionEvaluation
from fanin.protos.plans import EvaluationPlan, Plan
from fanin.server.evaluation.datasets import DataSets
from fanin.server.evaluation.evaluator import SETTLE_S, HeldOutEvaluator
from fanin.server.evaluation.process import TIMEOUT_S, EvaluatorProcess
from fanin.server.folder import open_state
from fanin.server.rounds.worker import LogObserver
from fanin.server.runs.catalog import Runs
from fanin.server.runs.recorded_setup import Parts
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import inline
from fanin.server.storage.stores import CoordinatorState
from support.linear import NUM_CLASSES, NUM_INPUTS, linear_graphs
from support.virtual import PUBLISHER, plan, start

COMMAND = (sys.executable, "-m", "fanin.commands.evaluator")
NAME = "digits"
RUN = "run"
WAIT_S = 60.0
LOOK_S = 0.02
NUM_VALUES = NUM_INPUTS * NUM_CLASSES + NUM_CLASSES


def write_data(folder: Path, num_examples: int = 30) -> Path:
    """Write a data set of the linear model."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(num_examples, NUM_INPUTS)).astype(np.float32)
    y = rng.integers(0, NUM_CLASSES, num_examples).astype(np.int32)
    path = folder / "held-out.npz"
    np.savez(path, x=x, y=y)
    return path


def evaluated_plan(**keys: object) -> Plan:
    """Return a Plan whose Versions are evaluated."""
    return replace(plan(), evaluation=EvaluationPlan(**({"data": NAME} | keys)))


def linear_bundle(folder: Path) -> Bundle:
    """Return the Bundle of the linear model."""
    return assemble(linear_graphs(), folder / "bundle", PUBLISHER)


@dataclass
class Bench:
    """A coordinator over a folder with a stopped Run, to which the test publishes Versions."""

    folder: Path
    data: Path
    timeout_s: float = TIMEOUT_S
    command: Sequence[str] = COMMAND
    name: str = NAME
    others: Mapping[str, Path] = field(default_factory=dict)
    state: CoordinatorState = field(init=False)
    runs: Runs = field(init=False)
    bundle: Bundle = field(init=False)
    process: EvaluatorProcess = field(init=False)
    evaluator: HeldOutEvaluator = field(init=False)

    async def open(self) -> "Bench":
        """Start the coordinator and the evaluator."""
        place = self.folder / "state"
        self.state = open_state(place, Durability.PROCESS, (inline, inline), lambda: 5.0)
        sets = DataSets(blobs=place / "blobs", paths={self.name: self.data, **self.others}, command=self.command)
        self.runs = Runs(self.state.stores, self.state.files, LogObserver(), Parts(data=sets))
        await self.runs.start()
        self.process = EvaluatorProcess(self.command, self.timeout_s)
        self.evaluator = HeldOutEvaluator(self.runs, self.state.stores, sets, self.process)
        return self

    async def begin(self, plan: Plan, run_id: str = RUN) -> None:
        """Start a Run and stop it, so that Versions can be published."""
        self.bundle = linear_bundle(self.folder / run_id)
        await start(self.runs, self.bundle, plan, run_id)
        await self.runs.command(Command(command_id=f"stop-{run_id}", run_id=run_id, what=Stop()))

    async def close(self) -> None:
        """Stop in the order of a coordinator."""
        await self.evaluator.stop()
        await self.runs.stop()

    async def publish(self, flat: Float32s, run_id: str = RUN) -> None:
        """Publish the next Version."""
        newest = await self.state.stores.runs.newest_version(run_id)
        version, data = next_version(newest, flat, self.bundle, PUBLISHER)
        for ref, piece in cut(data):
            await self.runs.put_chunk(ref.sha256, piece)
        await self.runs.publish_version(version, 0)

    async def publish_during_a_stop(self, flat: Float32s) -> None:
        """Publish the next Version, and return in the middle of its job."""
        self.signal(signal.SIGSTOP)
        await self.publish(flat)
        await asyncio.sleep(2 * SETTLE_S)

    async def page(
        self, num: int, from_version: int = 0, *, good: bool = False, run_id: str = RUN
    ) -> tuple[VersionEvaluation, ...]:
        """Return the evaluations of the Run once there are ``num``, and with ``good`` once the last has no problem."""
        page: tuple[VersionEvaluation, ...] = ()
        for _ in range(int(WAIT_S / LOOK_S)):
            page = await self.runs.evaluations(run_id, from_version)
            if len(page) >= num and not (good and page[-1].problem):
                return page
            await asyncio.sleep(LOOK_S)
        raise AssertionError(f"got {page}, expected {num} evaluations")

    def signal(self, number: int) -> int:
        """Send a signal to the evaluating process. Return its id."""
        pid = self.process.pid
        assert pid is not None, "there is a process"
        os.kill(pid, number)
        return pid
