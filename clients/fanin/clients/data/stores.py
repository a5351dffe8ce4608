"""Example stores: the source of a device's examples, and its snapshot for one Round."""

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from fanin.clients.data.examples import Examples
from fanin.clients.data.partitions import held_out_rows
from fanin.edge.tensors import Int64s
from fanin.protos.errors import InvalidInput

HOLD_OUT_STREAM: Final = 0x686F6C64
"""Separates the generator of the validation part from all other generators of a partition."""
MIN_EXAMPLES: Final = 2
"""One example for training and one for validation."""


class ExampleStore(Protocol):
    """The source of a device's examples.

    A device reads the three attributes once at the start of each Round (``snapshot``) and uses these values until the
    Round ends. So the data may grow while the client runs, by these rules:

    - Return a new ``Examples`` when the data has changed, and the same object while it has not: work on it is cached.
      Do not change the arrays of a returned object.
    - ``train`` and ``validation`` share no example. An example never moves from one to the other, so the device may
      read them one after the other.
    - ``partition`` is the index of this device's part of all data. The seed of a device's random choices is
      (seed, partition, round).

    If an attribute raises an error or has another type, the device gives up the Round's Assignment with that reason.
    The device takes part in the next Round.
    """

    @property
    def partition(self) -> int: ...

    @property
    def train(self) -> Examples: ...

    @property
    def validation(self) -> Examples: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryStore:
    """An example store in memory."""

    partition: int
    train: Examples
    validation: Examples

    def __post_init__(self) -> None:
        if self.partition < 0:
            raise ValueError(f"example store: got partition {self.partition}, expected 0 or more")


def snapshot(store: ExampleStore) -> MemoryStore:
    """Read a store once, for one Round.

    Raises:
        InvalidInput: An attribute cannot be read, or its type or value differs from ``ExampleStore``.
    """
    partition = _attribute(store, "partition")
    if not isinstance(partition, int | np.integer) or partition < 0:
        raise InvalidInput(f"example store: partition: got {partition!r}, expected an integer of at least 0")
    train, validation = _part(store, "train"), _part(store, "validation")
    return MemoryStore(partition=int(partition), train=train, validation=validation)


def memory_store(
    examples: Examples, partition: int, validation_fraction: float, rows: Int64s | None = None
) -> MemoryStore:
    """Create a store that holds out the same validation part each time, at least one example on either side.

    Args:
        examples: The examples of the device, or of several devices.
        partition: The index of this part of all data; it seeds the choice of the validation part.
        validation_fraction: Share of the examples that is held out, between 0 and 1.
        rows: The indices of the device's examples; None for all.

    Raises:
        ValueError: The fraction is out of range, or there is a single example.
    """
    if not 0.0 < validation_fraction < 1.0:
        raise ValueError(f"example store: got validation fraction {validation_fraction}, expected between 0 and 1")
    own = np.arange(len(examples)) if rows is None else rows
    if len(own) < MIN_EXAMPLES:
        raise ValueError(f"example store: got {len(own)} example, expected at least {MIN_EXAMPLES}")
    rng = np.random.default_rng([HOLD_OUT_STREAM, partition])
    # Only the indices are split first, so that each example is copied once.
    rest, held = held_out_rows(examples.y[own], num_held_out(len(own), validation_fraction), rng)
    return MemoryStore(partition=partition, train=examples.take(own[rest]), validation=examples.take(own[held]))


def num_held_out(num_examples: int, validation_fraction: float) -> int:
    """Return how many of some examples ``memory_store`` holds out: at least one, and not all."""
    return min(max(1, round(num_examples * validation_fraction)), num_examples - 1)


def _part(store: ExampleStore, name: str) -> Examples:
    part = _attribute(store, name)
    if not isinstance(part, Examples):
        raise InvalidInput(
            f"example store: {name}: got {type(part).__name__}, "
            "expected fanin.clients.data.examples.Examples(inputs={'x': ...}, y=...)"
        )
    return part


def _attribute(store: ExampleStore, name: str) -> object:
    try:
        value: object = getattr(store, name)
    except Exception as exc:
        # A store is the app's code, which may raise anything. LocalData logs its traceback, once.
        raise InvalidInput(f"example store: {name}: {type(exc).__name__}: {exc}") from exc
    return value
