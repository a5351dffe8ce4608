"""The statistics of a Round for its record: evaluation, training loss and runtimes.

The functions read the sums over the Round's Updates. The results are in the event ``VersionPublished``. A Flower app
may report no loss, so a mean loss is over the examples of the devices that report one: ``with_loss_examples`` counts
them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from fanin.edge.runtimes.evaluations import SQUARES_INT8, quality_of
from fanin.protos.control import Evaluation
from fanin.protos.messages import EVAL_EXAMPLES, EVAL_LOSS, EXAMPLES, LOSS_UNIT, TRAIN_LOSS

TRAIN_LOSS_EXAMPLES: Final = "train_loss_examples"
EVAL_LOSS_EXAMPLES: Final = "eval_loss_examples"
MAX_RUNTIMES: Final = 50
"""Runtimes that are named in one event. Devices choose these names, and one message holds them all."""
OTHER_RUNTIMES: Final = "other"
MAX_RISE: Final = 1e9
"""Largest reported rise of the squared error, in percent. If the float model has no error, the rise is infinite, and
JSON has no infinity."""


def with_loss_examples(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the statistics of one Update, with the number of examples for each loss that it reports."""
    losses = ((TRAIN_LOSS, TRAIN_LOSS_EXAMPLES, EXAMPLES), (EVAL_LOSS, EVAL_LOSS_EXAMPLES, EVAL_EXAMPLES))
    return {**counts, **{name: counts.get(of, 0) for loss, name, of in losses if loss in counts}}


def evaluation_of(counts: Mapping[str, int], num_classes: int) -> Evaluation | None:
    """Return the evaluation of the Round's base Version on the devices' validation data, or None without a loss.

    Args:
        counts: Sums of the Updates' statistics (``with_loss_examples``), by name.
        num_classes: Number of classes of the Bundle, 0 for a model of values. It is read from the Bundle, because
            devices must not decide the kind of model.
    """
    sums, of_values = quality_of(counts), not num_classes and SQUARES_INT8 in counts
    num_examples = counts.get(EVAL_LOSS_EXAMPLES, 0)
    if num_examples <= 0:
        return None
    return Evaluation(
        num_examples=num_examples,
        loss=sums.loss_sum / num_examples,
        accuracy_float=sums.accuracy_float,
        accuracy_int8=sums.accuracy_int8,
        int8_agreement=sums.agreement,
        int8_rise_percent=min(sums.rise_percent, MAX_RISE) if of_values else None,
    )


def train_loss_of(counts: Mapping[str, int]) -> float:
    """Return the mean training loss in nats per example of the devices that report one, 0.0 if none does."""
    num_examples = counts.get(TRAIN_LOSS_EXAMPLES, 0)
    return counts.get(TRAIN_LOSS, 0) / LOSS_UNIT / num_examples if num_examples > 0 else 0.0


def runtimes_of(names: Iterable[str]) -> Mapping[str, int]:
    """Return the number of Updates for each runtime: the ``MAX_RUNTIMES`` most frequent, and ``OTHER_RUNTIMES``."""
    counts = Counter(names)
    frequent = dict(counts.most_common(MAX_RUNTIMES))
    num_other = counts.total() - sum(frequent.values())
    return frequent | ({OTHER_RUNTIMES: num_other} if num_other else {})
