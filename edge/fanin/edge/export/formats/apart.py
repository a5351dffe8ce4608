"""A call in a fork of this process, to build several graph formats in parallel.

A fork does not need to serialize an App, which may be any code. It is used only if it is safe: on Linux, in a process
with one Python thread, without CUDA, and before the TFLite converter loads its thread pools.
"""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Final, TypeVar, cast

import torch

T = TypeVar("T")
UNSAFE: Final = frozenset({"jax", "litert_torch"})
"""Libraries whose threads a fork would lack."""


@contextmanager
def apart(call: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Begin a call in a fork. Yield a function that waits for its result.

    If the fork cannot be, or ends without a result, the function makes the call in this process. So an error of the
    call is raised as if there were no fork. The result must be picklable.
    """
    if not _may_fork():
        yield call
        return
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(call, sender), daemon=True)
    process.start()
    sender.close()
    try:
        yield partial(_received, call, receiver)
    finally:
        process.kill()
        process.join()
        receiver.close()


def _may_fork() -> bool:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    alone = threading.active_count() == 1 and not UNSAFE & sys.modules.keys()
    return cores > 1 and alone and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _send(call: Callable[[], object], sender: Connection) -> None:
    # The threads of the parent do not exist in a fork.
    torch.set_num_threads(1)
    # Any error: the parent repeats the call, and raises it.
    with suppress(Exception):
        sender.send(call())
    sys.stdout.flush()
    sys.stderr.flush()
    # The converter's threads may outlive the static objects that they use.
    os._exit(0)


def _received(call: Callable[[], T], receiver: Connection) -> T:
    try:
        return cast("T", receiver.recv())
    except EOFError:
        return call()
