"""What the codec ``topk`` demands of a Plan and a model.

A device sends the values of the largest magnitude alone, and the fold reads all others as zero. A sum of such Updates
is exact. What these checks refuse would compute something, too, but nothing that helps.
"""

from collections.abc import Mapping

from fanin.edge.codecs.stage import GroupStage, Stage
from fanin.edge.tensors import TensorTable
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import TOPK, Plan
from fanin.protos.plans.keys import shown
from fanin.protos.roles import RoleKind


def check_sparse_plan(plan: Plan, stages: Mapping[str, Stage], *, is_sum: bool, is_masked: bool) -> None:
    """Raise InvalidPlan for a Plan with ``topk`` that has a rule, a round protocol or stages that cannot work with it.

    Args:
        plan: The Plan.
        stages: Its stages by name.
        is_sum: Whether its rule is a sum.
        is_masked: Whether its round protocol masks the Updates.
    """
    if plan.codec.name != TOPK:
        return
    if not is_sum:
        raise InvalidPlan(
            f"plan: got codec.name {TOPK!r} with aggregation.rule {shown(plan.aggregation.rule)}, expected a rule that "
            "is a sum: each device sends other values, so a rule that compares devices sees zeros nearly everywhere; "
            "set aggregation.rule to weighted_mean, or codec.name to int8 or int4",
            code="FN-1841",
        )
    if is_masked:
        raise InvalidPlan(
            f"plan: got codec.name {TOPK!r} with round.protocol {shown(plan.round.protocol)}, expected 'plain': the "
            "indices would show which values changed, and a masked Update has every value, so nothing is saved; set "
            "codec.name to int8 or int4, or round.protocol to 'plain'",
            code="FN-1842",
        )
    if groups := [name for name, stage in stages.items() if isinstance(stage, GroupStage) and stage.groups]:
        raise InvalidPlan(
            f"plan: got codec.name {TOPK!r} with the stage {shown(groups[0])}, expected no stage that adds a group of "
            "values: no residual keeps what is left out of this group; remove the stage, or set codec.name to int4",
            code="FN-1843",
        )


def check_sparse_model(plan: Plan, table: TensorTable) -> None:
    """Raise InvalidPlan for a Plan with ``topk`` and a model with running statistics or counters."""
    others = [spec.name for spec in table.specs if spec.role.role is not RoleKind.PARAMETER]
    if plan.codec.name == TOPK and others:
        raise InvalidPlan(
            f"plan: got codec.name {TOPK!r} with a model whose tensor {others[0]!r} is a running statistic or a "
            "counter, expected parameters alone: a mean of statistics that most devices left out is none; use a norm "
            "without statistics, such as GroupNorm, keep them on the devices (Recipe(local=...)), or set codec.name to "
            "int8",
            code="FN-1844",
        )
