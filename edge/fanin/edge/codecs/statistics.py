"""The statistics of an Update: which ones a Run declares, their bounds, and how a device keeps to them.

One device must not decide the statistics of a Round. So each has a bound, and a device with more examples than count
scales its sums down to that many. The coordinator refuses an Update beyond a bound. It cannot scale for the device:
sums that are masked are never seen one by one.

The sums of a Round cannot overflow: a bound is at most 2^56, and at most 2^62 divided by the Updates of a Round
(``Plan.max_sum``).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from fanin.edge.bundles.manifest import Manifest
from fanin.edge.ranges import NUM_BINS
from fanin.edge.runtimes.evaluations import (
    OF_TRAINING,
    OF_VALIDATIONS,
    REST,
    REST_UNIT,
    SQUARES_FLOAT,
    SQUARES_INT8,
    SQUARES_WANTED,
    largest_loss_count,
)
from fanin.edge.tensors import Int64s
from fanin.protos import messages as m

SQUARES: Final = (SQUARES_FLOAT, SQUARES_INT8, SQUARES_WANTED)
"""Statistics of a model of values: sums of squares."""
CLASS_COUNTS: Final = (m.EVAL_PREDICTIONS, m.EVAL_CORRECT_FLOAT, m.EVAL_CORRECT_INT8, m.EVAL_AGREE)
"""Statistics of a classifier: counts of predictions."""


def declared(
    own: Sequence[m.Statistic], *, max_examples: int, num_labels: int, num_values: int, max_sum: int = m.MAX_SUM
) -> tuple[m.Statistic, ...]:
    """Return the statistics of a Run: those of every Run, and those of its Plan.

    Args:
        own: The statistics of the Plan.
        max_examples: Most examples of one Update that count.
        max_sum: Largest sum over examples of one Update (``Plan.max_sum``).
        num_labels: Largest number of labels of one example, 0 for a model of values.
        num_values: Number of values of an Update.
    """
    loss = largest_loss_count(max_examples, num_labels)
    bounds = {
        m.EXAMPLES: max_examples,
        m.TRAINED: m.MAX_COUNT,
        m.TRAIN_LOSS: loss,
        m.ROUNDED: num_values,
        m.SATURATED: num_values,
        m.EVAL_EXAMPLES: max_examples,
        m.EVAL_LOSS: loss,
    }
    if num_labels:
        bounds |= dict.fromkeys(CLASS_COUNTS, max_examples * num_labels)
    else:
        bounds |= dict.fromkeys(SQUARES, max_sum) | dict.fromkeys((name + REST for name in SQUARES), REST_UNIT)
    ours = (m.Statistic(name=name, bound=max(min(bound, max_sum), 1)) for name, bound in bounds.items())
    return (*ours, *own)


def labels_of(manifest: Manifest) -> int:
    """Return the largest number of labels of one example: one, or one for each position of a sequence.

    The result is 0 for a model of values.
    """
    if not manifest.num_classes:
        return 0
    targets = [port for port in manifest.signatures["evaluate"].inputs if port.name == "y"]
    return max([math.prod(port.shape[1:]) for port in targets], default=1)


def fitted(counts: Mapping[str, int], statistics: Sequence[m.Statistic]) -> dict[str, int]:
    """Return the counts of a device as it sends them: the declared ones, within their bounds.

    Sums over more training or validation examples than count are scaled down to that many and rounded down, also those
    of the Plan (``train.NAME``, and the prefixes of ``OF_VALIDATIONS``). Any other count beyond its
    bound becomes the bound.

    Args:
        counts: What the trainer and the codec counted, by name.
        statistics: What the Assignment declares.
    """
    bounds = {statistic.name: statistic.bound for statistic in statistics}
    # The number of examples trained on is reported beside the number that counts.
    counts = {**counts, m.TRAINED: counts.get(m.EXAMPLES, 0)}
    fit = {name: count for name, count in counts.items() if name in bounds}
    _scale(fit, m.EXAMPLES, (m.TRAIN_LOSS, *_of(OF_TRAINING, fit)), bounds)
    _scale(fit, m.EVAL_EXAMPLES, (m.EVAL_LOSS, *CLASS_COUNTS, *SQUARES, *_of(OF_VALIDATIONS, fit)), bounds)
    return {name: max(-bounds[name], min(count, bounds[name])) for name, count in fit.items()}


def _of(prefix: str | tuple[str, ...], counts: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(name for name in counts if name.startswith(prefix))


def _scale(counts: dict[str, int], of: str, names: Sequence[str], bounds: Mapping[str, int]) -> None:
    """Scale sums over examples down to the number of examples that count, in place."""
    num_examples = counts.get(of, 0)
    most = bounds.get(of, num_examples)
    if num_examples <= most:
        return
    counts[of] = most
    for name in set(names) & set(counts):
        if name in SQUARES:
            squares = counts[name] * REST_UNIT + counts.get(name + REST, 0)
            counts[name], counts[name + REST] = divmod(squares * most // num_examples, REST_UNIT)
        else:
            counts[name] = counts[name] * most // num_examples


def range_counts_of(histograms: Int64s, columns: Int64s) -> m.RangeCounts:
    """Return the ranges on a device's examples, as counts with the same weight for each device.

    The counts of a side are multiplied by ``RANGE_WEIGHT`` / number of examples. Each is rounded down, and the bins
    with the largest rests get one more until the sum is ``RANGE_WEIGHT``. Of equal rests, the lower bin is the first.
    The cell of the bin b of the low side (0) or the high side (1) of the activation a is (2 a + side) * ``NUM_BINS`` +
    b.

    Args:
        histograms: Number of examples (num_measured, 2, NUM_BINS). An activation without examples is left out.
        columns: The numbers of these activations in the manifest (num_measured,), in rising order.
    """
    nums = histograms.sum(axis=2, keepdims=True)
    weighted, rests = np.divmod(histograms * m.RANGE_WEIGHT, np.maximum(nums, 1))
    missing = np.where(nums > 0, m.RANGE_WEIGHT, 0) - weighted.sum(axis=2, keepdims=True)
    ranks = np.argsort(np.argsort(-rests, axis=2, kind="stable"), axis=2, kind="stable")
    weighted += ranks < missing
    rows, sides, bins = np.nonzero(weighted)
    cells = (2 * columns[rows] + sides) * NUM_BINS + bins
    if cells.size > m.MAX_RANGE_CELLS:
        # It has a thousand activations, each with other values in every example.
        return m.RangeCounts()
    return m.RangeCounts(cells=tuple(cells.tolist()), counts=tuple(weighted[rows, sides, bins].tolist()))
