"""What a rank does so that its job can be stopped, killed and started again: its side of torchrun.

    end_with_parent()                            # no rank outlives its agent
    with process_group() as (rank, world_size):  # anew in each attempt
        with Stop() as stop:
            ...
            if stop.agreed():                    # after a step, on all ranks alike
                checkpoints.save(progress)       # and then finish, and leave with status 0

torchrun starts all ranks again when one is gone, or a whole machine, with what is left of its restarts, and when a
machine comes, which takes none; each time they go on from the last whole checkpoint. Only a rank that is neither told
nor killed needs more: the watchdog (fanin.datacenter.watch.watchdog).
"""

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

from fanin.datacenter.jobs.devices import BACKENDS, device_type

TIMEOUT_S: Final = 120.0
"""A rank that hangs is found by its peers after this; a dead one at once."""
PARENT_POLL_S: Final = 0.5
RESTARTS: Final = "TORCHELASTIC_RESTART_COUNT"
PARENT: Final = "FANIN_PARENT"
"""The process that started this one: it may be gone by the time that this one has imported torch, and can look."""
MEETING: Final = "fanin"
"""How machines meet, to torchrun (fanin.datacenter.jobs.agent)."""
OTHER_JOB: Final = 87
"""The agent's status where machines of another job meet."""
RECORDER: Final = "TORCH_FR_BUFFER_SIZE"
RECORDED: Final = "256"
"""Collectives that torch remembers, for the watchdog; it asks for them in C++, a record of some 100 bytes each."""


def attempt() -> int:
    """How often torchrun has started these ranks again; on several machines, as the first rank's has counted."""
    return int(os.environ.get(RESTARTS, "0"))


@contextmanager
def process_group(timeout_s: float = TIMEOUT_S, device: str = "auto") -> Iterator[tuple[int, int]]:
    """(rank, world size) of the group that torchrun's environment describes.

    ``device``: ``cpu``, ``cuda``, or ``auto`` for GPUs where there are some. Raises InvalidInput if they are too few.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout, backend = timedelta(seconds=timeout_s), BACKENDS[device_type(device)]
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    os.environ.setdefault(RECORDER, RECORDED)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=rank == 0 and not shared, timeout=timeout, wait_for_workers=False
    )
    if not shared and rank == 0:
        store.set(RESTARTS, str(attempt()))
    elif not shared:
        # Each machine's agent counts by itself, one that came later from 0; but ranks must name the attempt alike.
        os.environ[RESTARTS] = store.get(RESTARTS).decode()
    # torchrun's agent keeps one store for all attempts, and the addresses in it are those of dead ranks: each attempt
    # writes under its own name. Where the first rank keeps it, it is new.
    named = PrefixStore(f"attempt-{attempt()}", store)
    dist.init_process_group(backend, store=named, rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield rank, world_size
    finally:
        dist.destroy_process_group()


@contextmanager
def group_of_one(*, wanted: bool, device: str = "auto") -> Iterator[None]:
    """A process group of this process by itself, where one is ``wanted`` and none stands."""
    if not wanted or dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(BACKENDS[device_type(device)], store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def end_with_parent(end: Callable[[], None] = lambda: os._exit(1)) -> None:
    """``end``, at once, when torchrun's agent is gone: a rank whose agent was killed would train on unseen."""
    parent = int(os.environ.get(PARENT) or os.getppid())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        end()

    threading.Thread(target=watch, name="parent", daemon=True).start()


class Stop:
    """Takes SIGTERM while it is entered, which is for the main thread; any one rank's is for all.

    To be entered once the process group stands: a rank that ignores the signal while it waits for others to come
    would keep torchrun waiting too. And to be left when nothing is written any more: the signal may come again.
    """

    def __init__(self) -> None:
        self._asked = False
        self._agreed = False
        self._before: object = None

    def __enter__(self) -> "Stop":
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        if callable(self._before) or isinstance(self._before, int):
            signal.signal(signal.SIGTERM, self._before)

    def begin(self) -> None:
        """Take the signal from now on; for whoever exits what another begins."""
        self._before = signal.signal(signal.SIGTERM, self._take)

    @property
    def asked(self) -> bool:
        """Whether this rank itself was told to stop."""
        return self._asked

    @property
    def stopped(self) -> bool:
        """Whether the ranks have agreed to stop."""
        return self._agreed

    def agreed(self) -> bool:
        """Whether any rank was told to stop. A collective: all ranks come to the same, at the same step."""
        told = torch.tensor(int(self._asked))
        if dist.is_initialized():
            dist.all_reduce(told, dist.ReduceOp.MAX)
        self._agreed = bool(told)
        return self._agreed

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
