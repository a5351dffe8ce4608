"""The Plan: how a Run proceeds, as a frozen value.

Each key of a Plan is declared once, in ``cohort``, ``sections``, ``evaluation``, ``retention`` or ``plan``. The TOML
reader and the ``--set`` option (``fanin.clients.planfile``), the range checks of the constructors, the wire form
(``fanin.protos.wire``) and the page docs/reference/plan.md read that declaration. To add a key, declare it, add the
field of the same name to the .proto file, and print the page again with ``tests/golden/plan_page.py``.

Modules in reading order:

    entries    the values of keys that are tables
    keys       how a key is declared, and the checks and texts that follow from a declaration
    cohort     the section of the cohort
    sections   the other sections of a Plan with their keys, and the conditions within a section
    flower     the section of Flower apps
    schedule   the section of training, its changes from a Round on, the rate of each step
    retention  the section of what is kept of the past of a Run
    evaluation the section of evaluation on held-out data
    participants who must take part in each Round
    privacy    differential privacy: mechanism, noise and budget
    plan       the Plan, and the conditions between sections
    named      what a Plan names: ours, or by entry point those of other distributions; its options
"""

from fanin.protos.plans.cohort import MAX_COHORT, CohortPlan
from fanin.protos.plans.evaluation import EvaluationPlan, EvaluationSet, MetricSpec
from fanin.protos.plans.flower import FlowerPlan
from fanin.protos.plans.participants import ParticipantsPlan
from fanin.protos.plans.plan import (
    CONSTRAINTS,
    HEADROOM_BITS,
    LEAST_STEPS,
    MAX_STAGES,
    MAX_STATISTICS,
    STALE_UNIT,
    Plan,
)
from fanin.protos.plans.privacy import CENTRAL, GAUSSIAN_SHARES, SKELLAM, PrivacyPlan
from fanin.protos.plans.retention import RetentionPlan
from fanin.protos.plans.schedule import MAX_CHANGES, MAX_EPOCHS, ScheduledChange, Training
from fanin.protos.plans.sections import (
    BY_EXAMPLES,
    BY_SITE,
    CODEC_BITS,
    DATA,
    DEFAULT_MAX_SHIFTS,
    DEVICES,
    EXPORT,
    MAX_CODEC_SHIFT,
    MAX_COUNT,
    MAX_RATE,
    MAX_SUM,
    MAX_TIMES,
    MIN_RATE,
    OPTIMIZER_SETTINGS,
    PLAIN_PROTOCOL,
    SECAGG_PROTOCOL,
    TOPK,
    UNIFORM,
    AggregationPlan,
    CodecSpec,
    Int8Plan,
    RoundPlan,
    StageSpec,
    Statistic,
    StopPlan,
)

__all__ = [
    "BY_EXAMPLES",
    "BY_SITE",
    "CENTRAL",
    "CODEC_BITS",
    "CONSTRAINTS",
    "DATA",
    "DEFAULT_MAX_SHIFTS",
    "DEVICES",
    "EXPORT",
    "GAUSSIAN_SHARES",
    "HEADROOM_BITS",
    "LEAST_STEPS",
    "MAX_CHANGES",
    "MAX_CODEC_SHIFT",
    "MAX_COHORT",
    "MAX_COUNT",
    "MAX_EPOCHS",
    "MAX_RATE",
    "MAX_STAGES",
    "MAX_STATISTICS",
    "MAX_SUM",
    "MAX_TIMES",
    "MIN_RATE",
    "OPTIMIZER_SETTINGS",
    "PLAIN_PROTOCOL",
    "SECAGG_PROTOCOL",
    "SKELLAM",
    "STALE_UNIT",
    "TOPK",
    "UNIFORM",
    "AggregationPlan",
    "CodecSpec",
    "CohortPlan",
    "EvaluationPlan",
    "EvaluationSet",
    "FlowerPlan",
    "Int8Plan",
    "MetricSpec",
    "ParticipantsPlan",
    "Plan",
    "PrivacyPlan",
    "RetentionPlan",
    "RoundPlan",
    "ScheduledChange",
    "StageSpec",
    "Statistic",
    "StopPlan",
    "Training",
]
