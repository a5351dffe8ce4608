"""The section of training, its changes from a Round on, and the learning rate of each step.

The values of ``Training`` travel to devices in an Assignment, so the Plan and the Assignment check them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Annotated, Final

from fanin.protos.errors import InvalidPlan
from fanin.protos.fields import Mark
from fanin.protos.plans.entries import kind_of
from fanin.protos.plans.flower import FlowerPlan, strategy_keys
from fanin.protos.plans.keys import Key, keys_of, shown
from fanin.protos.plans.sections import MAX_RATE, MAX_SEED, MAX_TIMES, MIN_RATE

MAX_CHANGES: Final = 64
MAX_EPOCHS: Final = 10_000
"""With more epochs a device would train for weeks, so a larger number is a mistake or an attack."""
STEP: Final = "step"
STEP_DECAYS: Final = ("", "linear", "cosine", STEP)
PERSONAL: Final = "../howto/personal.md"
STEP_RATES: Final = "../explanation/rounds.md#a-learning-rate-that-changes-within-a-round"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Training on a device. The draws of graphs derive from (seed, partition, round), those of an app do not."""

    epochs: Annotated[
        int, Key(text="Passes over the device's examples.", unit="epochs", at_least=1, at_most=MAX_EPOCHS)
    ] = 1
    learning_rate: Annotated[
        float,
        Key(
            text="Learning rate of the optimizer in the train graph, within the range of float32. Graphs need one; the "
            "default is none. A Flower app receives it as `lr`.",
            at_least=MIN_RATE,
            at_most=MAX_RATE,
        ),
    ] = 0.0
    seed: Annotated[int, Key(text="Seed of the Run.", at_least=0, at_most=MAX_SEED)] = 0
    proximal_weight: Annotated[
        float,
        Key(
            text="FedProx's mu. Above 0.0 the Bundle's App needs `Recipe(proximal=True)`.",
            at_least=0,
            at_most=MAX_RATE,
            see="../howto/recipe.md",
        ),
    ] = 0.0
    batch_size: Annotated[
        int,
        Key(
            text="Examples of a train step: the Bundle's batch size, or one of `other_batch_sizes` of its App. With "
            "another one the Run does not start. 0: the Bundle's.",
            unit="examples",
            at_least=0,
            at_most=MAX_TIMES,
        ),
    ] = 0
    optimizer: Annotated[
        dict[str, float],
        Key(
            text="Settings of the optimizer in the train graph, such as `momentum`, `weight_decay` or `beta1`, instead "
            "of those of the App.",
            see="../howto/recipe.md#optimizers",
        ),
    ] = field(default_factory=dict)
    warmup_steps: Annotated[
        int,
        Key(
            text="Number W of the first steps of a device in a Round. In step t of them, from 1, the learning rate is "
            "multiplied by t / (W + 1).",
            unit="steps",
            at_least=0,
            at_most=MAX_TIMES,
            see=STEP_RATES,
        ),
    ] = 0
    step_decay: Annotated[
        str,
        Key(
            text="How the learning rate falls over a device's steps in a Round after the first W: `linear` or `cosine` "
            "to 0, or `step`, which multiplies it by `decay_factor` after each `decay_steps`. Empty: not at all.",
            choices=STEP_DECAYS,
            see=STEP_RATES,
        ),
    ] = ""
    decay_steps: Annotated[
        int,
        Key(
            text='Steps after which `step_decay = "step"` lowers the learning rate, each time.',
            unit="steps",
            at_least=0,
            at_most=MAX_TIMES,
            see=STEP_RATES,
        ),
    ] = 0
    decay_factor: Annotated[
        float,
        Key(text='Factor of the learning rate of `step_decay = "step"`.', above=0, at_most=1, see=STEP_RATES),
    ] = 0.1
    schedule_rounds: Annotated[
        int,
        Key(
            text="Number of Rounds over which warm-up and `step_decay` extend: a device with n steps in a Round counts "
            "n steps for each Round before. 0: each Round begins again.",
            unit="Rounds",
            at_least=0,
            at_most=MAX_TIMES,
            see="../explanation/rounds.md#a-learning-rate-that-changes-over-all-steps-of-a-run",
        ),
    ] = 0
    min_work: Annotated[
        float,
        Key(
            text="Least share of its steps in a Round that a device does. A device that can do less gives up its "
            "Assignment. 0.0: at least one step; 1.0: all steps.",
            at_least=0,
            at_most=1,
            see="../howto/work.md",
        ),
    ] = 0.0
    personal_epochs: Annotated[
        int,
        Key(
            text="Passes over the device's examples, before `epochs`, that train what it does not send. With personal "
            "parameters it is FedRep: these train the personal parameters alone, and `epochs` the shared ones alone. "
            "0: `epochs` train both together.",
            unit="epochs",
            at_least=0,
            at_most=MAX_EPOCHS,
            see=PERSONAL,
        ),
    ] = 0
    ditto_weight: Annotated[
        float,
        Key(
            text="Ditto's lambda. Above 0.0, `personal_epochs` train a copy of all parameters that stays on the "
            "device, pulled towards the Version. The Bundle's App needs `Recipe(proximal=True)`.",
            at_least=0,
            at_most=MAX_RATE,
            see=PERSONAL,
        ),
    ] = 0.0


