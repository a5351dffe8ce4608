"""A short training job with a fault, as the program of one rank and as scenes of forked ranks.

    python -m torch.distributed.run ... tests/parallel/faults.py rank FOLDER FAULT
    python tests/parallel/faults.py scenes FOLDER NAME...

A FAULT is ``KIND-RANK-STEP``, or ``none-0-0``. It happens in the first attempt, after STEP steps. The kinds:

- kill, term, freeze: the rank receives SIGKILL, SIGTERM or SIGSTOP
- pause: the rank waits for a second
- hang, inside, behind: a call never returns, between two steps, within a layer, or in the layer's backward pass

The scenes write their results to scenes.json.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from parallel.cells import Cell
from parallel.checkpoints import train
from parallel.matrix import CPU, model_of, parallel_of, training_of

from fanin.datacenter.checkpoints.checkpoint import Checkpoints
from fanin.datacenter.checkpoints.progress import Progress, latest
from fanin.datacenter.parallel.build import build
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.parallel.torch_messages import silence_expected_messages
from fanin.datacenter.ranks.devices import build_mesh
from fanin.datacenter.ranks.elastic import StopSignal, attempt, end_with_parent, process_group
from fanin.datacenter.watch.hangs import explain
from fanin.datacenter.watch.watchdog import Watchdog

NUM_STEPS, EVERY, NUM_RANKS = 8, 2, 4
PIPELINED = Cell(mesh="pp=2,dp_shard=2", schedule="1F1B", microbatches=2, clip=0.5)
SPLIT = Cell(mesh="dp_shard=2,tp=2", clip=0.5)
TIMEOUT_S = 6.0
"""Longer than any step takes on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of one rank at one step."""

    kind: str
    rank: int
    step: int

    @classmethod
    def parse(cls, text: str) -> "Fault":
        kind, rank, step = text.split("-")
        return cls(kind=kind, rank=int(rank), step=int(step))

    def strike(self, rank: int, step: int) -> None:
        """Cause the fault, if it is due on this rank at this step."""
        if (rank, step) != (self.rank, self.step) or attempt() > 0:
            return
        if self.kind == "hang":
            stuck()
        if self.kind == "pause":
            time.sleep(1.0)
        number = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "freeze": signal.SIGSTOP}.get(self.kind)
        if number is not None:
            os.kill(os.getpid(), number)

    def plant(self, engine: Engine, rank: int) -> None:
        """Attach the fault to a layer's forward or backward pass."""
        if rank != self.rank or self.kind not in ("inside", "behind"):
            return
        calls = count()

        def strike(_module: object, _inputs: object, output: torch.Tensor) -> None:
            if next(calls) == self.step:
                if self.kind == "inside":
                    stuck()
                output.register_hook(lambda _: stuck())

        engine.parts[0].get_submodule("layers.1.attention.out").register_forward_hook(strike)


def stuck() -> None:
    """Block for longer than every timeout."""
    time.sleep(600.0)


def rank_program(folder: Path, fault: Fault) -> int:
    """Train all steps from the last checkpoint on. Write each loss, to its last bit, to a file of this attempt."""
    torch.set_num_threads(1)
    silence_expected_messages()
    with process_group(10 * TIMEOUT_S) as (rank, world_size):
        cell = SPLIT if fault.kind in ("inside", "behind") else PIPELINED
        mesh = build_mesh(cell.shape, world_size)
        engine = Engine(build(model_of(cell), parallel_of(cell), training_of(cell), mesh, CPU))
        fault.plant(engine, rank)
        trace = folder / f"losses-{time.time_ns()}.txt"
        with (
            StopSignal() as stop,
            Watchdog(engine, folder, TIMEOUT_S) as watchdog,
            Checkpoints(folder, engine) as checkpoints,
        ):
            progress = checkpoints.load() or Progress()
            for loss in train(engine, progress.step, NUM_STEPS):
                progress = replace(progress, step=progress.step + 1)
                watchdog.beat(progress.step)
                if rank == 0:
                    with trace.open("a") as file:
                        file.write(f"{progress.step} {loss.hex()}\n")
                stopped = stop.agreed()
                if stopped or progress.step % EVERY == 0:
                    checkpoints.save(progress)
                if stopped:
                    break
                fault.strike(rank, progress.step)
    return 0


