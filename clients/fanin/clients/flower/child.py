"""The main function of the child process: it runs a Flower app until its parent closes the pipe.

    parent                      child
    FlowerSettings   ------>    import the app
                     <------    AppReady | AppFailed
    FlowerTask       ------>    run it
                     <------    FlowerReply | AppFailed

The pipe is the last argument, a file descriptor. Two processes of one user on one machine share it, so the records
travel as pickles. A thread reads it: when the parent ends, however it ends, the child ends too, even inside the app.
"""

import os
import queue
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from fanin.clients.flower.task import (
    Answer,
    AppFailed,
    AppReady,
    FlowerReply,
    FlowerSettings,
    FlowerTask,
    Words,
)


def main(fd: int) -> None:
    """Serve the pipe ``fd``."""
    pipe: Connection[Answer, Words] = Connection(fd)
    inbox: queue.SimpleQueue[Words] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, inbox), name="fanin flower pipe", daemon=True).start()
    settings = inbox.get()
    assert isinstance(settings, FlowerSettings), "the settings come first"
    try:
        # Imported here, so that a missing flwr is an answer.
        from fanin.clients.flower.app import FlowerApp

        app = FlowerApp(settings)
    except ModuleNotFoundError as exc:
        pipe.send(AppFailed(f"{exc}; pip install 'fanin[flower]'", code="FN-0025"))
        return
    except AppFailed as exc:
        pipe.send(exc)
        return
    pipe.send(AppReady(name=app.name, warnings=app.warnings))
    while True:
        task = inbox.get()
        assert isinstance(task, FlowerTask), "a task follows the settings"
        pipe.send(_answer(lambda task=task: app.run(task, lambda: True)))  # type: ignore[misc]


def _answer(run: Callable[[], FlowerReply]) -> FlowerReply | AppFailed:
    try:
        return run()
    except AppFailed as exc:
        return exc


def _read(pipe: "Connection[Answer, Words]", inbox: "queue.SimpleQueue[Words]") -> None:
    while True:
        try:
            inbox.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[-1]))
