"""The sections of a Plan: every key with its type, default, range and meaning.

The values of ``AggregationPlan``, ``StopPlan`` and ``Int8Plan`` are checked when they are constructed. ``CodecSpec``
also travels to devices in an Assignment, so the Plan and the Assignment check it. So does ``Training`` (``schedule``).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Final

from fanin.protos.errors import InvalidPlan
from fanin.protos.names import MAX_NAME_CHARS, NAME_FORM, is_name
from fanin.protos.plans.entries import OPTIONS, SITE_WEIGHTS, Option
from fanin.protos.plans.keys import DerivedDefault, Key, range_problem

CODEC_BITS: Final = MappingProxyType({"fixed32": 32, "int16": 16, "int8": 8, "int4": 4})
"""The codecs of fanin that send every value, with the bits of one including its sign."""
TOPK: Final = "topk"
TOPK_BITS: Final = 8
"""The codec that sends some values, and the most bits of one of them."""
MAX_CODEC_BITS: Final = 32
"""Bits of a value of any other codec, at most. A Plan has head-room for as many: it does not know the codec."""
DEFAULT_MAX_SHIFTS: Final = MappingProxyType({"fixed32": 0, "int16": 12, "int8": 12, "int4": 12, TOPK: 12})
"""Default of W by codec. With 12, an Update of few bits uses all of them in a block if its largest value is between
1/32 and 112 times the block's reach (``fanin.edge.codecs.grid``). The headroom still admits a million full Updates."""
MAX_CODEC_SHIFT: Final = 62
"""A larger shift leaves no bits of an int64 sum for values."""
MIN_RATE: Final = 2.0**-126
MAX_RATE: Final = 2.0**127
"""Range of a learning rate. The graphs compute in float32, in which others are 0 or infinite."""
EXPORT: Final = "export"
DEVICES: Final = "devices"
DATA: Final = "data"
RANGES: Final = (EXPORT, DEVICES, DATA)
"""The sources of the ranges of activations."""
MAX_STALENESS: Final = 1000
"""A staler Update would count for less than 1/30, and the coordinator would have to remember that many Rounds."""
MAX_EXPONENT: Final = 8
"""With it, an Update that is one Version stale counts for 1/256, the least weight."""
MAX_COUNT: Final = 1 << 40
"""Most examples of one Update, and the largest of other numbers that a device counts. A device with more is refused."""
MAX_SUM: Final = 1 << 56
"""Largest magnitude of a sum over examples: 2^40 nats in units of 2^-16, or 256 for each of 2^32 examples."""
SUM_BITS: Final = 62
"""Bits of the sum of a statistic over a Round, which fits an int64. More Updates in a Round lower the limit of each."""
MAX_TIMES: Final = (1 << 32) - 1
"""Most Rounds of a Run: the largest uint32, which the wire uses."""
BY_EXAMPLES, UNIFORM, BY_SITE = WEIGHTS = ("examples", "uniform", "sites")
MAX_SEED: Final = (1 << 64) - 1
OPTIMIZER_SETTINGS: Final = ("momentum", "weight_decay", "beta1", "beta2", "decay")
"""The settings that the optimizers of fanin have. An optimizer of an App may have others."""


