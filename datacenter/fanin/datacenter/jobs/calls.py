"""Calls to the caller of ``train`` between two steps: the step that has ended, and whether the training continues.

    first rank: CallAfterStep -- StepEnded, JSON --> launcher: a thread calls on_step and should_continue
                              <-- CONTINUE or STOP --

The training waits for the answer, so the caller decides between two steps also if the ranks are processes of their own.
The launcher listens on loopback. Port and key are in a file of the job's folder that only its user can read. The first
rank of a restarted job connects again. Several machines have several callers, so such a job has no calls.
"""

import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Final

import numpy as np

from fanin.datacenter.config.records import record_of, row_of
from fanin.datacenter.files.jobfiles import CALLER_FILE
from fanin.datacenter.jobs.torchrun import LOOPBACK
from fanin.datacenter.observers.events import Event, StepEnded, StepSettled
from fanin.datacenter.observers.observer import Interrupt
from fanin.protos.errors import InvalidInput

LOGGER: Final = logging.getLogger(__name__)
CONTINUE: Final = b"1"
STOP: Final = b"0"
END: Final = b""
"""Message that ends the thread of the launcher."""
KEY_BYTES: Final = 32
Ask = Callable[[StepEnded], bool]
"""A function that receives each step, and returns whether the training continues."""


class StepCalls:
    """The functions of the caller, as one function that never raises.

    Attributes:
        error: The error of a function, which has ended the training; None if there is none.
    """

    def __init__(
        self, should_continue: Callable[[], bool] | None = None, on_step: Callable[[StepEnded], None] | None = None
    ) -> None:
        self.error: BaseException | None = None
        self._should_continue = should_continue
        self._on_step = on_step

    def __bool__(self) -> bool:
        return self._should_continue is not None or self._on_step is not None

    def __call__(self, step: StepEnded) -> bool:
        """Report a step, and return whether the training continues."""
        try:
            if self._on_step is not None:
                self._on_step(step)
            goes_on: object = True if self._should_continue is None else self._should_continue()
        except (Exception, SystemExit) as exc:  # Any error: the code is not fanin's. It may even call sys.exit.
            LOGGER.exception("a function of the caller has failed; the training ends after step %d", step.step)
            self.error = exc
            return False
        if not isinstance(goes_on, bool | np.bool_):
            # None would end the job: a function that forgets its return statement.
            self.error = InvalidInput(
                f"should_continue: returned {type(goes_on).__name__} after step {step.step}, expected True or False; "
                "return True to continue",
                code="FN-1359",
            )
            return False
        return bool(goes_on)


class CallAfterStep:
    """An observer that calls a function when a step has settled, and interrupts the training if it returns False."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._step: StepEnded | None = None

    def on(self, event: Event) -> Interrupt | None:
        """See TrainingObserver."""
        match event:
            case StepEnded():
                self._step = event
            case StepSettled() if self._step is not None and not self._ask(self._step):
                return Interrupt(reason="the caller")
        return None


@contextmanager
def answered(ask: Ask, folder: Path) -> Iterator[None]:
    """Answer the first rank of the job in a folder, from a thread."""
    key = secrets.token_bytes(KEY_BYTES)
    with Listener((LOOPBACK, 0), authkey=key) as listener:
        address, path = listener.address, folder / CALLER_FILE
        assert isinstance(address, tuple), "an address of the internet"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{address[1]} {key.hex()}")
        thread = threading.Thread(target=_answer, args=(listener, ask), name="caller", daemon=True)
        thread.start()
        try:
            yield
        finally:
            path.unlink()
            with Client(address, authkey=key) as connection:
                connection.send_bytes(END)
            thread.join()


def _answer(listener: Listener, ask: Ask) -> None:
    while True:
        try:
            with listener.accept() as connection:
                while row := connection.recv_bytes():
                    step = record_of(StepEnded, json.loads(row), "the first rank")
                    connection.send_bytes(CONTINUE if ask(step) else STOP)
            return
        except (AuthenticationError, EOFError, OSError):
            # The first rank has ended; that of the next attempt connects. Or it was no rank.
            continue


def caller_of(folder: Path) -> Ask:
    """Return the function that asks the launcher of the job in a folder."""
    port, key = (folder / CALLER_FILE).read_text(encoding="utf-8").split()
    connection = Client((LOOPBACK, int(port)), authkey=bytes.fromhex(key))

    def ask(step: StepEnded) -> bool:
        connection.send_bytes(json.dumps(row_of(step)).encode())
        return connection.recv_bytes() == CONTINUE

    return ask
