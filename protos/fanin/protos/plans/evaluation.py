"""The section ``evaluation`` of a Plan: which Versions the coordinator evaluates, and on which held-out data."""

from dataclasses import dataclass
from typing import Annotated

from fanin.protos.errors import InvalidPlan
from fanin.protos.names import NAME_FORM, is_name
from fanin.protos.plans.keys import Key, range_problem
from fanin.protos.plans.sections import MAX_TIMES

PAGE = "evaluation.md"


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
            text="The metric that determines the best Version, such as `loss`, `accuracy` or `accuracy_int8`.",
            form=NAME_FORM,
            is_valid=is_name,
            see=PAGE,
        ),
    ] = "loss"

    def __post_init__(self) -> None:
        if problem := range_problem(self, "evaluation"):
            raise InvalidPlan(f"plan: {problem}")
