"""Batches of examples, all of one size: graphs have a fixed batch size, so a mask marks the padding."""

from collections.abc import Iterator

import numpy as np

from fanin.clients.data.examples import Examples
from fanin.edge.runtimes.base import PaddedBatch
from fanin.edge.tensors import Int64s


def batches(examples: Examples, batch_size: int, rng: np.random.Generator) -> Iterator[PaddedBatch]:
    """Yield one epoch in random order; the last batch may be padded."""
    yield from _batches(examples, rng.permutation(len(examples)), batch_size)


def batches_in_order(examples: Examples, batch_size: int) -> Iterator[PaddedBatch]:
    """Yield all examples in order, for evaluation; the last batch may be padded."""
    yield from _batches(examples, np.arange(len(examples)), batch_size)


def _batches(examples: Examples, order: Int64s, batch_size: int) -> Iterator[PaddedBatch]:
    if batch_size < 1:
        raise ValueError(f"batches: got batch size {batch_size}, expected at least 1")
    for start in range(0, len(order), batch_size):
        picked = order[start : start + batch_size]
        # Padding repeats a real example: zeros could make a loss infinite, and infinity times a mask of 0 is NaN.
        padded = np.concatenate([picked, np.repeat(picked[:1], batch_size - len(picked))])
        mask = (np.arange(batch_size) < len(picked)).astype(np.float32)
        inputs = {name: array[padded] for name, array in examples.inputs.items()}
        yield PaddedBatch(inputs=inputs, y=examples.y[padded], mask=mask)
