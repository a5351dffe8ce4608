"""The contract of partitioners, as a check for the tests of one's own."""

from typing import Final

import numpy as np

from fanin.clients.data.examples import Examples
from fanin.simulation.data.partitioners import Partitioner
from fanin.simulation.data.partitioning import Partition, partition

NUM_EXAMPLES: Final = 600
NUM_LABELS: Final = 10
SEEDS: Final = (0, 1, 2)


def check_partitioner(by: Partitioner, examples: Examples | None = None, *, num_clients: int = 5) -> Partition:
    """Check that a partitioner keeps the contract that simulations rely on.

    Args:
        by: The partitioner.
        examples: A data set for it; by default 600 examples of 10 labels.
        num_clients: Number of clients.

    Returns:
        The partition of seed 0.

    Raises:
        AssertionError: The partitioner changes the examples, or a repetition with the same seed gives another result.
        InvalidInput: It raised an error, its result is not the indices of each client, or a client has too few
            examples.
    """
    data = _some() if examples is None else examples
    copies = {name: values.copy() for name, values in _arrays(data).items()}
    results = [partition(data, num_clients, by, seed=seed) for seed in SEEDS]
    for name, values in _arrays(data).items():
        assert np.array_equal(values, copies[name]), f"partitioner: changed {name} of the examples, expected to read it"
    for seed, result in zip(SEEDS, results, strict=True):
        again = partition(data, num_clients, by, seed=seed)
        is_same = all(map(np.array_equal, result.indices, again.indices))
        assert is_same, (
            f"partitioner: a repetition with seed {seed} gave other indices; draw all random numbers from rng, and "
            "keep no state"
        )
    return results[0]


def _some() -> Examples:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, NUM_LABELS, NUM_EXAMPLES).astype(np.int32)
    return Examples(inputs={"x": rng.normal(size=(NUM_EXAMPLES, 4)).astype(np.float32)}, y=labels)


def _arrays(examples: Examples) -> dict[str, np.ndarray]:
    return {**examples.inputs, "y": examples.y}
