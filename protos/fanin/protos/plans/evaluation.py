"""The section ``evaluation`` of a Plan: which Versions the coordinator evaluates, and on which held-out data."""

from dataclasses import dataclass
from typing import Annotated, Final

from fanin.protos.errors import InvalidPlan
from fanin.protos.names import NAME_FORM, is_name
from fanin.protos.plans.keys import Key, range_problem, shown
from fanin.protos.plans.sections import DATA, MAX_TIMES, StopPlan

PAGE: Final = "../howto/evaluate.md"
MAX_METRICS: Final = 16


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

    def __post_init__(self) -> None:
        problem = range_problem(self, "evaluation")
        for index, metric in enumerate(self.metrics):
            problem = problem or range_problem(metric, f"evaluation.metrics.{index}")
        if problem:
            raise InvalidPlan(f"plan: {problem}", code="FN-0201")
        check_metrics(self)


def check_metrics(evaluation: EvaluationPlan) -> None:
    """There are at most 16 metrics in `evaluation.metrics`, each once."""
    names = [metric.name for metric in evaluation.metrics]
    if len(names) > MAX_METRICS or len(set(names)) < len(names):
        raise InvalidPlan(
            f"plan: evaluation.metrics: got {shown(names)}, expected at most {MAX_METRICS} of different names; remove "
            "some",
            code="FN-0220",
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
