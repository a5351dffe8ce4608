"""The Plan, and the conditions between its sections.

Above all the constructor proves that the integer sum of a Round cannot overflow. The values of an Update have ``bits``
bits including the sign. A device may encode them up to W bits coarser, and the coordinator multiplies each by a weight.
The sum stays below 2^62 in magnitude, within int64 with one bit to spare, if

    (bits - 1) + W + log2(max total weight) <= 62

The largest total weight follows from this: ``Plan.max_total_examples``, in examples. An example weighs 1, or 256 in a
Plan that allows staleness, which can only lower the weight. A Round with more examples divides all its weights by one
power of two (``server.aggregation.weights``). So a Plan is valid if its largest total leaves 8 bits for each Update.
"""

from dataclasses import dataclass, field
from typing import Annotated, Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from fanin.protos.errors import InvalidPlan
from fanin.protos.fields import Mark
from fanin.protos.names import NAME_FORM, is_name
from fanin.protos.plans.cohort import CohortPlan, check_quorum
from fanin.protos.plans.evaluation import EvaluationPlan, check_data, check_metrics, check_sets
from fanin.protos.plans.flower import FlowerPlan, memory_notes, strategy_keys
from fanin.protos.plans.keys import Key, keys_of, range_problem, shown
from fanin.protos.plans.participants import ParticipantsPlan
from fanin.protos.plans.privacy import COINS, PrivacyPlan, check_clipping, check_cohort
from fanin.protos.plans.retention import RetentionPlan, check_needed
from fanin.protos.plans.schedule import ScheduledChange, Training, check_changes, flower_in, late_changes, training_in
from fanin.protos.plans.sections import (
    CODEC_BITS,
    DEVICES,
    EXPORT,
    MAX_COUNT,
    MAX_SUM,
    PLAIN_PROTOCOL,
    SECAGG_PROTOCOL,
    SUM_BITS,
    AggregationPlan,
    CodecSpec,
    Int8Plan,
    RoundPlan,
    StageSpec,
    Statistic,
    StopPlan,
)
from fanin.protos.texts import counted