def run_rank(folder: Path, fault: Fault, rank: int, port: int) -> None:
    """Run one rank as torchrun would start it."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os._exit(rank_program(folder, fault))


def run_machine_rank(folder: Path, rank: int, port: int) -> None:
    """Run a rank of one of two machines, whose agents have counted 3 and 0 attempts.

    They meet without an agent's store.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RESTART_COUNT": str(3 - 3 * rank)}
    with process_group(TIMEOUT_S):
        total = torch.ones(1)
        dist.all_reduce(total)
        (folder / f"attempt-of-{rank}").write_text(str(attempt() if int(total) == 2 else -1))
    os._exit(0)


def common_attempt(folder: Path) -> dict[str, object]:
    """Return the number that the ranks of each of two machines give to their common attempt."""
    folder.mkdir()
    fork = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    ranks = [fork.Process(target=run_machine_rank, args=(folder, rank, port)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return {
        "statuses": [process.exitcode for process in ranks],
        "attempts": [int((folder / f"attempt-of-{rank}").read_text()) for rank in range(2)],
    }


def keep_store(folder: Path) -> None:
    """Keep the store that an agent would keep, until the parent ends."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (folder / "port.new").write_text(str(store.port))
    (folder / "port.new").rename(folder / "port")
    end_with_parent()
    time.sleep(600.0)


class Scene:
    """Four ranks, a fault, and its result."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "port").unlink(missing_ok=True)
        fork = multiprocessing.get_context("fork")
        self._folder, self._fault = folder, Fault.parse(name)
        self._agent = fork.Process(target=keep_store, args=(folder,))
        self._agent.start()
        while not (folder / "port").exists():
            time.sleep(0.01)
        port = int((folder / "port").read_text())
        self._ranks = [
            fork.Process(target=run_rank, args=(folder, self._fault, rank, port)) for rank in range(NUM_RANKS)
        ]
        for process in self._ranks:
            process.start()

    def end(self) -> dict[str, object]:
        """Return the statuses, the step of the last checkpoint and the explanation of a hang. Kill a frozen rank."""
        for rank, process in enumerate(self._ranks):
            if rank != self._fault.rank:
                process.join()
        if self._fault.kind == "freeze":
            self._ranks[self._fault.rank].kill()
        self._ranks[self._fault.rank].join()
        self._agent.kill()
        self._agent.join()
        progress = latest(self._folder)
        return {
            "statuses": [process.exitcode for process in self._ranks],
            "step": 0 if progress is None else progress.step,
            "told": explain(self._folder),
        }


SCENES = {
    "frozen": ("frozen", "freeze-1-3"),
    "inside": ("inside", "inside-3-2"),
    "hung": ("hung", "hang-2-3"),
    "behind": ("behind", "behind-1-2"),
    "whole": ("whole", "none-0-0"),
    "stopped": ("stopped", "term-3-3"),
    "resumed after a stop": ("stopped", "none-0-0"),
    "killed": ("killed", "kill-1-5"),
    "resumed after a kill": ("killed", "none-0-0"),
}
"""Scene name to folder and fault. Scenes that hang end together with the others, because they only wait."""
HANGING = ("frozen", "inside", "hung", "behind")


def play(folder: Path, names: Sequence[str]) -> dict[str, dict[str, object]]:
    """Play the named scenes, and return their results."""
    hanging, results = {}, {}
    for name, (subfolder, fault) in SCENES.items():
        if name in names:
            scene = Scene(folder / subfolder, fault)
            if name in HANGING:
                hanging[name] = scene
            else:
                results[name] = scene.end()
    if "met" in names:
        results["met"] = common_attempt(folder / "met")
    return results | {name: scene.end() for name, scene in hanging.items()}


def main(arguments: Sequence[str]) -> int:
    """Run one rank, or the named scenes."""
    folder = Path(arguments[1])
    if arguments[0] == "rank":
        end_with_parent()
        return rank_program(folder, Fault.parse(arguments[2]))
    (folder / "scenes.json").write_text(json.dumps(play(folder, arguments[2:]), indent=1))
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