_KEYS: Final = {each.name: each.key for each in keys_of(Training)}
_REPLACED: Final = ("epochs", "proximal_weight", "batch_size", "warmup_steps", "step_decay")
"""The keys of a change that replace the keys of the same names of ``training``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledChange:
    """A change of the training on devices, or of the outer step. It applies from a Round on, until a later change. A
    key that it does not set stays as in the Round before. So do the other entries of a table.
    """

    from_round: Annotated[
        int, Key(text="The first Round with this change. Rounds that fail count, too.", at_least=1, at_most=MAX_TIMES)
    ]
    learning_rate: Annotated[float | None, _KEYS["learning_rate"]] = None
    decay: Annotated[
        float | None,
        Key(
            text="Factor of the learning rate for each Round after that one. A change that sets `learning_rate` alone "
            "ends the decay before it.",
            above=0,
            at_most=1,
        ),
    ] = None
    epochs: Annotated[int | None, _KEYS["epochs"]] = None
    proximal_weight: Annotated[float | None, _KEYS["proximal_weight"]] = None
    batch_size: Annotated[int | None, _KEYS["batch_size"]] = None
    optimizer: Annotated[dict[str, float], _KEYS["optimizer"]] = field(default_factory=dict)
    warmup_steps: Annotated[int | None, _KEYS["warmup_steps"]] = None
    step_decay: Annotated[str | None, _KEYS["step_decay"]] = None
    outer_factor: Annotated[
        float | None,
        Key(
            text="Factor of the step of the outer optimizer in that Round. It is 1 before the first change.",
            at_least=MIN_RATE,
            at_most=MAX_RATE,
            see="../howto/outer.md#a-step-size-that-changes",
        ),
    ] = None
    outer_decay: Annotated[
        float | None,
        Key(
            text="Factor of `outer_factor` for each Round after that one. A change that sets `outer_factor` alone ends "
            "the decay before it.",
            above=0,
            at_most=1,
            see="../howto/outer.md#a-step-size-that-changes",
        ),
    ] = None
    flower: Annotated[FlowerPlan, Mark.SPARSE] = field(default_factory=FlowerPlan)


def training_in(training: Training, schedule: Sequence[ScheduledChange], round_number: int) -> Training:
    """Return the settings of training in a Round.

    The learning rate stays within the range of float32; without one, there is none in any Round. Powers of ``decay``
    are computed as products, so that the results of all machines are bit-identical.

    Args:
        training: The settings without a schedule.
        schedule: The changes, in the order of their Rounds.
        round_number: The Round.
    """
    optimizer = dict(training.optimizer)
    changes = _changes_until(schedule, round_number)
    for change in changes:
        optimizer |= change.optimizer
    steps = [(change.from_round, change.learning_rate, change.decay) for change in changes]
    rate = _rate_in(training.learning_rate, steps, round_number)
    values = {name: value for each in changes for name in _REPLACED if (value := getattr(each, name)) is not None}
    return replace(training, learning_rate=rate, optimizer=optimizer, **values)


def outer_factor_in(schedule: Sequence[ScheduledChange], round_number: int) -> float:
    """Return the factor of the outer step in a Round. Its decay is that of the learning rate in ``training_in``."""
    changes = _changes_until(schedule, round_number)
    return _rate_in(1.0, [(each.from_round, each.outer_factor, each.outer_decay) for each in changes], round_number)


def flower_in(flower: FlowerPlan, schedule: Sequence[ScheduledChange], round_number: int) -> FlowerPlan:
    """Return the settings of Flower apps in a Round. See ``training_in``."""
    settings = (flower, *(change.flower for change in _changes_until(schedule, round_number)))
    config = {name: value for each in settings for name, value in each.config.items()}
    return FlowerPlan(config=config, roles=flower.roles)


def _changes_until(schedule: Sequence[ScheduledChange], round_number: int) -> tuple[ScheduledChange, ...]:
    return tuple(takewhile(lambda change: change.from_round <= round_number, schedule))


def rate_of_step(training: Training, step: int, num_steps: int, round_number: int) -> float:
    """Return the learning rate of one step of a device.

    It is equal to torch's ``SequentialLR`` of ``LinearLR`` for the warm-up, and for the other steps of ``LinearLR`` to
    0, ``CosineAnnealingLR`` or ``StepLR``. With ``schedule_rounds``, the steps of all Rounds are those of one schedule.
    After its end, the rate stays that of its last step.

    Args:
        training: The settings of the Round.
        step: Number of the step in the Round, from 0.
        num_steps: Number of the device's steps in a Round, also of those that it leaves out.
        round_number: The Round, from 1.

    Reference:
        Goyal et al. 2017, arXiv 1706.02677, section 2.2 (warm-up). Loshchilov and Hutter 2017, arXiv 1608.03983,
        equation 5 (cosine).
    """
    if training.schedule_rounds:
        total = num_steps * training.schedule_rounds
        step, num_steps = min((round_number - 1) * num_steps + step, total - 1), total
    warmup, rate = training.warmup_steps, training.learning_rate
    if step < warmup:
        return rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(num_steps - warmup, 1)
    match training.step_decay:
        case "linear":
            return rate * (1.0 - progress)
        case "cosine":
            return rate * 0.5 * (1.0 + math.cos(math.pi * progress))
        case "step":
            return _decayed(rate, training.decay_factor, (step - warmup) // training.decay_steps)
        case _:
            return rate


def mean_rate(training: Training, num_steps: int, planned_steps: int, round_number: int) -> float:
    """Return the mean learning rate of the first steps of a device in a Round. See ``rate_of_step``."""
    if not num_steps or not (training.warmup_steps or training.step_decay):
        return training.learning_rate
    rates = (rate_of_step(training, step, planned_steps, round_number) for step in range(num_steps))
    return math.fsum(rates) / num_steps


def check_changes(flower: FlowerPlan, training: Training, schedule: Sequence[ScheduledChange]) -> None:
    """Raise InvalidPlan for too many changes, Rounds that do not increase, roles, a strategy, an entry of ``config``
    that every Round does not have with one type, a change of no rate, steps of the rate without their length, or
    Ditto without its epochs.
    """
    if training.ditto_weight and not training.personal_epochs:
        raise InvalidPlan(
            f"plan: got training.ditto_weight {training.ditto_weight:g} with training.personal_epochs 0, expected at "
            "least 1: they train the copy of the device; add training.personal_epochs",
            code="FN-1831",
        )
    if STEP in (training.step_decay, *(change.step_decay for change in schedule)) and not training.decay_steps:
        raise InvalidPlan(
            'plan: got step_decay "step" with training.decay_steps 0, expected at least 1; add training.decay_steps',
            code="FN-1812",
        )
    rounds = [change.from_round for change in schedule]
    if len(rounds) > MAX_CHANGES or sorted(set(rounds)) != rounds:
        raise InvalidPlan(
            f"plan: schedule: got the Rounds {rounds[: MAX_CHANGES + 1]}, expected at most {MAX_CHANGES} in increasing "
            "order, each once; sort them or remove some",
            code="FN-0235",
        )
    for index, change in enumerate(schedule):
        if flower.strategy and (change.outer_factor or change.outer_decay):
            raise InvalidPlan(
                f"plan: schedule.{index}: got outer_factor or outer_decay with flower.strategy "
                f"{shown(flower.strategy)}, expected none: a strategy makes the next parameters itself; remove them",
                code="FN-0922",
            )
        if not training.learning_rate and (change.learning_rate or change.decay):
            raise InvalidPlan(
                f"plan: schedule.{index}: got a learning rate or a decay, but the Rounds before have none, expected "
                "one; add training.learning_rate",
                code="FN-0201",
            )
        if change.flower.roles:
            raise InvalidPlan(
                f"plan: schedule.{index}.flower.roles: got {sorted(change.flower.roles)}, expected none: an array has "
                "one role in all Rounds; move it to flower.roles",
                code="FN-0235",
            )
        if names := strategy_keys(change.flower):
            raise InvalidPlan(
                f"plan: schedule.{index}.flower.{names[0]}: got {shown(getattr(change.flower, names[0]))}, expected "
                f"none: a run has one strategy in all Rounds; move it to flower.{names[0]}",
                code="FN-0235",
            )
        for name, value in change.flower.config.items():
            path = f"schedule.{index}.flower.config.{name}"
            if name not in flower.config:
                raise InvalidPlan(
                    f"plan: {path}: got {shown(value)}, but flower.config has no entry {name!r} for the Rounds before, "
                    f"expected one of {sorted(flower.config)}; add it to flower.config",
                    code="FN-0235",
                )
            if kind_of(value) != kind_of(flower.config[name]):
                raise InvalidPlan(
                    f"plan: {path}: got {shown(value)}, expected {kind_of(flower.config[name])} as in flower.config; "
                    "write both alike",
                    code="FN-0235",
                )


def late_changes(schedule: Sequence[ScheduledChange], max_rounds: int) -> tuple[str, ...]:
    """Return a note on each change after the last Round of a Run whose Rounds all succeed."""
    return tuple(
        f"schedule.{index}: from_round is {change.from_round}, and the last Round of the plan is {max_rounds} "
        "(stop.max_rounds); the change applies only if Rounds fail, which count too, or if more Rounds are added "
        "(fanin resume --rounds)"
        for index, change in enumerate(schedule)
        if change.from_round > max_rounds
    )


def _rate_in(rate: float, changes: Sequence[tuple[int, float | None, float | None]], round_number: int) -> float:
    """Return a rate in a Round after changes of the rate and its decay, each from a Round on."""
    decay, since = 1.0, round_number
    for from_round, changed, changed_decay in changes:
        rate = changed or _decayed(rate, decay, from_round - since)
        decay = changed_decay or (decay if changed is None else 1.0)
        since = from_round
    return _decayed(rate, decay, round_number - since)


def _decayed(rate: float, decay: float, num_rounds: int) -> float:
    factor, power = 1.0, decay
    while num_rounds > 0:
        if num_rounds & 1:
            factor *= power
        power, num_rounds = power * power, num_rounds >> 1
    return max(rate * factor, MIN_RATE) if rate else 0.0
