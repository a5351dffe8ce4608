"""The target of a Plan: the end of a Run whose Version is good enough on the held-out data."""

import math
from collections.abc import Mapping
from typing import Final

from fanin.edge.metrics.metric import Metric, metrics_of, scale_of
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import RunRested, RunState, StartRun
from fanin.protos.plans import Plan
from fanin.server.rounds.charging import rest_of_budget
from fanin.server.rounds.setup import RunSetup
from fanin.server.storage.stores import Files, Stores

PERCENT: Final = 100.0


def target_text(plan: Plan, version: int, values: Mapping[str, float], metrics: Mapping[str, Metric]) -> str:
    """Return the text of a Version whose metric ``evaluation.best`` has reached the Plan's target; empty if it has not.

    Args:
        plan: The Plan.
        version: The Version.
        values: Its metrics by name; without that metric, it was not evaluated.
        metrics: The further metrics of the Plan by name, which know whether larger values are better.
    """
    target, best = plan.stop.target, plan.evaluation.best
    if target is None or not math.isfinite(values.get(best, math.nan)):
        return ""
    is_higher = scale_of(best, metrics).higher_is_better
    if values[best] < target if is_higher else values[best] > target:
        return ""
    return f"version {version} has reached the target: {best} {values[best]:.6g} (stop.target {target:g})"


def check_target(plan: Plan, metrics: Mapping[str, Metric]) -> None:
    """Raise InvalidPlan for a target that the metric ``evaluation.best`` cannot have. See ``target_text``."""
    target, best = plan.stop.target, plan.evaluation.best
    scale = scale_of(best, metrics)
    if target is None or scale.least <= target <= scale.most:
        return
    is_percent = scale.most == 1.0 < target <= PERCENT
    raise InvalidPlan(
        f"plan: stop.target: got {target:g} for evaluation.best {best!r}, expected a value that the metric can have: "
        f"{f'from {scale.least:g} to {scale.most:g}' if math.isfinite(scale.most) else f'at least {scale.least:g}'}; "
        f"{f'write {target / PERCENT:g} for {target:g} %' if is_percent else 'correct it, or evaluation.best'}",
        code="FN-1713",
    )


async def rest_of_target(start: StartRun, begun_after: int, stores: Stores) -> RunRested | None:
    """Return the rest of a Run whose newest evaluated Version has reached the target; None to continue.

    Args:
        start: The command that started the Run.
        begun_after: The newest Version before the last command for more Rounds, whose author knew its metrics. It and
            those before it do not count. -1 without such a command.
        stores: The record.
    """
    plan = start.plan
    if plan.stop.target is None:
        return None
    newest = await stores.evaluations.newest_evaluation(start.run_id)
    if newest is None or newest.problem or newest.version <= begun_after:
        return None
    reason = target_text(plan, newest.version, newest.values, metrics_of(each.name for each in plan.evaluation.metrics))
    return RunRested(state=RunState.FINISHED, reason=reason) if reason else None


async def rest_of_record(setup: RunSetup, begun_after: int, stores: Stores, files: Files) -> RunRested | None:
    """Return the rest of a Run by its target or its budget, None to continue. Raises as ``rest_of_budget``."""
    reached = await rest_of_target(setup.start, begun_after, stores)
    return reached or await rest_of_budget(setup, stores, files)
