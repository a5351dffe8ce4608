"""Batches of examples, all of one size: graphs have a fixed batch size, so a mask marks the padding.

A batch of a model with lengths has rows of one length only: the smallest that holds them. An epoch draws the
examples in random order and cuts the rows of each length into batches in that order. Then it shuffles the batches of
all lengths.
"""

from collections.abc import Iterator

import numpy as np

from fanin.clients.data.examples import Examples, Y
from fanin.edge.lengths import Lengths
from fanin.edge.runtimes.base import PaddedBatch
from fanin.edge.runtimes.buckets.dispatch import fitted
from fanin.edge.tensors import Int64s


def batches(
    examples: Examples, batch_size: int, rng: np.random.Generator, lengths: Lengths | None = None, first: int = 0
) -> Iterator[PaddedBatch]:
    """Yield one epoch in random order; the last batch, or the last one of each length, may be padded.

    The first ``first`` batches are left out. The generator draws the same numbers in any case.

    Raises:
        ValueError: A row is longer than the longest length.
    """
    groups = _groups(examples, rng.permutation(len(examples)), batch_size, lengths)
    order = np.arange(len(groups)) if lengths is None else rng.permutation(len(groups))
    for index in order[first:]:
        yield _batch(examples, groups[index], batch_size, lengths)


def batches_in_order(examples: Examples, batch_size: int, lengths: Lengths | None = None) -> Iterator[PaddedBatch]:
    """Yield all examples in order, for evaluation, one length after the other. See ``batches``."""
    for group in _groups(examples, np.arange(len(examples)), batch_size, lengths):
        yield _batch(examples, group, batch_size, lengths)


def num_batches(examples: Examples, batch_size: int, lengths: Lengths | None = None) -> int:
    """Return the number of batches of an epoch. Raises ValueError like ``batches``."""
    return len(_groups(examples, np.arange(len(examples)), batch_size, lengths))


def at_longest(examples: Examples, lengths: Lengths | None) -> Examples:
    """Return examples cut or padded at the end to the longest length.

    Raises:
        ValueError: A row is longer than the longest length, or an array lacks the axis of its length.
    """
    if lengths is None:
        return examples
    lengths.sizes_of({**examples.inputs, Y: examples.y})
    return Examples(
        inputs=fitted(lengths, examples.inputs, lengths.longest), y=lengths.fit(Y, examples.y, lengths.longest)
    )


def _groups(examples: Examples, order: Int64s, batch_size: int, lengths: Lengths | None) -> list[tuple[int, Int64s]]:
    """Return the length and the rows of each batch."""
    if batch_size < 1:
        raise ValueError(f"batches: got batch size {batch_size}, expected at least 1")
    parts = [(0, order)]
    if lengths is not None:
        sizes = lengths.sizes_of({**examples.inputs, Y: examples.y})[order]
        parts = [(size, order[sizes == size]) for size in lengths.sizes]
    return [
        (size, rows[start : start + batch_size]) for size, rows in parts for start in range(0, len(rows), batch_size)
    ]


def _batch(examples: Examples, group: tuple[int, Int64s], batch_size: int, lengths: Lengths | None) -> PaddedBatch:
    size, picked = group
    # Padding repeats a real example: zeros could make a loss infinite, and infinity times a mask of 0 is NaN.
    num_missing = batch_size - len(picked)
    padded = np.concatenate([picked, np.repeat(picked[:1], num_missing)]) if num_missing else picked
    mask = np.ones(batch_size, np.float32)
    mask[len(picked) :] = 0.0
    inputs = {name: array[padded] for name, array in examples.inputs.items()}
    batch = PaddedBatch(inputs=inputs, y=examples.y[padded], mask=mask)
    if lengths is None:
        return batch
    return PaddedBatch(inputs=fitted(lengths, inputs, size), y=lengths.fit(Y, batch.y, size), mask=mask)
