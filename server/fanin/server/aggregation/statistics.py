"""The statistics of a Round for its record: evaluation, training loss and runtimes.

The functions read the sums over the Round's Updates. The results are in the event ``VersionPublished``. A device may
leave a statistic out: a Flower app may report no loss. So each mean is over the examples of the devices that report its
sum: ``with_examples`` counts them.

An evaluation can pause or end a Run. So an Update's loss and squared errors count only if they are in the range of the
others (``credible_counts``), as an Update moves the grid only within the reach of the others (``codecs.grid``). The
range follows a value that more than a third of the Updates attain, so a smaller number of malicious devices cannot
widen it. Predicted labels always count: they are at most the examples.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.codecs.stages import added_statistics, stages_of
from fanin.edge.codecs.statistics import CLASS_COUNTS, SQUARES, declared
from fanin.edge.runtimes.evaluations import OF_TRAINING, OF_VALIDATIONS, REST, SQUARES_INT8, quality_of
from fanin.edge.runtimes.quality import SMALL_ERROR, Quality
from fanin.protos.messages import (
    CLIP_BITS,
    EVAL_CORRECT_FLOAT,
    EVAL_EXAMPLES,
    EVAL_LOSS,
    EVAL_PREDICTIONS,
    EXAMPLES,
    LOSS_UNIT,
    MAX_SATURATED_SHARE,
    SATURATED,
    TRAIN_LOSS,
    TRAINED,
    DeviceSpread,
    Evaluation,
    SaturatedDevices,
    Statistic,
    saturated_devices,
)
from fanin.protos.plans import Plan

SPREADS: Final = MappingProxyType(
    {
        "train_loss": (TRAIN_LOSS, EXAMPLES, LOSS_UNIT),
        "validation_loss": (EVAL_LOSS, EVAL_EXAMPLES, LOSS_UNIT),
        "validation_accuracy": (EVAL_CORRECT_FLOAT, EVAL_PREDICTIONS, 1),
    }
)
"""The metrics whose distribution over devices is recorded: the count of its sum, that of its number, and the unit."""
MAX_RUNTIMES: Final = 50
"""Runtimes that are named in one event. Devices choose these names, and one message holds them all."""
OTHER_RUNTIMES: Final = "other"
MAX_RISE: Final = 1e9
"""Largest reported rise of the squared error, in percent. If the float model has no error, the rise is infinite, and
JSON has no infinity."""

CREDIBLE_FACTOR: Final = 16.0
"""A loss or squared error of an example counts up to this many times the value that more than a third of the Updates
attain. Honest devices differ by less, unless their data have different scales."""
LEAST_LOSS: Final = 1.0
"""A loss of a classifier up to ``CREDIBLE_FACTOR`` times this many nats always counts: a device may have examples that
the others lack. A guess among a million classes costs 14 nats."""


MAY_LACK: Final = frozenset(
    {TRAIN_LOSS, EVAL_EXAMPLES, EVAL_LOSS, *CLASS_COUNTS, *SQUARES, *(name + REST for name in SQUARES)}
)
"""The statistics that a device may lack."""


def statistics_of(plan: Plan, num_labels: int, num_values: int) -> tuple[Statistic, ...]:
    """Return the statistics of a Run, with their bounds. With a mechanism of privacy, an Update has its weight alone,
    and a clip bit if the clip norm adapts.

    Args:
        plan: The Plan of the Run.
        num_labels: Largest number of labels of one example, 0 for a model of values.
        num_values: Number of values of an Update.
    """
    if plan.privacy:
        weight = Statistic(name=EXAMPLES, bound=plan.max_examples)
        return (weight, Statistic(name=CLIP_BITS, bound=1)) if plan.privacy.target_quantile else (weight,)
    of_plan = {each.name for each in plan.statistics}
    of_stages = (name for name in added_statistics(stages_of(plan.stages)) if name not in of_plan)
    return declared(
        (*plan.statistics, *(Statistic(name=name, bound=plan.max_sum) for name in of_stages)),
        max_examples=plan.max_examples,
        max_sum=plan.max_sum,
        num_labels=num_labels,
        num_values=num_values,
    )


def with_examples(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the statistics of one Update, with the number of examples of each sum over examples that it reports.

    Without ``trained_examples``, the device trained on as many examples as count.
    """
    numbers = {TRAINED: counts.get(TRAINED, counts.get(EXAMPLES, 0))}
    for name in counts:
        if name == TRAIN_LOSS or name.startswith(OF_TRAINING):
            numbers[examples_key(name)] = counts.get(EXAMPLES, 0)
        elif name == EVAL_LOSS or name.startswith(OF_VALIDATIONS):
            numbers[examples_key(name)] = counts.get(EVAL_EXAMPLES, 0)
    return {**counts, **numbers}


