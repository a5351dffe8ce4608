"""The Protocol ``Backend``: it runs tasks, which are functions of their jobs alone.

A training depends on its Bundle, Version, examples, state and seed, so a task may run anywhere, and again after a
crash. State of a client is a part of the job and of the result. The simulation holds it, and no worker keeps any.

Values that many jobs read are placed once. A job carries a ``Placed``, and its worker reads the value::

    simulation                             worker
    placed = backend.place(examples)
    pending = backend.submit(task, job) -> task(job): job.examples.get()
    pending()                           <- result, or the error of the task
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
J = TypeVar("J")
R = TypeVar("R")


class Placed(Protocol[T_co]):
    """A value that workers can read. Two of them are equal if they are the same placement, in any process."""

    def get(self) -> T_co:
        """Return the value. A task must not change it: its arrays may be read-only, or the caller's own."""
        ...

    def __hash__(self) -> int: ...

    def __eq__(self, other: object, /) -> bool: ...


class Backend(Protocol):
    """Runs tasks."""

    def place(self, value: T) -> Placed[T]:
        """Place a value for the workers. It stays until no ``Placed`` of it is left, or until ``close``."""
        ...

    def submit(self, task: Callable[[J], R], job: J, due_s: float = 0.0) -> Callable[[], R]:
        """Start a task.

        Args:
            task: A function of a module.
            job: Its argument.
            due_s: Among tasks that wait for a worker, those with smaller numbers are needed first.

        Returns:
            A function that waits for the result and returns it, or raises the error of the task.
        """
        ...

    def close(self) -> None:
        """End the tasks, and free their resources."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldValue(Generic[T]):
    """A value in this process. See Placed."""

    value: T = field(compare=False)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def get(self) -> T:
        """See Placed."""
        return self.value


class ThisProcess:
    """Runs each task in this process, when its result is collected. See Backend."""

    def place(self, value: T) -> Placed[T]:
        """Keep the value. See Backend."""
        return HeldValue(value=value)

    def submit(self, task: Callable[[J], R], job: J, due_s: float = 0.0) -> Callable[[], R]:
        """See Backend."""
        return lambda: task(job)

    def close(self) -> None:
        """See Backend."""
