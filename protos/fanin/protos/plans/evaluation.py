"""The section ``evaluation`` of a Plan: which Versions the coordinator evaluates, and on which held-out data."""

from dataclasses import dataclass
from typing import Annotated, Final

from fanin.protos.errors import InvalidPlan
from fanin.protos.names import NAME_FORM, is_name
from fanin.protos.plans.keys import Key, range_problem, shown
from fanin.protos.plans.sections import DATA, MAX_TIMES, StopPlan

PAGE: Final = "../howto/evaluate.md"
MAX_METRICS: Final = 16
MAX_SETS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One further metric of each evaluation."""

    name: Annotated[
        str,
        Key(
            text="Its name: `macro_f1`, `balanced_accuracy`, `absolute_error`, or a metric that is installed at the "
            "coordinator.",
            form=NAME_FORM,
            is_valid=is_name,
            see=PAGE,
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """One further data set of each evaluation."""

    name: Annotated[
        str,
        Key(
            text="Its name, before the names of its metrics: `NAME.accuracy`.",
            form=f"{NAME_FORM}, without a dot",
            is_valid=lambda text: is_name(text) and "." not in text,
            see=PAGE,
        ),
    ]
    data: Annotated[
        str,
        Key(
            text="Its data, a name as in `evaluation.data`.",
            form=NAME_FORM,
            is_valid=is_name,
            see=PAGE,
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """Evaluation of Versions by the coordinator. It changes no Round."""

    data: Annotated[
        str,
        Key(
            text="Data set on which the coordinator evaluates Versions, in float and in int8: a name that its operator "
            "registered with `fanin serve --data NAME=PATH`. Empty: no evaluation.",
            form=f"{NAME_FORM}, or nothing",
            is_valid=lambda text: not text or is_name(text),
            see=PAGE,
        ),
    ] = ""
    every: Annotated[
        int,
        Key(
            text="The Versions whose number is a multiple of this are evaluated. 1: each Version.",
            unit="Versions",
            at_least=1,
            at_most=MAX_TIMES,
            see=PAGE,
        ),
    ] = 1
    best: Annotated[
        str,
        Key(
            text="The metric that determines the best Version, such as `loss`, `accuracy_int8` or one of `metrics`.",
            form=NAME_FORM,
            is_valid=is_name,
            see=PAGE,
        ),
    ] = "loss"

    metrics: tuple[MetricSpec, ...] = ()
    sets: tuple[EvaluationSet, ...] = ()

    def __post_init__(self) -> None:
        problem = range_problem(self, "evaluation")
        for index, metric in enumerate(self.metrics):
            problem = problem or range_problem(metric, f"evaluation.metrics.{index}")
        for index, each in enumerate(self.sets):
            problem = problem or range_problem(each, f"evaluation.sets.{index}")
        if problem:
            raise InvalidPlan(f"plan: {problem}", code="FN-0201")
        check_metrics(self)
        check_sets(self)


def check_metrics(evaluation: EvaluationPlan) -> None:
    """There are at most 16 metrics in `evaluation.metrics`, each once."""
    names = [metric.name for metric in evaluation.metrics]
    if len(names) > MAX_METRICS or len(set(names)) < len(names):
        raise InvalidPlan(
            f"plan: evaluation.metrics: got {shown(names)}, expected at most {MAX_METRICS} of different names; remove "
            "some",
            code="FN-0220",
        )


def check_sets(evaluation: EvaluationPlan) -> None:
    """There are at most 16 sets in `evaluation.sets`, each once, and `evaluation.data` is there, too."""
    names = [each.name for each in evaluation.sets]
    if len(names) > MAX_SETS or len(set(names)) < len(names):
        raise InvalidPlan(
            f"plan: evaluation.sets: got {shown(names)}, expected at most {MAX_SETS} of different names; rename or "
            "remove some",
            code="FN-0220",
        )
    if names and not evaluation.data:
        raise InvalidPlan(
            f"plan: got evaluation.sets {shown(names)} without evaluation.data, expected the data set of the metrics "
            "without a prefix; add evaluation.data",
            code="FN-1845",
        )
    for metric in evaluation.metrics:
        if metric.name.partition(".")[0] in names and "." in metric.name:
            raise InvalidPlan(
                f"plan: evaluation.sets: got the metric {metric.name!r}, which is also a name of a metric of the set "
                f"{metric.name.partition('.')[0]!r}; rename the set",
                code="FN-1845",
            )


def check_data(evaluation: EvaluationPlan, ranges: str, stop: StopPlan) -> None:
    """Raise InvalidPlan if the ranges or the target of a Plan need a data set that it does not name."""
    if ranges == DATA and not evaluation.data:
        raise InvalidPlan(
            f"plan: got int8.ranges {DATA!r} without evaluation.data, expected the name of a data set of the "
            "coordinator; add evaluation.data, or set int8.ranges to 'devices'",
            code="FN-1490",
        )
    if stop.target is not None and not evaluation.data:
        raise InvalidPlan(
            f"plan: got stop.target {stop.target:g} without evaluation.data, expected the data set on which the "
            "coordinator measures the Versions; add evaluation.data, or remove the target",
            code="FN-1887",
        )
