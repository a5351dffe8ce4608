"""The main function of the child process: it runs a strategy until its parent closes the pipe.

The pipe is the last argument, a file descriptor. Two processes of one user on one machine share it, so small records
travel as pickles. When the parent ends, however it ends, the child ends too: at the next message, or because it is
killed. Without work it ends after ``IDLE_S``, unless it holds a state that is not saved.
"""

import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from fanin.edge.tensors import Float32s
from fanin.server.aggregation.rules import Reply, StrategyTask
from fanin.server.strategies.process import Answer, CallFailure, FromChild, Next, StrategySettings, ToChild, as_bytes

IDLE_S: Final = 60.0
"""Seconds without work after which the child ends. Its libraries take 70 MB."""
WATCH_S: Final = 2.0


def main(fd: int) -> None:
    """Serve the pipe ``fd``."""
    pipe: Connection[FromChild, ToChild] = Connection(fd)
    threading.Thread(target=_end_with, args=(os.getppid(),), name="fanin strategy parent", daemon=True).start()
    try:
        _serve(pipe)
    except (EOFError, OSError):
        # The parent has closed the pipe.
        return


def _serve(pipe: "Connection[FromChild, ToChild]") -> None:
    settings = pipe.recv()
    assert isinstance(settings, StrategySettings), "the settings come first"
    try:
        # Imported here, so that a missing flwr is an answer.
        from fanin.server.strategies.calls import StrategyCalls, StrategyFailed
    except ModuleNotFoundError as exc:
        _receive(pipe)
        pipe.send(CallFailure(message=f"strategy {settings.name}: {exc}; pip install 'fanin[flower]'", trace=""))
        return
    calls = None
    while (calls is not None and calls.is_needed) or pipe.poll(IDLE_S):
        task, base = _receive(pipe)
        try:
            calls = StrategyCalls(settings) if calls is None else calls
            # Closed, so that a strategy that keeps the iterator cannot read from the pipe later.
            with closing(_replies(pipe, task)) as replies:
                result = calls.run(task, base, replies)
        except StrategyFailed as exc:
            pipe.send(CallFailure(message=str(exc), trace=exc.trace))
            continue
        pipe.send(Answer(metrics=dict(result.metrics), unsaved=result.unsaved))
        pipe.send_bytes(as_bytes(result.parameters))
        pipe.send_bytes(result.state)


def _receive(pipe: "Connection[FromChild, ToChild]") -> tuple[StrategyTask, Float32s]:
    task = pipe.recv()
    assert isinstance(task, StrategyTask), "a task follows the settings"
    return task, np.frombuffer(pipe.recv_bytes(), np.float32)


def _replies(pipe: "Connection[FromChild, ToChild]", task: StrategyTask) -> Generator[Reply, None, None]:
    for _ in range(task.num_replies):
        pipe.send(Next())
        metrics = pipe.recv()
        assert isinstance(metrics, dict), "a reply begins with its metrics"
        yield Reply(parameters=np.frombuffer(pipe.recv_bytes(), np.float32), metrics=metrics)


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, also inside the strategy."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[-1]))
