"""The description of a Run for operators: its record, and the state of the Round under way if it is driven here."""

from fanin.protos.errors import Corrupted
from fanin.protos.messages import (
    MAX_PAGE_RUNS,
    LiveRound,
    RoundInfo,
    RunDescription,
    RunInfo,
    RunQuery,
    SaturatedDevices,
)
from fanin.server.protocols import phases
from fanin.server.rounds.charging import spent_privacy
from fanin.server.rounds.troubles import reason_of
from fanin.server.runs.driving.drivers import unknown_run
from fanin.server.runs.view import LiveRun, RunView
from fanin.server.storage.decisions import restored_text
from fanin.server.storage.records import RoundMark, RoundSummary
from fanin.server.storage.stores import Stores

_PHASES = {
    RoundMark.OPEN: phases.SELECTING.name,
    RoundMark.CLOSED: phases.FOLDING.name,
    RoundMark.PUBLISHED: phases.PUBLISHED.name,
    RoundMark.FAILED: phases.FAILED.name,
}


async def run_info(view: RunView, live: LiveRun, stores: Stores) -> RunInfo:
    """Return the summary of a Run.

    Args:
        view: The Run.
        live: What only its driver knows.
        stores: The record.
    """
    record, newest, evaluations = view.record, view.newest, stores.evaluations
    has_data = bool(record.start.plan.evaluation.data)
    is_waiting = record.restored_at_s is not None
    waiting = restored_text(view.run_id) if is_waiting else ""
    return RunInfo(
        run_id=view.run_id,
        state=view.state,
        plan=record.start.plan,
        bundle_sha256=view.bundle_sha256,
        version=newest.number,
        epoch=newest.epoch,
        version_sha256=newest.sha256,
        num_rounds=await stores.rounds.num_published(view.run_id),
        max_rounds=record.max_rounds,
        reason="; ".join(text for text in (record.reason, waiting, live.trouble) if text),
        started_by=record.started_by,
        newest_evaluation=await evaluations.newest_evaluation(view.run_id) if has_data else None,
        best_evaluation=await evaluations.best_evaluation(view.run_id) if has_data else None,
        waits_for_publisher=is_waiting,
        privacy=await spent_privacy(record.start.plan, stores, await _clip_norm(view, stores)),
    )


async def _clip_norm(view: RunView, stores: Stores) -> float:
    """Return the clip norm of the Round that published the newest Version: the first one before any, 0 if unknown."""
    first = view.record.start.plan.privacy.clip_norm
    if not first or not view.newest.number:
        return first
    event = await stores.runs.publication(view.run_id, view.newest.number)
    return 0.0 if event is None or event.privacy is None else event.privacy.clip_norm


async def page_of_ids(query: RunQuery, stores: Stores) -> tuple[list[str], int]:
    """Return the ids of the Runs of a page, and the number of those of the query from this page on.

    Raises NotFound if there is no Run ``after``.
    """
    run_ids = list(await stores.runs.run_ids())
    if query.after and query.after not in run_ids:
        raise unknown_run(query.after)
    ordered = run_ids[::-1] if query.newest_first else run_ids
    # The Run may have left the states of the query since its page was sent, but not its place.
    ordered = ordered[ordered.index(query.after) + 1 :] if query.after else ordered
    if query.states:
        selected = frozenset(await stores.runs.run_ids(query.states))
        ordered = [run_id for run_id in ordered if run_id in selected]
    return ordered[: min(query.limit or MAX_PAGE_RUNS, MAX_PAGE_RUNS)], len(ordered)


async def damaged_info(run_id: str, live: LiveRun, damage: Corrupted, stores: Stores) -> RunInfo:
    """Return the summary of a Run whose record is damaged."""
    reason = live.trouble or f"run {run_id}: {reason_of(damage)}"
    return RunInfo(run_id=run_id, state=await stores.runs.run_state(run_id), reason=reason)


async def describe(view: RunView, live: LiveRun, num_rounds: int, stores: Stores) -> RunDescription:
    """Return a Run with its last ``num_rounds`` Rounds, newest first."""
    latest = await stores.rounds.latest(view.run_id, max(num_rounds, 1))
    publication = await stores.runs.publication(view.run_id, view.newest.number)
    removed = await stores.retention.removed(view.run_id)
    return RunDescription(
        run=await run_info(view, live, stores),
        rounds=tuple(_info(one, live.round.phase if one is latest[0] else "") for one in latest[:num_rounds]),
        grid=latest[0].record.grid if latest else (),
        live=live.round if live.round.round or not latest else _recorded_round(latest[0], stores.wall()),
        num_devices=stores.devices.num_devices,
        warnings=await stores.runs.warnings(view.run_id),
        saturated=SaturatedDevices() if publication is None else publication.saturated,
        num_digest_only=len(removed.rounds),
        num_without_parameters=len(removed.versions),
        coverage=None if publication is None else publication.coverage,
    )


def damaged_description(info: RunInfo, stores: Stores) -> RunDescription:
    """Return a Run whose record is damaged."""
    return RunDescription(
        run=info,
        rounds=(),
        grid=(),
        num_devices=stores.devices.num_devices,
    )


def _recorded_round(summary: RoundSummary, now_s: float) -> LiveRound:
    """Return a Round that is not driven here, if it is under way."""
    record = summary.record
    if record.mark.is_final:
        return LiveRound()
    deadline_s = 0.0
    if record.mark is RoundMark.OPEN and record.deadline_at_s is not None:
        deadline_s = max(record.deadline_at_s - now_s, 0.0)
    return LiveRound(round=record.round, phase=_PHASES[record.mark], deadline_s=deadline_s)


def _info(summary: RoundSummary, phase: str) -> RoundInfo:
    record = summary.record
    # The record has the durable steps of a Round, its driver the steps in between.
    return RoundInfo(
        round=record.round,
        base_version=record.base_version,
        phase=_PHASES[record.mark] if not phase or record.mark.is_final else phase,
        num_updates=summary.num_updates,
        opened_at=record.opened_at_s,
        version=summary.version,
    )
