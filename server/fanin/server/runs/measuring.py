"""Checks of Plans of Runs that train nothing: those that ask for statistics, and those that only evaluate."""

from collections.abc import Mapping

from fanin.edge.bundles.manifest import Manifest
from fanin.edge.codecs.stage import Stage
from fanin.edge.codecs.stages import EVALUATE_ONLY
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import StartRun
from fanin.protos.plans import EXPORT, Plan
from fanin.server.aggregation.exact_sums import STATISTICS_RULE


def check_query(start: StartRun, manifest: Manifest) -> None:
    """Raise InvalidPlan unless a Plan with the rule of sums has the numbers of the query of its Bundle."""
    plan, query = start.plan, manifest.query
    has_rule = plan.aggregation.rule == STATISTICS_RULE
    if query is None and not has_rule:
        return
    if query is None or not has_rule or plan.flower.roles:
        raise InvalidPlan(
            f"run {start.run_id}: got the rule {plan.aggregation.rule!r} with a bundle "
            f"{'without' if query is None else 'with'} a query, expected {STATISTICS_RULE!r} exactly with a bundle of "
            "fanin stats, and no roles; start the run with fanin stats",
            code="FN-1865",
        )
    theirs = (query.min_devices, query.num_devices, query.num_versions)
    ours = (plan.aggregation.rule_options.get("min_devices"), plan.cohort.buffer, plan.stop.max_rounds)
    if ours[:2] != theirs[:2] or ours[2] > theirs[2]:
        raise InvalidPlan(
            f"run {start.run_id}: got min_devices {ours[0]}, cohort.buffer {ours[1]} and stop.max_rounds {ours[2]}, "
            f"expected {theirs[0]}, {theirs[1]} and at most {theirs[2]}, as in the query of the bundle",
            code="FN-1865",
        )


def check_evaluation(what: str, plan: Plan, stages: Mapping[str, Stage]) -> None:
    """Raise InvalidPlan if a Plan that only evaluates could change the parameters."""
    wrong = {
        "other stages": len(stages) > 1,
        "[privacy]": bool(plan.privacy),
        "aggregation.outer_optimizer": plan.aggregation.outer_optimizer != "fedavg",
        "int8.ranges": plan.int8.ranges != EXPORT,
        "training.personal_epochs": bool(plan.training.personal_epochs),
    }
    if keys := [key for key, is_wrong in wrong.items() if is_wrong]:
        raise InvalidPlan(
            f"{what}: got the stage {EVALUATE_ONLY!r} with {', '.join(keys)}, expected it without them: they could "
            "change the parameters or the ranges; remove them",
            code="FN-1870",
        )
