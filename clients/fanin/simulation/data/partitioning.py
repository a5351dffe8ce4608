"""``partition``: the examples of each client of a simulation, drawn from a seed.

The same data, partitioner and seed give the same partition in every process. The examples stay in one array; a client
has indices into it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from fanin.clients.data.examples import Examples
from fanin.clients.data.partitions import held_out_rows
from fanin.clients.data.stores import MIN_EXAMPLES, MemoryStore, memory_store, num_held_out
from fanin.edge.tensors import Int64s
from fanin.protos.errors import InvalidInput
from fanin.protos.numbers import is_number
from fanin.protos.texts import counted
from fanin.simulation.data.partitioners import LabelSkew, Partitioner, Quantity

STREAM: Final = 0x70617274
"""Separates the generator of a partition from all other generators of a seed."""
TEST_STREAM: Final = 0x74657374
"""Separates the choice of the test examples of clients from all other generators of a seed."""
MAX_EXPONENT: Final = 3
"""The largest alpha that an error suggests is below 10,000."""
MAX_NAMED: Final = 8
"""Most clients that an error names."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """A data set and the examples of each client.

    Attributes:
        examples: All examples.
        indices: The indices of each client's examples, ascending.
    """

    examples: Examples
    indices: tuple[Int64s, ...]

    def __repr__(self) -> str:
        few, many = min(self.sizes, default=0), max(self.sizes, default=0)
        return f"Partition({self.examples!r}, clients={len(self)}, {few} to {many} each; see .sizes and .indices)"

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, client: int) -> Examples:
        return self.examples.take(self.indices[client])

    def store(self, client: int, validation_fraction: float) -> MemoryStore:
        """Return the example store of a client. See ``memory_store``."""
        return memory_store(self.examples, client, validation_fraction, self.indices[client])

    def __iter__(self) -> Iterator[Examples]:
        return (self[client] for client in range(len(self)))

    def split(self, fraction: float, seed: int = 0) -> "tuple[Partition, Partition]":
        """Split the examples of each client into training and test examples with the same mix of labels.

        Args:
            fraction: Share of each client's examples that are test examples: at least one, and not all.
            seed: Seed of the choice, 0 or more.

        Returns:
            The training examples and the test examples of the clients.

        Raises:
            InvalidInput: The share is not between 0 and 1, or a client has too few examples.
        """
        if not is_number(fraction) or not 0.0 < fraction < 1.0:
            raise InvalidInput(
                f"partition: split: got {fraction!r}, expected a share above 0 and below 1, such as 0.2", code="FN-1835"
            )
        if small := [client for client, size in enumerate(self.sizes) if size <= MIN_EXAMPLES]:
            raise InvalidInput(
                f"partition: split: got {counted(self.sizes[small[0]], 'example')} of client {small[0]}, expected more "
                f"than {MIN_EXAMPLES}: one to test, and {MIN_EXAMPLES} to train and to validate; use fewer clients",
                code="FN-1835",
            )
        parts = []
        for client, own in enumerate(self.indices):
            num_tested = min(num_held_out(len(own), fraction), len(own) - MIN_EXAMPLES)
            rng = np.random.default_rng((TEST_STREAM, seed, client))
            parts.append([own[rows] for rows in held_out_rows(self.examples.y[own], num_tested, rng)])
        trained, tested = (tuple(each) for each in zip(*parts, strict=True))
        return replace(self, indices=trained), replace(self, indices=tested)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of examples of each client."""
        return tuple(len(part) for part in self.indices)

    def label_counts(self) -> Int64s:
        """Return the number of examples of each label and client (clients, labels).

        Raises:
            InvalidInput: The targets are no labels.
        """
        labels = self.examples.y
        if labels.ndim != 1 or labels.dtype != np.int32:
            raise InvalidInput(
                f"partition: got targets {labels.dtype} of shape {labels.shape}, expected labels (n,) int32",
                code="FN-1141",
            )
        num_labels = int(labels.max()) + 1
        return np.stack([np.bincount(labels[part], minlength=num_labels) for part in self.indices]).astype(np.int64)

    def plot(self, path: Path | str | None = None) -> object:
        """Draw the clients as bars, with a colour for each label; without labels, the sizes alone.

        Args:
            path: The file to write, in the format of its suffix. None writes none.

        Returns:
            The matplotlib Figure, which a notebook shows.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        from fanin.simulation.data.figures import plot_partition

        try:
            counts = self.label_counts()
        except InvalidInput:  # the targets are no labels
            counts = None
        return plot_partition(self.sizes, counts, len(self.examples), path)


def partition(examples: Examples, num_clients: int, by: Partitioner, *, seed: int = 0) -> Partition:
    """Spread a data set over clients.

    Args:
        examples: The data set.
        num_clients: Number of clients.
        by: The partitioner, such as ``Dirichlet(alpha=0.3)`` or a function of your own.
        seed: Seed of the draw, 0 or more.

    Raises:
        InvalidInput: The data set has another type, or there are more clients than examples allow. Or the result of the
            partitioner is not the indices of each client, or a client has too few examples.

    Example:
        ``partition(load_digits(), 10, Dirichlet(alpha=0.3))``
    """
    if not isinstance(examples, Examples):
        raise InvalidInput(
            f"partition: got {type(examples).__name__} as examples, expected Examples; write "
            "Examples(inputs={'x': x}, y=y) for arrays, examples_of(data) for a data set, or load_data(name).train",
            code="FN-1134",
        )
    if not isinstance(num_clients, int):
        raise InvalidInput(f"partition: got num_clients {num_clients!r}, expected an integer", code="FN-1132")
    most = len(examples) // MIN_EXAMPLES
    if not 1 <= num_clients <= most:
        raise InvalidInput(
            f"partition: got {num_clients} clients for {len(examples)} examples, expected 1 to {most}: each client "
            f"needs {MIN_EXAMPLES}, one to train and one to validate",
            code="FN-1132",
        )
    if seed < 0:
        raise InvalidInput(f"partition: got seed {seed}, expected 0 or more", code="FN-1172")
    _check_partitioner(by)
    indices = _drawn(examples, num_clients, by, seed)
    small = _small(indices)
    if small:
        names = ", ".join(map(str, small[:MAX_NAMED])) + (", ..." if len(small) > MAX_NAMED else "")
        raise InvalidInput(
            f"partition: {len(small)} of {num_clients} clients have fewer than {MIN_EXAMPLES} examples with seed "
            f"{seed}: {names}; {_advice(examples, num_clients, by, seed)}",
            code="FN-1133",
        )
    return Partition(examples=examples, indices=indices)


def _check_partitioner(by: object) -> None:
    if not callable(by) or isinstance(by, type):
        raise InvalidInput(
            f"partition: got by {by!r}, expected a partitioner such as Iid() or Dirichlet(alpha=0.3)", code="FN-1136"
        )


def _drawn(examples: Examples, num_clients: int, by: Partitioner, seed: int) -> tuple[Int64s, ...]:
    rng = np.random.default_rng((STREAM, seed))
    try:
        indices = tuple(np.sort(np.asarray(part)) for part in by(examples, num_clients, rng))
    except InvalidInput:
        raise
    except Exception as exc:  # Any error: a partitioner may be the user's code.
        raise InvalidInput(
            f"partition: the partitioner raised {type(exc).__name__}: {exc}; correct it", code="FN-1138"
        ) from exc
    if len(indices) != num_clients:
        raise InvalidInput(
            f"partition: the partitioner returned {len(indices)} clients, expected {num_clients}; correct it",
            code="FN-1138",
        )
    for client, part in enumerate(indices):
        if part.ndim != 1 or (part.size and part.dtype.kind not in "iu"):
            raise InvalidInput(
                f"partition: the partitioner returned {part.dtype} of shape {part.shape} for client {client}, expected "
                "integers (n,); correct it",
                code="FN-1138",
            )
    together = np.concatenate([part.astype(np.int64) for part in indices])
    if together.size and not 0 <= together.min() <= together.max() < len(examples):
        raise InvalidInput(
            f"partition: the partitioner returned indices from {together.min()} to {together.max()}, expected 0 to "
            f"{len(examples) - 1}; correct it",
            code="FN-1138",
        )
    if len(np.unique(together)) != len(together):
        raise InvalidInput(
            "partition: the partitioner returned an example for two clients, expected one at most; correct it",
            code="FN-1138",
        )
    return tuple(part.astype(np.int64) for part in indices)


def _small(indices: Sequence[Int64s]) -> list[int]:
    return [client for client, part in enumerate(indices) if len(part) < MIN_EXAMPLES]


def _advice(examples: Examples, num_clients: int, by: Partitioner, seed: int) -> str:
    """Return the advice for clients with too few examples: a larger alpha that works with this seed, if one exists."""
    if isinstance(by, LabelSkew | Quantity):

        def works(alpha: float) -> bool:
            return not _small(_drawn(examples, num_clients, replace(by, alpha=alpha), seed))

        if (bounds := least_alpha(by.alpha, works)) is not None:
            return f"with this seed, alpha {bounds[1]:g} works and {bounds[0]:g} does not"
    return "use fewer clients, or another partitioner"


def least_alpha(alpha: float, works: Callable[[float], bool]) -> tuple[float, float] | None:
    """Return two neighbours among the numbers of two digits: one that does not work, and the next one, which works.

    A larger alpha draws other random numbers. So a still smaller alpha may work by chance, and the second number is the
    smallest of all only if no such alpha exists.

    Args:
        alpha: A number that does not work. It counts as the neighbour of the next larger number.
        works: Whether a number works.
    """
    exponents = range(math.floor(math.log10(alpha)), MAX_EXPONENT + 1)
    values = [float(f"{digits}e{exponent - 1}") for exponent in exponents for digits in range(10, 100)]
    numbers = [alpha, *(value for value in values if value > alpha)]
    last = len(numbers) - 1
    low = 0
    for high in (*(1 << power for power in range(last.bit_length())), last):
        if works(numbers[high]):
            break
        low = high
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(numbers[middle]) else (middle, high)
    return numbers[low], numbers[high]