def tail_counts(names: Sequence[str], sums: Sequence[int]) -> dict[str, int]:
    """Return the statistics of a masked sum, with the number of examples of each sum over examples.

    A device without a statistic sends 0. So a sum of 0 of a loss or of an evaluation is one that no device reported.
    """
    counts = dict(zip(names, sums, strict=True))
    return with_examples({name: count for name, count in counts.items() if count or name not in MAY_LACK})


def examples_key(name: str) -> str:
    """Return the key of the number of examples of a sum. The name of a statistic has no space."""
    return f"examples of {name}"


def reported_examples(counts: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """Return the number of examples of each statistic that is a sum over examples, of the devices that report it.

    Args:
        counts: Sums of the Updates' statistics (``with_examples``).
        names: The names of the statistics.
    """
    return {name: counts[key] for name in names if (key := examples_key(name)) in counts}


def evaluation_of(counts: Mapping[str, int], num_classes: int) -> Evaluation | None:
    """Return the evaluation of the Round's base Version on the devices' validation data, or None without a loss.

    Args:
        counts: Sums of the Updates' statistics (``with_examples``), by name.
        num_classes: Number of classes of the Bundle, 0 for a model of values. It is read from the Bundle, because
            devices must not decide the kind of model.
    """
    sums, of_values = quality_of(counts), not num_classes and SQUARES_INT8 in counts
    num_examples = counts.get(examples_key(EVAL_LOSS), 0)
    if num_examples <= 0:
        return None
    return Evaluation(
        num_examples=num_examples,
        loss=sums.loss_sum / num_examples,
        accuracy_float=sums.accuracy_float,
        accuracy_int8=sums.accuracy_int8,
        int8_agreement=sums.agreement,
        num_labels=sums.num_predictions,
        int8_rise_percent=min(sums.rise_percent, MAX_RISE) if of_values else None,
    )


def device_spreads_of(updates: Iterable[Mapping[str, int]]) -> dict[str, DeviceSpread]:
    """Return the distributions over the devices of the training loss, and of the base Version's loss and accuracy.

    An operator looks for devices that differ. So the values of all devices count, also of those that are not credible.

    Args:
        updates: The statistics of each Update of the Round, in the clear.
    """
    values: dict[str, list[float]] = {name: [] for name in SPREADS}
    for counts in updates:
        for name, (sum_of, num_of, unit) in SPREADS.items():
            if sum_of in counts and (num := counts.get(num_of, 0)) > 0:
                values[name].append(counts[sum_of] / unit / num)
    return {name: _spread(each) for name, each in values.items() if each}


def saturated_devices_of(updates: Mapping[str, Mapping[str, int]], num_values: int) -> SaturatedDevices:
    """Return the devices that lost more than ``MAX_SATURATED_SHARE`` of their values at the ends of the grid's range.

    Args:
        updates: The statistics of each Update of the Round, in the clear, by device.
        num_values: Number of values of an Update.
    """
    limit = MAX_SATURATED_SHARE * num_values
    return saturated_devices(
        {device: num for device, counts in updates.items() if (num := counts.get(SATURATED, 0)) > limit}
    )


def _spread(values: Sequence[float]) -> DeviceSpread:
    smallest, p10, median, p90, largest = np.quantile(values, (0.0, 0.1, 0.5, 0.9, 1.0)).tolist()
    mean = math.fsum(values) / len(values)
    return DeviceSpread(num_devices=len(values), mean=mean, min=smallest, p10=p10, median=median, p90=p90, max=largest)


def credible_counts(updates: Sequence[Mapping[str, int]], num_classes: int) -> dict[str, int]:
    """Return the sums of the Updates' statistics, without losses and errors that are beyond the range of the others.

    Args:
        updates: The statistics of each Update of the Round.
        num_classes: Number of classes of the Bundle, 0 for a model of values.
    """
    evaluated = [counts for counts in updates if counts.get(EVAL_EXAMPLES, 0) > 0]
    means = [_means(quality_of(counts)) for counts in evaluated]
    # A Flower app may report no loss.
    losses = [values[0] for counts, values in zip(evaluated, means, strict=True) if EVAL_LOSS in counts]
    limits = (_loss_limits(losses, num_classes), *_error_limits(means))
    sums = Counter[str]()
    for counts, values in zip(evaluated, means, strict=True):
        if all(low <= value <= high for value, (low, high) in zip(values, limits, strict=True)):
            sums.update(with_examples(counts))
        elif num_classes:
            sums.update(with_examples({name: count for name, count in counts.items() if name != EVAL_LOSS}))
    return dict(sums)


def _means(quality: Quality) -> tuple[float, float, float, float]:
    """Return the loss and the squared errors of an example."""
    sums = (quality.loss_sum, quality.squares_float, quality.squares_int8, quality.squares_wanted)
    loss, in_float, in_int8, wanted = (value / quality.num_examples for value in sums)
    return loss, in_float, in_int8, wanted


def _loss_limits(losses: Sequence[float], num_classes: int) -> tuple[float, float]:
    largest = _attained([abs(loss) for loss in losses])
    limit = CREDIBLE_FACTOR * (max(largest, LEAST_LOSS) if num_classes else largest)
    # A cross entropy is not negative. One negative loss would be the best one of the Run for ever.
    is_positive = num_classes > 0 and _attained([-loss for loss in losses]) <= 0.0
    return 0.0 if is_positive else -limit, limit


def _error_limits(means: Sequence[tuple[float, float, float, float]]) -> tuple[tuple[float, float], ...]:
    in_float, in_int8, wanted = (_attained([values[place] for values in means]) for place in (1, 2, 3))
    error = max(in_float, in_int8, SMALL_ERROR * wanted)
    spread = max(in_float, in_int8, wanted)
    return tuple((0.0, CREDIBLE_FACTOR * limit) for limit in (error, error, spread))


def _attained(values: Sequence[float]) -> float:
    """Return the largest value that more than a third of the Updates attain, 0.0 without an Update."""
    return sorted(values, reverse=True)[len(values) // 3] if values else 0.0


def train_loss_of(counts: Mapping[str, int]) -> float:
    """Return the mean training loss in nats per example of the devices that report one, 0.0 if none does."""
    num_examples = counts.get(examples_key(TRAIN_LOSS), 0)
    return counts.get(TRAIN_LOSS, 0) / LOSS_UNIT / num_examples if num_examples > 0 else 0.0


def runtimes_of(names: Iterable[str]) -> Mapping[str, int]:
    """Return the number of Updates for each runtime: the ``MAX_RUNTIMES`` most frequent, and ``OTHER_RUNTIMES``."""
    counts = Counter(names)
    frequent = dict(counts.most_common(MAX_RUNTIMES))
    num_other = counts.total() - sum(frequent.values())
    return frequent | ({OTHER_RUNTIMES: num_other} if num_other else {})