def _default_shift(values: Mapping[str, object]) -> int:
    return DEFAULT_MAX_SHIFTS.get(str(values["name"]), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """The codec that encodes the Updates of a Round."""

    name: Annotated[
        str,
        Key(
            text="`fixed32`; `int16`, `int8` or `int4`, which send a half, a quarter or an eighth of its bytes; "
            "`topk`, which sends the largest values; or one that is installed at the coordinator and on the devices.",
            form=NAME_FORM,
            is_valid=is_name,
            see="../howto/codecs.md",
        ),
    ] = "fixed32"
    max_shift: Annotated[
        int,
        Key(
            text="W: by how many bits a device may encode a block more coarsely than the Round's grid.",
            unit="bits",
            at_least=0,
            at_most=MAX_CODEC_SHIFT,
            derived=DerivedDefault(
                text=", ".join(f"{shift} for `{name}`" for name, shift in DEFAULT_MAX_SHIFTS.items())
                + ", 0 for others",
                value=_default_shift,
            ),
        ),
    ]
    options: Annotated[
        dict[str, Option],
        Key(
            text="The options of the codec. Of those of fanin, only `topk` has any.",
            entries=OPTIONS,
            see="../howto/codecs.md",
        ),
    ] = field(default_factory=dict)

    @property
    def bits(self) -> int:
        """Bits of one value including its sign, for which the sum of a Round has head-room.

        A codec of another package has at most these: ``Codec.bits`` is the number of its values.
        """
        return TOPK_BITS if self.name == TOPK else CODEC_BITS.get(self.name, MAX_CODEC_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """A stage of the devices' update pipeline: after training and before the codec, in the order of the list."""

    name: Annotated[
        str,
        Key(
            text="`error_feedback`, `scaffold`, `fednova`, `qfedavg`, `feddyn`, or a stage that "
            "is installed at the coordinator and on the devices.",
            form=NAME_FORM,
            is_valid=is_name,
            see="../howto/stages.md",
        ),
    ]
    options: Annotated[
        dict[str, Option],
        Key(
            text="The options of the stage, such as `num_devices` of `scaffold`.",
            entries=OPTIONS,
            see="../howto/stages.md",
        ),
    ] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """A statistic that the devices' trainers report: a sum over the examples of a device, as an integer."""

    name: Annotated[
        str,
        Key(
            text="Its name among the counts of the trainer's `Change`.",
            form=NAME_FORM,
            is_valid=is_name,
            see="statistics.md",
        ),
    ]
    unit: Annotated[
        str,
        Key(
            text="What one stands for, such as `words` or `2^-16 nats`.",
            form="at most 128 printable characters",
            is_valid=lambda text: len(text) <= MAX_NAME_CHARS and (not text or text.isprintable()),
        ),
    ] = ""
    bound: Annotated[
        int,
        Key(
            text="Largest magnitude that one device may report. A device with more reports this.",
            at_least=1,
            at_most=MAX_SUM,
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationPlan:
    """The rule that turns the Updates of a Round into a Version."""

    rule: Annotated[
        str,
        Key(
            text="How Updates become one change of the parameters: `weighted_mean`, a robust rule such as "
            "`trimmed_mean` or `median`, the rule of the stage `fednova` or `qfedavg`, or "
            "a rule that is installed at the coordinator.",
            form=NAME_FORM,
            is_valid=is_name,
            see="../howto/rules.md",
        ),
    ] = "weighted_mean"
    rule_options: Annotated[
        dict[str, Option],
        Key(
            text="The options of the rule, such as `trim` of `trimmed_mean`.", entries=OPTIONS, see="../howto/rules.md"
        ),
    ] = field(default_factory=dict)
    max_examples: Annotated[
        int,
        Key(
            text="Cap on the weight of one Update, in the mean and in the Round's statistics; 0: none. It limits "
            "devices that claim more examples than they have.",
            unit="examples",
            at_least=0,
            at_most=MAX_TIMES,
            see="../howto/rules.md#weights",
        ),
    ] = 0
    weights: Annotated[
        str,
        Key(
            text="The weight of an Update: its `examples`, at most `max_examples`; 1 (`uniform`); or that of its "
            "device in `site_weights` (`sites`).",
            choices=WEIGHTS,
            see="../howto/rules.md#weights",
        ),
    ] = BY_EXAMPLES
    site_weights: Annotated[
        dict[str, int],
        Key(
            text="Weights by the ids of devices. Others have 1.", entries=SITE_WEIGHTS, see="../howto/rules.md#weights"
        ),
    ] = field(default_factory=dict)
    outer_optimizer: Annotated[
        str,
        Key(
            text="How the aggregate changes the global parameters: `fedavg`, `fedavgm`, `nesterov`, `fedadagrad`, "
            "`fedadam`, `fedyogi`, that of the stage `feddyn`, or an optimizer that is installed at the coordinator.",
            form=NAME_FORM,
            is_valid=is_name,
            see="../howto/outer.md",
        ),
    ] = "fedavg"
    outer_options: Annotated[
        dict[str, Option],
        Key(
            text="The options of the outer optimizer: `learning_rate`, `momentum`, `beta1`, `beta2`, `tau`.",
            entries=OPTIONS,
            see="../howto/outer.md",
        ),
    ] = field(default_factory=dict)
    max_staleness: Annotated[
        int,
        Key(
            text="Most Versions by which the base of an Update may be behind the Round's. Stale Updates have less "
            "weight. With 0, Updates beyond the buffer are discarded; with more, they count in a later Round, as in "
            "FedBuff.",
            unit="Versions",
            at_least=0,
            at_most=MAX_STALENESS,
            see="../decisions/0010-stale-updates-move-to-the-rounds-grid.md",
        ),
    ] = 0
    staleness_exponent: Annotated[
        float,
        Key(
            text="FedBuff's a: an Update that is s Versions stale counts 1 / (1 + s)^a of a fresh one. 0.0: as much as "
            "a fresh one.",
            at_least=0,
            at_most=MAX_EXPONENT,
            see="../howto/cohort.md",
        ),
    ] = 0.5

    def __post_init__(self) -> None:
        _check_range(self, "aggregation")
        is_by_site = self.weights == BY_SITE
        if is_by_site != bool(self.site_weights) or (is_by_site and self.max_examples):
            raise InvalidPlan(
                f"plan: got aggregation.weights {self.weights!r}, {len(self.site_weights)} entries of site_weights and "
                f"max_examples {self.max_examples}, expected entries and no max_examples with 'sites', and no entries "
                "without; add or remove them",
                code="FN-1852",
            )

    def limit_in(self, protocol: str) -> int:
        """Return ``max_examples`` in Rounds of a protocol: under masks, a device applies its weight itself."""
        return 1 if self.weights == UNIFORM and protocol == SECAGG_PROTOCOL else self.max_examples


PLAIN_PROTOCOL: Final = "plain"
SECAGG_PROTOCOL: Final = "secagg"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """The protocol of the Rounds: the phases of a Round, and the messages of each."""

    protocol: Annotated[
        str,
        Key(
            text="`plain`, without messages, `secagg`, which hides each Update in the sum, or a protocol that is "
            "installed at the coordinator and on the devices.",
            form=NAME_FORM,
            is_valid=is_name,
            see="../howto/round-protocols.md",
        ),
    ] = PLAIN_PROTOCOL
    options: Annotated[
        dict[str, Option],
        Key(
            text="The options of the protocol. `plain` has none.",
            entries=OPTIONS,
            see="../howto/secure-aggregation.md#options",
        ),
    ] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPlan:
    """Conditions under which a Run finishes or pauses."""

    max_rounds: Annotated[
        int, Key(text="The Run finishes after this many Rounds.", unit="Rounds", at_least=1, at_most=MAX_TIMES)
    ] = 100
    patience: Annotated[
        int,
        Key(
            text="The Run finishes after this many Rounds in which the validation loss did not fall by `min_delta`. "
            "0: never.",
            unit="Rounds",
            at_least=0,
            at_most=MAX_TIMES,
        ),
    ] = 0
    min_delta: Annotated[
        float,
        Key(text="Smallest decrease of the validation loss that counts.", unit="nats", at_least=0, below=math.inf),
    ] = 0.0
    max_int8_drop: Annotated[
        float,
        Key(
            text="The Run pauses when int8 costs more than this on the devices' validation data: points of accuracy, "
            "or percent of a regression model's squared error. 0.0: never.",
            unit="points or percent",
            at_least=0,
            at_most=100,
            see="../howto/operate.md#when-int8-falls-behind",
        ),
    ] = 0.0

    target: Annotated[
        float | None,
        Key(
            text="The Run finishes when the metric `evaluation.best` of a Version on the data set `evaluation.data` is "
            "this good: at least this large, or for a loss or an error at most. Absent: never.",
            above=-math.inf,
            below=math.inf,
            see="../howto/evaluate.md#stop-at-a-target",
        ),
    ] = None

    def __post_init__(self) -> None:
        _check_range(self, "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Plan:
    """The int8 model of the Versions."""

    ranges: Annotated[
        str,
        Key(
            text="Where the ranges of the activations come from, and so their scales. `export`: from the calibration "
            "data at the export, for every Version. `devices`: from counts that devices report in each Round, for the "
            "Version of the Round. `data`: from the data set `evaluation.data` of the coordinator, for each Version "
            "that a Round publishes. A model that is trained from nothing needs `devices` or `data`.",
            choices=RANGES,
            see="statistics.md#ranges-of-activations",
        ),
    ] = EXPORT

    def __post_init__(self) -> None:
        _check_range(self, "int8")


def _check_range(section: object, path: str) -> None:
    if problem := range_problem(section, path):
        raise InvalidPlan(f"plan: {problem}", code="FN-0201")
