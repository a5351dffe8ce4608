"""Quality as integer statistics, which devices upload and the coordinator sums.

Integers make the sum independent of the order of devices. A squared error has the unknown scale of the model's values.
So it needs two counts: the integer part, and the fraction in units of 2^-40.
"""

import math
from collections.abc import Mapping
from typing import Final

from fanin.edge.runtimes.quality import Quality
from fanin.protos import messages as m

SQUARES_FLOAT: Final = "eval_squares_float"
SQUARES_INT8: Final = "eval_squares_int8"
SQUARES_WANTED: Final = "eval_squares_wanted"
REST: Final = "_q40"
"""Suffix of the count that holds the fraction of a squared error."""
REST_UNIT: Final = 1 << 40
"""The unit of the fraction. It resolves sums of squares from 1e-12 to 1e12."""
OF_TRAINING: Final = "train."
"""Prefix of the Plan's statistics that are a metric of the training, summed over its examples."""
VERSION_LOSS: Final = f"{OF_TRAINING}version_loss"
"""The loss of the Version before the training, on the training examples, in the units of a metric."""
OF_VALIDATION: Final = "evaluate."
"""Prefix of the Plan's statistics that are a metric of the received Version, summed over the validation examples."""
OF_GLOBAL: Final = "global."
"""Prefix of the same metrics of the global model: the Version, with the initial values of personal parameters."""
OF_PERSONAL: Final = "personal."
"""Prefix of the same metrics of the device's own model, as the Round before has left it."""
OF_MODELS: Final = (OF_GLOBAL, OF_PERSONAL)
"""Prefixes of the statistics that need a personal model."""
OF_VALIDATIONS: Final = (OF_VALIDATION, *OF_MODELS)
"""Prefixes of the Plan's statistics that are summed over the validation examples."""
METRIC_UNIT: Final = 1 << 16
"""Metrics are counted in units of 2^-16, as losses are."""


def counts_of(quality: Quality, num_classes: int) -> dict[str, int]:
    """Return the statistics of a measurement by name.

    Args:
        quality: The measurement.
        num_classes: Number of labels of the model; 0 for a regression model.
    """
    counts = {
        m.EVAL_EXAMPLES: quality.num_examples,
        m.EVAL_LOSS: loss_count(quality.loss_sum, quality.num_examples, num_classes),
    }
    if num_classes:
        return counts | {
            m.EVAL_PREDICTIONS: quality.num_predictions,
            m.EVAL_CORRECT_FLOAT: quality.num_correct_float,
            m.EVAL_CORRECT_INT8: quality.num_correct_int8,
            m.EVAL_AGREE: quality.num_agreeing,
        }
    counts |= _split(SQUARES_FLOAT, quality.squares_float) | _split(SQUARES_INT8, quality.squares_int8)
    return counts | _split(SQUARES_WANTED, quality.squares_wanted)


def quality_of(counts: Mapping[str, int]) -> Quality:
    """Return the quality that summed statistics describe, as if one device had measured all examples."""
    return Quality(
        num_examples=counts.get(m.EVAL_EXAMPLES, 0),
        loss_sum=counts.get(m.EVAL_LOSS, 0) / m.LOSS_UNIT,
        num_predictions=counts.get(m.EVAL_PREDICTIONS, 0),
        num_correct_float=counts.get(m.EVAL_CORRECT_FLOAT, 0),
        num_correct_int8=counts.get(m.EVAL_CORRECT_INT8, 0),
        num_agreeing=counts.get(m.EVAL_AGREE, 0),
        squares_float=_joined(SQUARES_FLOAT, counts),
        squares_int8=_joined(SQUARES_INT8, counts),
        squares_wanted=_joined(SQUARES_WANTED, counts),
    )


def largest_loss_count(num_examples: int, num_classes: int) -> int:
    """Return the largest magnitude of a loss, as a count, over ``num_examples`` examples.

    Args:
        num_examples: Number of examples.
        num_classes: Number of labels of the model. 0 for a regression model, whose values may have any scale.
    """
    return min(num_examples * m.MAX_LOSS * m.LOSS_UNIT, m.MAX_SUM) if num_classes else m.MAX_SUM


def loss_count(loss_sum: float, num_examples: int, num_classes: int) -> int:
    """Return a finite sum of losses as a count, limited to ``largest_loss_count``.

    Limiting the count keeps a device with a large loss in the Round.

    Args:
        loss_sum: Sum of the losses of the examples, in nats.
        num_examples: Number of examples.
        num_classes: Number of labels of the model; 0 for a regression model.
    """
    limit = largest_loss_count(num_examples, num_classes)
    return round(max(-limit, min(loss_sum * m.LOSS_UNIT, limit)))


def metric_count(value: float, num_examples: int) -> int:
    """Return a metric, a finite mean over examples, as a sum in units of 2^-16 within the limits of a count."""
    return round(max(-m.MAX_SUM, min(value * num_examples * METRIC_UNIT, m.MAX_SUM)))


def validation_means(sums: Mapping[str, int], examples: Mapping[str, int]) -> dict[str, float]:
    """Return the means of the metrics on validation examples, sorted by name.

    Args:
        sums: The statistics of a Round.
        examples: The number of examples of each sum over examples.
    """
    return {
        name: sums[name] / METRIC_UNIT / num
        for name, num in sorted(examples.items())
        if num and name.startswith(OF_VALIDATIONS)
    }


def _split(name: str, squares: float) -> dict[str, int]:
    if not squares < m.MAX_SUM:
        # Also NaN: the error of an int8 model without sensible output has no bound.
        return {name: m.MAX_SUM, name + REST: 0}
    integer = math.floor(squares)
    return {name: integer, name + REST: round((squares - integer) * REST_UNIT)}


def _joined(name: str, counts: Mapping[str, int]) -> float:
    return counts.get(name, 0) + counts.get(name + REST, 0) / REST_UNIT
