"""The settings of training that change from a Round on, and the learning rate of each step within a Round."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final

from fanin.protos.errors import InvalidPlan
from fanin.protos.plans.keys import Key
from fanin.protos.plans.sections import MAX_EPOCHS, MAX_RATE, MAX_TIMES, MIN_RATE, Training

MAX_CHANGES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledChange:
    """A change of the training on devices. It applies from a Round on, until a later change."""

    from_round: Annotated[
        int, Key(text="The first Round with this change. Rounds that fail count, too.", at_least=1, at_most=MAX_TIMES)
    ]
    learning_rate: Annotated[
        float,
        Key(text="The learning rate in that Round. 0.0: the one of the Round before.", at_least=0, at_most=MAX_RATE),
    ] = 0.0
    decay: Annotated[
        float,
        Key(text="Factor of the learning rate for each Round after that one.", above=0, at_most=1),
    ] = 1.0
    epochs: Annotated[
        int,
        Key(
            text="Passes over the device's examples. 0: those of the Round before.",
            unit="epochs",
            at_least=0,
            at_most=MAX_EPOCHS,
        ),
    ] = 0
    batch_size: Annotated[
        int,
        Key(
            text="Examples of a train step: one of the batch sizes of the Bundle. With another one the Run does not "
            "start. 0: those of the Round before.",
            unit="examples",
            at_least=0,
            at_most=MAX_TIMES,
        ),
    ] = 0


def training_in(training: Training, schedule: Sequence[ScheduledChange], round_number: int) -> Training:
    """Return the settings of training in a Round.

    The learning rate stays within the range of float32. Powers of ``decay`` are computed as products, so that the
    results of all machines are bit-identical.

    Args:
        training: The settings without a schedule.
        schedule: The changes, in the order of their Rounds.
        round_number: The Round.
    """
    rate, epochs, batch_size = training.learning_rate, training.epochs, training.batch_size
    decay, since = 1.0, round_number
    for change in schedule:
        if change.from_round > round_number:
            break
        rate = change.learning_rate or _decayed(rate, decay, change.from_round - since)
        epochs, batch_size = change.epochs or epochs, change.batch_size or batch_size
        decay, since = change.decay, change.from_round
    rate = _decayed(rate, decay, round_number - since)
    return replace(training, learning_rate=rate, epochs=epochs, batch_size=batch_size)


def rate_of_step(training: Training, step: int, num_steps: int) -> float:
    """Return the learning rate of one step of a device within a Round.

    It is equal to torch's ``SequentialLR`` of ``LinearLR`` for the warm-up, and ``LinearLR`` to 0 or
    ``CosineAnnealingLR`` for the other steps.

    Args:
        training: The settings of the Round.
        step: Number of the step in the Round, from 0.
        num_steps: Number of the device's steps in the Round.

    Reference:
        Goyal et al. 2017, arXiv 1706.02677, section 2.2 (warm-up). Loshchilov and Hutter 2017, arXiv 1608.03983,
        equation 5 (cosine).
    """
    warmup = training.warmup_steps
    if step < warmup:
        return training.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(num_steps - warmup, 1)
    match training.step_decay:
        case "linear":
            return training.learning_rate * (1.0 - progress)
        case "cosine":
            return training.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            return training.learning_rate


def mean_rate(training: Training, num_steps: int) -> float:
    """Return the mean learning rate of a device's steps in a Round. See ``rate_of_step``."""
    if not num_steps or not (training.warmup_steps or training.step_decay):
        return training.learning_rate
    return math.fsum(rate_of_step(training, step, num_steps) for step in range(num_steps)) / num_steps


def check_changes(schedule: Sequence[ScheduledChange]) -> None:
    """Raise InvalidPlan for too many changes, Rounds that do not increase, or a learning rate below float32's range."""
    rounds = [change.from_round for change in schedule]
    if len(rounds) > MAX_CHANGES or sorted(set(rounds)) != rounds:
        raise InvalidPlan(
            f"plan: schedule: got the Rounds {rounds[: MAX_CHANGES + 1]}, expected at most {MAX_CHANGES} in increasing "
            "order, each once; sort them or remove some"
        )
    for change in schedule:
        if 0.0 < change.learning_rate < MIN_RATE:
            raise InvalidPlan(
                f"plan: schedule: got learning_rate {change.learning_rate!r} from Round {change.from_round} on, "
                f"expected 0.0 or at least {MIN_RATE!r}"
            )


def _decayed(rate: float, decay: float, num_rounds: int) -> float:
    factor, power = 1.0, decay
    while num_rounds > 0:
        if num_rounds & 1:
            factor *= power
        power, num_rounds = power * power, num_rounds >> 1
    return max(rate * factor, MIN_RATE)
