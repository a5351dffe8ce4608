"""The child process that runs the strategy of one Run, and the strategies that a coordinator runs.

A strategy may take long, need much memory or crash, and flwr is no dependency of the coordinator. So the child starts
on demand, is killed if it does not answer, and ends by itself after a minute without work.

    parent                                    child
    StrategySettings               ------>    import the strategy
    StrategyTask, parameters       ------>    configure, restore the state
                                   <------    Next
    Metrics, parameters            ------>    read the reply, for each Update
                                   <------    Answer, parameters, state | CallFailure
"""

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import numpy as np

from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidInput, InvalidPlan, Unavailable
from fanin.protos.plans import Plan
from fanin.protos.plans.entries import Option
from fanin.protos.plans.flower import STRATEGY_FORM, is_strategy
from fanin.server.aggregation.rules import Metrics, Reply, StrategyResult, StrategyTask

LOG: Final = logging.getLogger("fanin.server.strategies")
ANSWER_S: Final = 600.0
"""Seconds until a strategy without an answer counts as blocked."""
POLL_S: Final = 0.5
FLOWER: Final = "flwr.serverapp.strategy:"
"""Strategies of flwr are in a package that the operator installed, so a Plan may name them. It may name no attribute of
an attribute: a module of flwr has those of the standard library, such as ``open``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySettings:
    """A strategy and how it is called.

    Attributes:
        name: ``package.module:name`` or ``path/to/file.py:name``, as in the Plan.
        options: The arguments of its constructor.
        is_pure: Whether the Plan declares it pure. Its state must be saved then.
        streams: Whether it receives an iterator of replies.
        num_nodes: Number of nodes that it can sample.
        place: The folder that modules are imported from, as an error names it.
    """

    name: str
    options: Mapping[str, Option]
    is_pure: bool
    streams: bool
    num_nodes: int
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """The child reads the next reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a task. Parameters and state follow as bytes."""

    metrics: Mapping[str, float]
    unsaved: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailure:
    """The strategy raised an error, or returned an invalid result."""

    message: str
    trace: str


ToChild = StrategySettings | StrategyTask | Metrics
FromChild = Next | Answer | CallFailure


class StrategyProcess:
    """The child process of one Run. See StrategyRunner.

    Args:
        settings: The strategy.
        folder: The working directory, which modules are imported from.
        answer_s: Seconds until a strategy without an answer counts as blocked.

    Attributes:
        settings: The strategy.
    """

    def __init__(self, settings: StrategySettings, folder: Path, answer_s: float = ANSWER_S) -> None:
        self.settings = settings
        self._folder = folder
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[ToChild, FromChild] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The id of the process, None if there is none now."""
        return None if self._child is None else self._child.pid

    def run(self, task: StrategyTask, replies: Iterable[Reply]) -> StrategyResult:
        """Run a task. See StrategyRunner.

        Raises:
            InvalidPlan: See StrategyRunner.
            Unavailable: ``close`` was called.
        """
        with self._lock:
            try:
                return self._exchange(task, iter(replies))
            except (EOFError, OSError) as exc:
                raise self._crash() from exc
            except InvalidPlan:
                raise
            except BaseException:
                # Such as a damaged Update: the child would wait for the reply.
                self._end()
                raise

    def close(self) -> None:
        """Kill the child, also in the middle of a task."""
        self._is_closed = True
        if self._child is not None:
            self._child.kill()
        with self._lock:
            self._end()

    def _exchange(self, task: StrategyTask, replies: Iterator[Reply]) -> StrategyResult:
        pipe, message = self._begin(task)
        while True:
            match message:
                case Next():
                    reply = next(replies)
                    pipe.send(reply.metrics)
                    pipe.send_bytes(as_bytes(reply.parameters))
                case Answer(metrics=metrics, unsaved=unsaved):
                    parameters = np.frombuffer(pipe.recv_bytes(), np.float32)
                    return StrategyResult(
                        parameters=parameters, state=pipe.recv_bytes(), metrics=metrics, unsaved=unsaved
                    )
                case CallFailure(message=text, trace=trace):
                    if trace:
                        LOG.error("%s\n%s", text, trace.rstrip())
                    raise InvalidPlan(text, code="FN-0920")
            message = self._receive(pipe)

    def _begin(self, task: StrategyTask) -> "tuple[Connection[ToChild, FromChild], FromChild]":
        """Send a task. Return the pipe, and the first message of the child."""
        was_open = self._child is not None
        try:
            pipe = self._open()
            # The arrays cross the pipe as they are: a pickle would copy them.
            pipe.send(replace(task, parameters=np.empty(0, np.float32)))
            pipe.send_bytes(as_bytes(task.parameters))
            return pipe, self._receive(pipe)
        except (EOFError, OSError):
            if not was_open or self._is_closed:
                raise
            # It was ending at this moment, for example after a minute without work. No reply was read.
            self._end()
            return self._begin(task)

    def _open(self) -> "Connection[ToChild, FromChild]":
        if self._is_closed:
            raise Unavailable("the coordinator is stopping", code="FN-0923")
        if self._child is None or self._pipe is None or self._child.poll() is not None:
            self._end()
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", "fanin.server.strategies.child", str(theirs.fileno())]
                # In a session of its own: Ctrl-C in a terminal must reach only the coordinator.
                self._child = subprocess.Popen(
                    command,
                    cwd=self._folder,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    start_new_session=True,
                )
            self._pipe = Connection(ours.detach())
            self._pipe.send(self.settings)
        return self._pipe

    def _receive(self, pipe: "Connection[ToChild, FromChild]") -> FromChild:
        deadline = time.monotonic() + self._answer_s
        while not pipe.poll(POLL_S):
            if self._is_closed:
                raise EOFError
            if time.monotonic() >= deadline:
                self._end()
                raise InvalidPlan(
                    f"strategy {self.settings.name}: no answer within {self._answer_s:g} s, and its process was "
                    "killed; find out where it waits, for example for more nodes than cohort.buffer",
                    code="FN-0921",
                )
        return pipe.recv()

    def _crash(self) -> InvalidPlan | Unavailable:
        status: int | None = None
        if self._child is not None:
            with suppress(subprocess.TimeoutExpired):
                status = self._child.wait(5.0)
        self._end()
        if self._is_closed:
            return Unavailable("the coordinator is stopping", code="FN-0923")
        return InvalidPlan(
            f"strategy {self.settings.name}: its process ended with status {status}, expected a result; see the "
            "coordinator's log. Status -9 may be a lack of memory",
            code="FN-0921",
        )

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._child = self._pipe = None