STALE_UNIT: Final = 256
"""The integer weight of one example of a fresh Update in a Plan that allows staleness. 8 bits resolve the weights of
stale Updates."""
LEAST_STEPS: Final = 256
"""Steps that the head-room must have for each Update of a Round. If all Updates have as many examples, rounding changes
the weight of none of them by more than 1/512."""
HEADROOM_BITS: Final = 62
MAX_STAGES: Final = 8
MAX_STATISTICS: Final = 32
OUR_STATISTICS: Final = frozenset(
    {"examples", "trained_examples", "train_loss_q16", "train_loss_examples", "rounded", "saturated"}
)
REPLACED_KEYS: Final = ("rule", "rule_options", "outer_optimizer", "outer_options", "max_staleness", "weights")
"""Keys of ``[aggregation]`` that a strategy replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A complete Plan."""

    name: Annotated[
        str,
        Key(text="Name of the Run. Its id is this name and a random number.", form=NAME_FORM, is_valid=is_name),
    ] = "run"
    cohort: CohortPlan
    training: Training
    schedule: tuple[ScheduledChange, ...] = ()
    codec: CodecSpec
    stages: tuple[StageSpec, ...] = ()
    statistics: tuple[Statistic, ...] = ()
    aggregation: AggregationPlan
    stop: StopPlan
    evaluation: EvaluationPlan = field(default_factory=EvaluationPlan)
    int8: Annotated[Int8Plan, Mark.SPARSE] = field(default_factory=Int8Plan)
    flower: Annotated[FlowerPlan, Mark.SPARSE] = field(default_factory=FlowerPlan)
    retention: Annotated[RetentionPlan, Mark.SPARSE] = field(default_factory=RetentionPlan)
    participants: Annotated[ParticipantsPlan, Mark.SPARSE] = field(default_factory=ParticipantsPlan)
    round: Annotated[RoundPlan, Mark.SPARSE] = field(default_factory=RoundPlan)
    privacy: Annotated[PrivacyPlan, Mark.SPARSE] = field(default_factory=PrivacyPlan)

    def __post_init__(self) -> None:
        problem = (
            range_problem(self, "")
            or range_problem(self.training, "training")
            or range_problem(self.codec, "codec")
            or range_problem(self.flower, "flower")
            or range_problem(self.round, "round")
        )
        for index, stage in enumerate(self.stages):
            problem = problem or range_problem(stage, f"stages.{index}")
        for index, statistic in enumerate(self.statistics):
            problem = problem or range_problem(statistic, f"statistics.{index}")
        for index, change in enumerate(self.schedule):
            path = f"schedule.{index}"
            problem = problem or range_problem(change, path) or range_problem(change.flower, f"{path}.flower")
        if problem:
            raise InvalidPlan(f"plan: {problem}", code="FN-0201")
        check_headroom(self)
        check_stages(self)
        check_statistics(self)
        check_schedule(self)
        check_strategy(self)
        check_retention(self)
        check_participants(self)
        check_ranges(self)
        check_privacy(self)

    @staticmethod
    def check_message(message: Message) -> None:
        """Refuse a Plan with a key of another version: it would be ignored, and the Run would compute something else.

        Raises:
            InvalidPlan: The message, or a section of it, has a field that is not known here.
        """
        sections = {f"plan: {field.name}": value for field, value in message.ListFields() if isinstance(value, Message)}
        for section, value in ({"plan": message} | sections).items():
            if len(unknown := UnknownFieldSet(value)):
                raise InvalidPlan(
                    f"{section}: got field {unknown[0].field_number}, which this version of fanin does not know, "
                    "expected the keys of docs/reference/plan.md; use the version of fanin that wrote the Plan",
                    code="FN-0202",
                )

    def training_in(self, round_number: int) -> Training:
        """Return the settings of training in a Round: ``training`` with the changes of the schedule."""
        return training_in(self.training, self.schedule, round_number)

    def flower_in(self, round_number: int) -> FlowerPlan:
        """Return the settings of Flower apps in a Round: ``flower`` with the changes of the schedule."""
        return flower_in(self.flower, self.schedule, round_number)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the person who starts the Run: the memory of a strategy, and settings that may be mistakes."""
        return (*late_changes(self.schedule, self.stop.max_rounds), *memory_notes(self.flower, self.cohort.buffer))

    @property
    def max_examples(self) -> int:
        """Largest number of examples that one Update counts as: that of the Plan, or the largest one of a device."""
        return self.aggregation.limit_in(self.round.protocol) or MAX_COUNT

    @property
    def max_sum(self) -> int:
        """Largest magnitude of a sum over examples in one Update. The sum over a Round fits in 62 bits."""
        return min(MAX_SUM, (1 << SUM_BITS) // self.cohort.buffer)

    @property
    def weight_unit(self) -> int:
        """The integer weight of one example of a fresh Update."""
        return STALE_UNIT if self.aggregation.max_staleness else 1

    @property
    def max_total_examples(self) -> int:
        """Largest number of examples of a Round whose integer sum fits, 0 if there is none."""
        value_bits = self.codec.bits - 1 + self.codec.max_shift
        return (1 << HEADROOM_BITS - value_bits) // self.weight_unit if value_bits <= HEADROOM_BITS else 0


def check_headroom(plan: Plan) -> None:
    """The integer sum of a Round fits in 62 bits. It needs the sum of three numbers: the bits of a value without its
    sign (31 for `fixed32`, 15 for `int16`, 7 for `int8` and `topk`, 3 for `int4`), `codec.max_shift`, and the bits of
    the total weight. These must be enough for `cohort.buffer` x 256, and x 256 again with `aggregation.max_staleness`.
    With `aggregation.max_examples` below 256, this number replaces the first 256.
    """
    bits, unit = plan.codec.bits, plan.weight_unit
    least_steps = min(LEAST_STEPS, plan.max_examples)
    if plan.cohort.buffer * least_steps > plan.max_total_examples:
        weight_bits = (plan.cohort.buffer * least_steps * unit - 1).bit_length()
        raise InvalidPlan(
            f"plan: the sum of a Round could overflow: ({bits} - 1) bits of {plan.codec.name} + max_shift "
            f"{plan.codec.max_shift} + {weight_bits} bits of weight (buffer {plan.cohort.buffer} x {least_steps} steps"
            f"{f' x {unit} for staleness' if unit > 1 else ''}) = {bits - 1 + plan.codec.max_shift + weight_bits}, "
            f"expected at most {HEADROOM_BITS}; lower max_shift or buffer",
            code="FN-0206",
        )


def check_stages(plan: Plan) -> None:
    """There are at most 8 stages, each at most once. The codec is no stage: `codec.name` names the only part that
    makes a payload. With stages, `aggregation.max_staleness` is 0, because a device must know the fate of its last
    Update before it begins the next one.
    """
    names = [stage.name for stage in plan.stages]
    if len(names) > MAX_STAGES or len(set(names)) < len(names):
        raise InvalidPlan(
            f"plan: stages: got {shown(names)}, expected at most {MAX_STAGES} of different names; remove stages",
            code="FN-0220",
        )
    if payloads := sorted(set(names) & {*CODEC_BITS, plan.codec.name}):
        raise InvalidPlan(
            f"plan: stages: got {payloads[0]!r}, a second codec in addition to codec.name = {plan.codec.name!r}, "
            "expected one part that writes the payload; remove the stage, or set codec.name",
            code="FN-0221",
        )
    if names and plan.aggregation.max_staleness:
        raise InvalidPlan(
            f"plan: got aggregation.max_staleness {plan.aggregation.max_staleness} with the stages {shown(names)}, "
            "expected 0; set it to 0 or remove the stages",
            code="FN-0222",
        )


def check_statistics(plan: Plan) -> None:
    """There are at most 32 statistics, each once. The names that fanin uses itself are not among them: `examples`,
    `trained_examples`, `train_loss_q16`, `train_loss_examples`, `rounded`, `saturated`, and all that begin with
    `eval_`. A bound times `cohort.buffer` is at most 2^62, so that the sum of a Round fits.
    """
    names = [statistic.name for statistic in plan.statistics]
    if len(names) > MAX_STATISTICS or len(set(names)) < len(names):
        raise InvalidPlan(
            f"plan: statistics: got {shown(names)}, expected at most {MAX_STATISTICS} of different names; remove some",
            code="FN-0220",
        )
    if reserved := [name for name in names if name in OUR_STATISTICS or name.startswith("eval_")]:
        raise InvalidPlan(
            f"plan: statistics: got {reserved[0]!r}, which fanin declares itself, expected other names; rename it",
            code="FN-0229",
        )
    if large := [each for each in plan.statistics if each.bound > plan.max_sum]:
        raise InvalidPlan(
            f"plan: statistics: got the bound {large[0].bound} of {large[0].name!r} with a buffer of "
            f"{plan.cohort.buffer}, expected at most {plan.max_sum}; lower one of them",
            code="FN-0206",
        )


def check_schedule(plan: Plan) -> None:
    """A schedule has at most 64 changes, in the order of their Rounds. An entry of `flower.config` in it is also in
    `[flower.config]`, with the same type, so each Round has it. `flower.roles` and the strategy never change. A change
    of the learning rate needs `training.learning_rate`. With `step_decay = "step"`, `training.decay_steps` is above 0.
    With `flower.strategy`, no change has `outer_factor`.
    """
    check_changes(plan.flower, plan.training, plan.schedule)


def check_strategy(plan: Plan) -> None:
    """With `flower.strategy`, `rule`, `rule_options`, `outer_optimizer`, `outer_options` and `max_staleness` of
    `[aggregation]` have their defaults: the strategy replaces rule and optimizer, and compares Updates of one Round.
    Without it, the other keys of the strategy have their defaults.
    """
    keys, name = strategy_keys(plan.flower), plan.flower.strategy
    if keys and not name:
        raise InvalidPlan(
            f"plan: got flower.{keys[0]} without flower.strategy, expected both; add the strategy", code="FN-0922"
        )
    defaults = {key.name: key.default for key in keys_of(AggregationPlan)}
    changed = [key for key in REPLACED_KEYS if getattr(plan.aggregation, key) != defaults[key]]
    if name and changed:
        raise InvalidPlan(
            f"plan: got flower.strategy {shown(name)} with aggregation.{changed[0]}, expected one of them: a strategy "
            "makes the next parameters itself, of Updates of one Round; remove one",
            code="FN-0922",
        )


def check_retention(plan: Plan) -> None:
    """With `retention.keep_updates` above 0, `retention.keep_versions` is above it by 1, and by
    `aggregation.max_staleness`: `fanin verify` folds an Update into the Version that it was trained from.
    """
    check_needed(plan.retention, plan.aggregation.max_staleness)


def check_participants(plan: Plan) -> None:
    """`participants` requires at most `cohort.buffer` devices. With `participants.required`, `cohort.buffer` equals
    `cohort.concurrency` and `aggregation.max_staleness` is 0: otherwise other devices could fill the Round first.
    `cohort.max_extension_s` is 0 if Updates may be late, because a Round does not wait for these.
    """
    participants, cohort = plan.participants, plan.cohort
    if participants.most > cohort.buffer:
        raise InvalidPlan(
            f"plan: participants: got {counted(participants.most, 'required device')}, expected at most the "
            f"{cohort.buffer} of cohort.buffer; raise it, or require fewer",
            code="FN-1502",
        )
    staleness = plan.aggregation.max_staleness
    if participants.required and (cohort.buffer < cohort.concurrency or staleness):
        raise InvalidPlan(
            f"plan: participants.required: got it with cohort.buffer {cohort.buffer}, cohort.concurrency "
            f"{cohort.concurrency} and aggregation.max_staleness {staleness}, expected a buffer that equals the "
            "concurrency, and 0: other devices could fill the Round first; change these keys",
            code="FN-1503",
        )
    if cohort.max_extension_s and staleness:
        raise InvalidPlan(
            f"plan: cohort.max_extension_s: got {cohort.max_extension_s:g} with aggregation.max_staleness {staleness}, "
            "expected one of them: with staleness, a late Update counts in the next Round; remove one",
            code="FN-1503",
        )


def check_ranges(plan: Plan) -> None:
    """With `int8.ranges = "data"`, `evaluation.data` names the data set that ranges are measured on. With
    `stop.target`, it names that of the metric `evaluation.best`.
    """
    check_data(plan.evaluation, plan.int8.ranges, plan.stop)


def check_privacy(plan: Plan) -> None:
    """With `privacy.mechanism`, each Update has weight 1, and devices send nothing but their clipped change. So
    `aggregation.max_examples` is 1, `rule` and `max_staleness` of `[aggregation]` have their defaults,
    `codec.name` is `fixed32`, `int16`, `int8` or `int4`, and `codec.max_shift` is 0. There are no stages, no
    statistics and no `flower.strategy`, and `int8.ranges` is not `devices`. `participants.min_examples`,
    `stop.patience` and `stop.max_int8_drop` are 0: devices report neither examples nor losses. With `central`,
    `round.protocol` is `plain`, and `retention` has no `keep_updates` and no `keep_days`, because
    `privacy.keep_seed_rounds` says how long Updates are kept. With `skellam` and `gaussian-shares`, `round.protocol`
    is `secagg`.
    Without coins, `privacy.population_size` is at least `cohort.buffer`.

    With `privacy.sampling = "coins"`, nothing but the coins decides who counts: `cohort.quorum` is 0, `min_report_s` is
    inf, `max_extension_s` is 0, `buffer` is `concurrency` and at least `privacy.population_size`, `selection` is
    `uniform`, and `[participants]` is absent. Otherwise `cohort.quorum` is at least 1.
    """
    if plan.privacy.sampling != COINS and not plan.cohort.quorum:
        raise InvalidPlan(
            "plan: got cohort.quorum 0, expected at least 1 without coins; raise it",
            code="FN-0205",
        )
    if not plan.privacy:
        return
    weight, report, sums = "each Update has the weight 1", "a device reports nothing about its data", "a rule is a sum"
    kept = "privacy.keep_seed_rounds says how long Updates are kept"
    stages, statistics = ([each.name for each in some] for some in (plan.stages, plan.statistics))
    aggregation, retention, is_shared = plan.aggregation, plan.retention, plan.privacy.is_shared
    protocol, masks = (
        (SECAGG_PROTOCOL, "without masks, each Update would have a share of the noise alone; use secagg, or central")
        if is_shared
        else (PLAIN_PROTOCOL, "the coordinator checks the norm of each Update; use skellam with masks")
    )
    for key, value, expected, reason in (
        ("aggregation.max_examples", aggregation.max_examples, 1, weight),
        ("aggregation.max_staleness", aggregation.max_staleness, 0, weight),
        ("aggregation.rule", aggregation.rule, "weighted_mean", sums),
        ("flower.strategy", plan.flower.strategy, "", sums),
        ("stages", stages, [], "a stage may add a second vector to an Update, or keep what was clipped"),
        ("codec.max_shift", plan.codec.max_shift, 0, "the grid does not depend on data"),
        ("statistics", statistics, [], report),
        ("int8.ranges", plan.int8.ranges, EXPORT if plan.int8.ranges == DEVICES else plan.int8.ranges, report),
        ("participants.min_examples", plan.participants.min_examples, 0, report),
        ("stop.patience", plan.stop.patience, 0, report),
        ("stop.max_int8_drop", plan.stop.max_int8_drop, 0, report),
        ("round.protocol", plan.round.protocol, protocol, masks),
        ("retention.keep_updates", None if is_shared else retention.keep_updates, None, kept),
        ("retention.keep_days", None if is_shared else retention.keep_days, None, kept),
    ):
        if value != expected:
            raise InvalidPlan(
                f"plan: got {key} {shown(value)} with privacy.mechanism {shown(plan.privacy.mechanism)}, expected "
                f"{'no value' if expected is None else shown(expected)}: {reason}; change the key, or remove [privacy]",
                code="FN-1682",
            )
    if plan.codec.name not in CODEC_BITS:
        raise InvalidPlan(
            f"plan: got codec.name {shown(plan.codec.name)} with privacy.mechanism {shown(plan.privacy.mechanism)}, "
            f"expected one of {', '.join(CODEC_BITS)}, whose integers have a proven norm; change the key, or remove "
            "[privacy]",
            code="FN-1682",
        )
    check_cohort(plan.privacy, plan.cohort, plan.participants)
    if plan.privacy.target_quantile:
        check_clipping(plan.privacy, plan.cohort, plan.codec.name)


CONSTRAINTS: Final = (
    check_quorum,
    check_headroom,
    check_stages,
    check_statistics,
    check_schedule,
    check_strategy,
    check_ranges,
    check_metrics,
    check_sets,
    check_retention,
    check_participants,
    check_privacy,
)
"""The conditions on several keys. Their docstrings are the text of docs/reference/plan.md."""
