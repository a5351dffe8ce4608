"""The metrics of fanin that want logits z (n, C) of the targets y (n,).

::

    nll               mean of -log p_y                                      p = softmax(z)
    topK_accuracy     share of examples whose target has one of the K largest logits
    auc               P(s+ > s-) + P(s+ = s-) / 2 of a pair of a positive and a negative example
    ece               sum over bins b of |B_b| / n * |accuracy(B_b) - confidence(B_b)|

A model of one value z for each example and targets 0 and 1 has the logits (0, z): so its p is sigmoid(z).

The AUC of two classes ranks s = z_1 - z_0. Of more classes it is one-vs-rest: the mean over the classes c of the AUC of
s = p_c, without weights. A class that all targets have, or none, has no AUC and is left out of the mean.

The calibration error has 15 bins of equal width, ((b - 1) / 15, b / 15], of the confidence max p. Accuracy and
confidence of a bin are means over its examples.

Reference:
    AUC as a probability of ranks: Hanley and McNeil 1982, "The meaning and use of the area under a receiver operating
    characteristic (ROC) curve", Radiology 143(1).
    Expected calibration error: Guo et al. 2017, "On calibration of modern neural networks", arXiv 1706.04599, eq. 3
    and 5.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from fanin.edge.runtimes.base import Inputs
from fanin.edge.tensors import Float64s, Int64s

NUM_BINS: Final = 15


def nll(logits: Inputs, targets: Inputs) -> float:
    """Return the mean negative log likelihood of the targets, in nats."""
    scores, labels = _classes(logits, targets)
    return float(-_log_softmax(scores)[np.arange(len(labels)), labels].mean())


def auc(logits: Inputs, targets: Inputs) -> float | None:
    """Return the area under the ROC curve of two classes, or the mean of each class against the others.

    It is None if all targets have the same class.
    """
    scores, labels = _classes(logits, targets)
    if scores.shape[1] == 2:
        columns = {1: scores[:, 1] - scores[:, 0]}
    else:
        columns = dict(enumerate(np.exp(_log_softmax(scores)).T))
    areas = [_area(column, labels == label) for label, column in columns.items() if 0 < (labels == label).mean() < 1]
    return float(np.mean(areas)) if areas else None


def ece(logits: Inputs, targets: Inputs) -> float:
    """Return the expected calibration error, with 15 bins."""
    scores, labels = _classes(logits, targets)
    chances = np.exp(_log_softmax(scores))
    confidence, is_correct = chances.max(axis=1), scores.argmax(axis=1) == labels
    bins = np.clip(np.ceil(confidence * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)
    # |B| / n * |mean - mean| is |sum - sum| / n.
    gaps = np.bincount(bins, weights=is_correct - confidence, minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(labels))


def top_k(num: int) -> Callable[[Inputs, Inputs], float]:
    """Return the metric function: the share of examples whose target is among the ``num`` largest logits.

    Of equal logits that of the lower class is the larger one, as in a prediction.
    """

    def function(logits: Inputs, targets: Inputs) -> float:
        scores, labels = _classes(logits, targets)
        if num >= scores.shape[1]:
            raise ValueError(f"got {scores.shape[1]} classes, expected more than {num}: all of them are the largest")
        own, classes = scores[np.arange(len(labels)), labels][:, None], np.arange(scores.shape[1])
        is_before = (scores > own) | ((scores == own) & (classes < labels[:, None]))
        return float((is_before.sum(axis=1) < num).mean())

    return function


def _classes(logits: Inputs, targets: Inputs) -> tuple[Float64s, Int64s]:
    """Return logits (n, C) and labels (n,).

    Raises:
        ValueError: The model has values, and not one for each example with targets 0 and 1.
    """
    scores = np.asarray(logits, np.float64)
    if targets.ndim == 1 and targets.dtype.kind == "i" and scores.ndim == 2 and scores.shape[1] > 1:
        return scores, targets.astype(np.int64)
    if scores.size != len(targets) or targets.size != len(targets) or not np.isin(targets, (0, 1)).all():
        raise ValueError(
            f"got outputs {scores.shape} and targets {targets.shape} of {targets.dtype}, expected logits of classes, "
            "or one output for each target 0 or 1; choose a metric of values"
        )
    column = scores.reshape(-1, 1)
    return np.concatenate([np.zeros_like(column), column], axis=1), targets.reshape(-1).astype(np.int64)


def _log_softmax(scores: Float64s) -> Float64s:
    shifted = scores - scores.max(axis=1, keepdims=True)
    logs: Float64s = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logs


def _area(scores: Float64s, is_positive: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]") -> float:
    """Return the share of pairs in which the positive example has the larger score; equal ones count half."""
    _, ranks, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # Equal scores share the mean of their ranks, from 1 on.
    means = np.cumsum(counts) - (counts - 1) / 2
    num = int(is_positive.sum())
    wins = means[ranks.reshape(-1)][is_positive].sum() - num * (num + 1) / 2
    return float(wins / (num * (len(scores) - num)))
