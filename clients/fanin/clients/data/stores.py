"""Example stores: the source of a device's examples, and its snapshot for one Round."""

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from fanin.clients.data.examples import Examples
from fanin.clients.data.partitions import held_out_rows
from fanin.edge.tensors import Int64s
from fanin.protos.errors import InvalidInput
from fanin.protos.texts import counted

HOLD_OUT_STREAM: Final = 0x686F6C64
"""Separates the generator of the validation part from all other generators of a partition."""
MIN_EXAMPLES: Final = 2
"""One example for training and one for validation. A store that holds nothing out needs the first one only."""


class ExampleStore(Protocol):
    """The source of a device's examples.

    A device reads the three attributes once at the start of each Round (``snapshot``) and uses these values until the
    Round ends. So the data may grow while the client runs, by these rules:

    - Return a new ``Examples`` when the data has changed, and the same object while it has not: work on it is cached.
      Do not change the arrays of a returned object.
    - ``validation`` is None for a device that does not evaluate the Versions.
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
    def validation(self) -> Examples | None: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryStore:
    """An example store in memory. See ExampleStore."""

    partition: int
    train: Examples
    validation: Examples | None

    def __post_init__(self) -> None:
        if self.partition < 0:
            raise ValueError(f"example store: got partition {self.partition}, expected 0 or more")

    @property
    def parts(self) -> dict[str, Examples]:
        """The training part and the validation part, if there is one, by name."""
        validation = {} if self.validation is None else {"validation": self.validation}
        return {"training": self.train, **validation}


def snapshot(store: ExampleStore) -> MemoryStore:
    """Read a store once, for one Round.

    Raises:
        InvalidInput: An attribute cannot be read, or its type or value differs from ``ExampleStore``.
    """
    partition = _attribute(store, "partition")
    if not isinstance(partition, int | np.integer) or partition < 0:
        raise InvalidInput(
            f"example store: partition: got {partition!r}, expected an integer of at least 0", code="FN-0870"
        )
    train, validation = _attribute(store, "train"), _attribute(store, "validation")
    return MemoryStore(
        partition=int(partition),
        train=_part("train", train),
        validation=None if validation is None else _part("validation", validation),
    )


def memory_store(
    examples: Examples, partition: int, validation_fraction: float, rows: Int64s | None = None
) -> MemoryStore:
    """Create a store that holds out the same validation part each time: at least one example, and not all.

    Args:
        examples: The examples of the device, or of several devices.
        partition: The index of this part of all data; it seeds the choice of the validation part.
        validation_fraction: Share of the examples that is held out, below 1. 0 holds nothing out: the device trains
            on all of its examples and does not evaluate the Versions.
        rows: The indices of the device's examples; None for all.

    Raises:
        ValueError: The fraction is out of range, or there are too few examples.
    """
    if not 0.0 <= validation_fraction < 1.0:
        raise ValueError(
            f"example store: got validation fraction {validation_fraction}, expected at least 0 and less than 1"
        )
    own = np.arange(len(examples)) if rows is None else rows
    least = least_examples(validation_fraction)
    if len(own) < least:
        raise ValueError(f"example store: got {counted(len(own), 'example')}, expected at least {least}")
    if not validation_fraction:
        return MemoryStore(partition=partition, train=examples.take(own), validation=None)
    rng = np.random.default_rng([HOLD_OUT_STREAM, partition])
    # Only the indices are split first, so that each example is copied once.
    rest, held = held_out_rows(examples.y[own], num_held_out(len(own), validation_fraction), rng)
    return MemoryStore(partition=partition, train=examples.take(own[rest]), validation=examples.take(own[held]))


def least_examples(validation_fraction: float) -> int:
    """Return the number of examples that ``memory_store`` needs at least."""
    return MIN_EXAMPLES if validation_fraction else 1


def num_held_out(num_examples: int, validation_fraction: float) -> int:
    """Return how many of some examples ``memory_store`` holds out: at least one and not all, or none for 0."""
    if not validation_fraction:
        return 0
    return min(max(1, round(num_examples * validation_fraction)), num_examples - 1)


def _part(name: str, part: object) -> Examples:
    if not isinstance(part, Examples):
        raise InvalidInput(
            f"example store: {name}: got {type(part).__name__}, "
            "expected fanin.clients.data.examples.Examples(inputs={'x': ...}, y=...)",
            code="FN-0870",
        )
    return part


def _attribute(store: ExampleStore, name: str) -> object:
    try:
        value: object = getattr(store, name)
    except Exception as exc:
        # A store is the app's code, which may raise anything. LocalData logs its traceback, once.
        raise InvalidInput(f"example store: {name}: {type(exc).__name__}: {exc}", code="FN-0870") from exc
    return value
