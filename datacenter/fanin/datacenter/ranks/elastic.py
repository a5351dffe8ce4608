"""Elastic ranks: a rank's side of torchrun, with which a job can be stopped, killed and restarted.

    end_with_parent()                            # end this rank when its torchrun agent is gone
    with process_group() as (rank, world_size):  # a new group in each attempt
        with StopSignal() as stop:               # turn SIGTERM into a flag
            ...
            if stop.agreed():                    # after each step, on all ranks
                checkpoints.save(progress)       # then finish, and exit with status 0

torchrun restarts all ranks in two cases. If a rank or a machine is lost, the restart uses one of the allowed restarts.
If a machine joins, the restart is free. After every restart the ranks resume from the last complete checkpoint. The
remaining case is a rank that hangs: it neither ends nor receives a signal. The watchdog handles it
(fanin.datacenter.watch.watchdog).
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from fanin.datacenter.observers.events import Event, StepSettled
from fanin.datacenter.observers.observer import Interrupt
from fanin.datacenter.ranks.devices import BACKENDS, device_type

TIMEOUT_S: Final = 120.0
"""Seconds after which the other ranks notice a rank that hangs. They notice a dead rank at once."""
PARENT_POLL_S: Final = 0.5
RESTARTS: Final = "TORCHELASTIC_RESTART_COUNT"
PARENT: Final = "FANIN_PARENT"
"""Environment variable with the process id of the agent's parent. The parent may be gone before the agent, which first
has to import torch, can ask for it."""
OTHER_JOB: Final = 87
"""Exit status of an agent whose endpoint is used by another job."""
LOST: Final = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting", "caused pair closure")
"""Texts in gloo's errors if another rank is gone or hangs. torch has no class for them."""
RECORDER: Final = "TORCH_FR_BUFFER_SIZE"
RECORDER_SIZE: Final = "256"
"""Collectives that torch's flight recorder keeps for the watchdog, in C++, at about 100 bytes each."""


def attempt() -> int:
    """Return how often torchrun has restarted these ranks; on several machines, the first rank's count."""
    return int(os.environ.get(RESTARTS, "0"))


@contextmanager
def process_group(timeout_s: float = TIMEOUT_S, device: str = "auto") -> Iterator[tuple[int, int]]:
    """Open the process group that torchrun's environment describes.

    Args:
        timeout_s: Seconds after which an operation fails.
        device: ``cpu``, ``cuda``, or ``auto`` for GPUs if the machine has any.

    Yields:
        (rank, world size).

    Raises:
        InvalidInput: The machine has fewer GPUs than ranks.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout, backend = timedelta(seconds=timeout_s), BACKENDS[device_type(device)]
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    os.environ.setdefault(RECORDER, RECORDER_SIZE)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=rank == 0 and not shared, timeout=timeout, wait_for_workers=False
    )
    if not shared and rank == 0:
        store.set(RESTARTS, str(attempt()))
    elif not shared:
        # Each machine's agent has its own count, which starts at 0 on a machine that joined late. The ranks need one
        # name for an attempt.
        os.environ[RESTARTS] = store.get(RESTARTS).decode()
    # torchrun's agent keeps one store for all attempts, so it still has the addresses of dead ranks. Each attempt
    # therefore uses its own prefix. A store that the first rank hosts is new in each attempt.
    named = PrefixStore(f"attempt-{attempt()}", store)
    dist.init_process_group(backend, store=named, rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield rank, world_size
    finally:
        dist.destroy_process_group()


@contextmanager
def group_of_one(*, needed: bool, device: str = "auto") -> Iterator[None]:
    """Open a process group of this process alone if one is ``needed`` and none is open."""
    if not needed or dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(BACKENDS[device_type(device)], store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error means that another rank is gone or hangs. It does not describe this rank's state."""
    text = str(error)
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(each in text for each in LOST))


def end_with_parent(end: Callable[[], None] = lambda: os._exit(1)) -> None:
    """Call ``end`` as soon as the parent process is gone, from a background thread.

    Without this, a rank would continue to train unnoticed after its agent was killed. The parent of a forked rank is
    its agent, not the process that forked it.
    """
    agent = multiprocessing.parent_process()
    parent = int(os.environ.get(PARENT) or os.getppid())

    def watch() -> None:
        if agent is not None:
            agent.join()
        else:
            while os.getppid() == parent:
                time.sleep(PARENT_POLL_S)
        end()

    threading.Thread(target=watch, name="parent", daemon=True).start()


class StopSignal:
    """SIGTERM as a flag that all ranks share: a signal to any rank stops all of them.

    It is an observer, whose decision is to pause. A loop of your own calls ``agreed`` after each step instead.

    Enter it in the main thread, after the process group is open. A rank that ignored the signal while it waits for
    others to join would block torchrun. Exit it after the last write, because the signal may arrive more than once.
    """

    def __init__(self) -> None:
        self._requested = False
        self._previous: object = None

    def __enter__(self) -> "StopSignal":
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        if callable(self._previous) or isinstance(self._previous, int):
            signal.signal(signal.SIGTERM, self._previous)

    def begin(self) -> None:
        """Install the signal handler. ``__exit__`` removes it, possibly in another function than this call."""
        self._previous = signal.signal(signal.SIGTERM, self._handle)

    @property
    def requested(self) -> bool:
        """Whether this rank itself has received the signal."""
        return self._requested

    def on(self, event: Event) -> Interrupt | None:
        """Interrupt the training after the current step if this rank has received the signal."""
        return Interrupt(reason="SIGTERM") if self._requested and isinstance(event, StepSettled) else None

    def agreed(self) -> bool:
        """Return whether any rank has received the signal. A collective: all ranks get the same result."""
        flag = torch.tensor(int(self._requested))
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