class Strategies:
    """The strategies that a coordinator runs, each Run with a process of its own. See StrategySource.

    Args:
        folder: The folder that modules are imported from.
        allowed: The strategies that a Plan may name besides those of flwr; None for any.
        place: The folder as an error names it, if the caller of a coordinator may not know its path.
    """

    def __init__(self, folder: Path | None = None, allowed: Collection[str] | None = (), *, place: str = "") -> None:
        self._folder = folder or Path.cwd()
        self._place = place or str(self._folder)
        self._allowed = allowed
        self._processes: dict[str, StrategyProcess] = {}

    def runner(self, run_id: str, plan: Plan) -> StrategyProcess:
        """Return the process of a Run. See StrategySource."""
        flower = plan.flower
        is_flowers = flower.strategy.startswith(FLOWER) and flower.strategy.removeprefix(FLOWER).isidentifier()
        if not is_flowers and self._allowed is not None and flower.strategy not in self._allowed:
            raise _refusal(flower.strategy, self._allowed)
        settings = StrategySettings(
            name=flower.strategy,
            options=dict(flower.strategy_options),
            is_pure=flower.strategy_is_pure,
            streams=flower.strategy_streams,
            num_nodes=plan.cohort.buffer,
            place=self._place,
        )
        process = self._processes.get(run_id)
        if process is None or process.settings != settings:
            # A Run that was refused may be started again with another Plan.
            if process is not None:
                process.close()
            process = self._processes[run_id] = StrategyProcess(settings, self._folder)
        return process

    def close(self) -> None:
        """Kill all processes. The next call of ``runner`` creates others."""
        processes, self._processes = self._processes, {}
        for process in processes.values():
            process.close()


def _refusal(name: str, allowed: Collection[str]) -> InvalidPlan:
    near = get_close_matches(name, allowed, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return InvalidPlan(
        f"plan: flower.strategy: got {name!r}, expected one of flwr.serverapp.strategy or of {sorted(allowed)}, which "
        f"may run here{hint}. The operator allows it with --strategy {name}, on fanin serve and fanin verify",
        code="FN-0919",
    )


def checked_strategies(names: Sequence[str]) -> tuple[str, ...]:
    """Return the strategies of ``--strategy``. Raises InvalidInput for a name of another form."""
    for name in names:
        if not name or not is_strategy(name):
            raise InvalidInput(f"--strategy: got {name!r}, expected {STRATEGY_FORM}; correct it", code="FN-0919")
    return tuple(names)


def as_bytes(values: Float32s) -> memoryview:
    """Return the bytes of parameters for the pipe, without a copy."""
    return memoryview(np.ascontiguousarray(values).view(np.uint8).data)
