"""The contract of metrics, as a check for the tests of one's own."""

import math
from typing import Final

import numpy as np

from fanin.edge.metrics.metric import LOGITS, Metric, value_of
from fanin.edge.runtimes.base import Inputs

NUM_EXAMPLES: Final = 40
TOLERANCE: Final = 1e-9
CERTAIN: Final = np.float32(20.0)
"""The logit of a correct class; the others have 0."""


def check_metric(metric: Metric, *, num_classes: int = 5, seed: int = 1) -> None:
    """Check that a metric keeps the contract that evaluations rely on.

    Args:
        metric: The metric.
        num_classes: Number of labels of the model; 0 for a model of values.
        seed: Seed of the targets and predictions.

    Raises:
        AssertionError: The metric breaks the contract. The text says how.
        InvalidPlan: The metric raised an error, or its value is no finite number.
    """
    assert isinstance(metric, Metric), f"metric: got {type(metric).__name__}, expected a Metric(function=...)"
    rng = np.random.default_rng(seed)
    targets, predictions = _draw(rng, num_classes), _draw(rng, num_classes)
    perfect_predictions = targets.copy()
    if metric.wants == LOGITS and num_classes:
        predictions = rng.normal(size=(NUM_EXAMPLES, num_classes)).astype(np.float32)
        perfect_predictions = CERTAIN * np.eye(num_classes, dtype=np.float32)[targets]
    value = value_of("metric", metric, predictions, targets)
    if math.isnan(value):
        raise AssertionError(f"metric: got None for {NUM_EXAMPLES} examples, expected a number")
    assert value_of("metric", metric, predictions, targets) == value, "metric: a repetition gave another value"
    order = rng.permutation(NUM_EXAMPLES)
    other = value_of("metric", metric, predictions[order], targets[order])
    perfect = value_of("metric", metric, perfect_predictions, targets)
    assert abs(other - value) <= TOLERANCE * max(1.0, abs(value)), "metric: the order of the examples changed the value"
    is_best = perfect >= value if metric.higher_is_better else perfect <= value
    assert is_best, f"metric: got {perfect} for correct and {value} for random predictions; correct higher_is_better"
    value_of("metric", metric, predictions[:1], targets[:1])


def _draw(rng: np.random.Generator, num_classes: int) -> Inputs:
    if num_classes:
        return rng.integers(0, num_classes, NUM_EXAMPLES).astype(np.int32)
    return rng.normal(size=(NUM_EXAMPLES, 2)).astype(np.float32)
