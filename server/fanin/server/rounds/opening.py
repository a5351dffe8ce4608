"""Opening and resuming Rounds: the record of the next Round, and the state that a restart rebuilds from the record."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from rpds import HashTrieSet

from fanin.protos.errors import Corrupted, NotFound
from fanin.protos.messages import RoundExtended, RunState, Version
from fanin.protos.plans.participants import WAIT
from fanin.server.aggregation.parameters import first_grid_from
from fanin.server.privacy.noising import CentralNoise, SharedNoise, recorded_clipping
from fanin.server.protocols.machine import Cohort, Outcome, Round, RoundProtocol, Rules
from fanin.server.protocols.phases import PAUSED
from fanin.server.rounds.charging import remove_erased
from fanin.server.rounds.recent import OpenedRound, RecentRounds
from fanin.server.rounds.setup import RunSetup
from fanin.server.rounds.troubles import Damaged
from fanin.server.selection.coverage import lack_of
from fanin.server.selection.participation import Participation
from fanin.server.storage.records import CommittedUpdate, Roster, RoundMark, RoundRecord, RunRecord
from fanin.server.storage.stores import DriverStores, Files, Stores

MAX_RECALLED_ROUNDS: Final = 64
"""Rounds whose devices are recalled after a restart. Each costs a database access, some 0.3 ms."""


async def open_next_round(setup: RunSetup, stores: DriverStores, files: Files) -> OpenedRound | None:
    """Record the next Round of a Run, on its newest Version.

    Returns:
        The Round, or None if an operator paused or stopped the Run in the meantime.

    Raises:
        Damaged: The parameters or the clip norm of the newest Version fail verification.
    """
    run_id = setup.start.run_id
    base = await stores.runs.newest_version(run_id)
    last = await stores.rounds.last(run_id)
    noise = await noise_in(setup, base, stores, files)
    if noise is not None:
        grid: tuple[int, ...] | None = noise.grid_of(len(setup.layout.total_table.specs))
    else:
        grid = await stores.rounds.recorded_grid(base)
    if grid is None:
        try:
            grid = await files.run(first_grid_from, base, setup.layout, setup.codec, files.blobs)
        except (Corrupted, NotFound) as exc:
            raise Damaged(f"version {base.number} is damaged on the coordinator's disk") from exc
    record = RoundRecord(
        run_id=run_id,
        round=1 if last is None else last.round + 1,
        base_version=base.number,
        grid=grid,
        mark=RoundMark.OPEN,
        opened_at_s=stores.wall(),
    )
    is_open = await stores.writer.open(record)
    only = await devices_of_query(setup, stores)
    return OpenedRound(record=record, base=base, noise=noise, only=only) if is_open else None


async def opened_again(setup: RunSetup, record: RoundRecord, stores: DriverStores, files: Files) -> OpenedRound:
    """Return a recorded Round, to continue it. Raises Damaged if its clip norm fails verification."""
    base = await stores.runs.version(record.run_id, record.base_version)
    assert base is not None, "a round has its base version"
    noise, only = await noise_in(setup, base, stores, files), await devices_of_query(setup, stores)
    return OpenedRound(record=record, base=base, noise=noise, only=only)


async def devices_of_query(setup: RunSetup, stores: Stores | DriverStores) -> frozenset[str] | None:
    """Return the devices of the first Version of a statistics Run; None before it, and for other Runs.

    All later Rounds have exactly these. With others, the parts of a bin would add up to another sum than the bin, and
    the difference could be the count of one device. The record has the set, so it outlives the process.
    """
    if setup.manifest.query is None:
        return None
    for record in await stores.rounds.since(setup.start.run_id, 0):
        if record.mark is RoundMark.PUBLISHED:
            return frozenset(record.accepted)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundHistory:
    """What is known of a Round when it begins in this process.

    Attributes:
        extension_s: Seconds by which the deadline had moved of a Round that was open when the coordinator ended; None
            for a new Round.
        committed: The Updates, in the order of their commits.
        rosters: The rosters, in the order of the phases.
        senders: The devices with a message of each phase without a roster.
        carried: The devices that work for an earlier Round, and whose Updates count.
        only: The devices that alone may take part, and all must; None: any device.
    """

    extension_s: float | None = None
    committed: tuple[CommittedUpdate, ...] = ()
    rosters: tuple[Roster, ...] = ()
    senders: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    carried: frozenset[str] = frozenset()
    only: frozenset[str] | None = None

    @property
    def at_work(self) -> frozenset[str]:
        """The devices that hold a place from the beginning. A device with a committed Update had an Assignment."""
        return self.carried | {update.device_id for update in self.committed}

    def before_close(self, protocol: RoundProtocol) -> tuple[Roster, ...]:
        """Return the rosters of the phases before the training."""
        return tuple(roster for roster in self.rosters if roster.phase not in protocol.after_close)

    def after_close(self, protocol: RoundProtocol) -> tuple[Roster, ...]:
        """Return the rosters of the phases after the closed set."""
        return tuple(roster for roster in self.rosters if roster.phase in protocol.after_close)


NEW: Final = RoundHistory()


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One moment on two clocks, in seconds.

    Attributes:
        now: Time on the machine's monotonic clock.
        wall_s: Wall time, in which deadlines are recorded.
    """

    now: float
    wall_s: float


def begin_round(
    run: RunRecord,
    protocol: RoundProtocol,
    record: RoundRecord,
    moment: Moment,
    history: RoundHistory,
) -> Outcome:
    """Return the machine of a recorded Round, and the effects to carry out now.

    Args:
        run: The Run.
        protocol: The protocol of its Plan.
        record: The Round.
        moment: The present.
        history: What is known of the Round. The caller applies what is recorded.
    """
    plan, extension_s = run.start.plan, history.extension_s
    cohort, num_fixed = plan.cohort, len(history.only or ())
    rules = Rules(
        concurrency=cohort.concurrency,
        buffer=num_fixed or cohort.buffer,
        quorum=max(cohort.quorum, num_fixed),
        deadline_s=cohort.deadline_s,
        min_report_s=cohort.min_report_s,
        report_factor=cohort.report_factor,
        late_counts=plan.aggregation.max_staleness > 0,
        max_extension_s=cohort.max_extension_s,
        waits=plan.participants.on_missing == WAIT,
    )
    is_paused = run.state is RunState.PAUSED and record.mark is RoundMark.OPEN
    # The deadline of a later phase is set once its roster is known (``recorded_deadline``).
    left_s = None if record.deadline_rosters else record.left_s
    if not is_paused and not record.deadline_rosters and record.deadline_at_s is not None:
        left_s = record.deadline_at_s - moment.wall_s
    if left_s is not None:
        # A wall clock that was set back must not postpone the deadline.
        left_s = min(left_s, cohort.deadline_s + (extension_s or 0.0))
    state = Round(
        protocol=protocol,
        rules=rules,
        phase=protocol.first,
        cohort=Cohort(at_work=HashTrieSet(history.at_work)),
        was_resumed=extension_s is not None,
        lack=lack_of(plan.participants),
        only=history.only,
        extension_s=extension_s or 0.0,
        may_have_progress=extension_s is not None,
    )
    if is_paused:
        return replace(state, phase=PAUSED, paused_from=protocol.first, left_s=left_s), ()
    return protocol.begin(replace(state, deadline=None if left_s is None else moment.now + left_s), moment.now)


def recorded_deadline(state: Round, record: RoundRecord, moment: Moment) -> float | None:
    """Return the recorded deadline of the phase under way, on the machine's clock; None while the Round is paused."""
    if record.deadline_at_s is None or state.phase is PAUSED:
        return state.deadline
    # A wall clock that was set back must not postpone the deadline.
    return moment.now + min(record.deadline_at_s - moment.wall_s, state.window_s + state.extension_s)


async def recall(run_id: str, recent: RecentRounds, stores: Stores) -> None:
    """Fill ``recent`` after a restart with the Rounds whose Updates may still count.

    The Rounds on the Version just before them are included: the process that ended may not have cleared their files.
    """
    newest = await stores.runs.newest_version(run_id)
    recent.lineage = await stores.runs.lineage_start(run_id)
    oldest = await stores.runs.version(run_id, recent.oldest_base(newest.number))
    assert oldest is not None, "within a lineage, the numbers of versions have no gaps"
    for earlier in await stores.rounds.since(run_id, oldest.parent):
        base = await stores.runs.version(run_id, earlier.base_version)
        assert base is not None, "a round has its base version"
        recent.add(OpenedRound(record=earlier, base=base))


async def recall_history(run: RunRecord, record: RoundRecord, protocol: RoundProtocol, stores: Stores) -> RoundHistory:
    """Return what is recorded of a Round."""
    run_id, number = record.run_id, record.round
    rosters = await stores.messages.rosters(run_id, number)
    frozen = {roster.phase for roster in rosters}
    gathering = [name for name, phase in protocol.phases.items() if phase.exchange is not None and name not in frozen]
    return RoundHistory(
        extension_s=await _recall_extension(run, number, stores),
        committed=await stores.rounds.updates(run_id, number),
        rosters=rosters,
        senders={name: await stores.messages.senders(run_id, number, name) for name in gathering},
    )


async def recall_participation(run_id: str, participation: Participation, stores: Stores) -> None:
    """Fill ``participation`` after a restart with the devices whose Updates the last closed Rounds accepted.

    The record does not have the devices that received an Assignment and sent no Update.
    """
    last = await stores.rounds.last(run_id)
    newest = 0 if last is None else last.round
    for number in range(newest, max(newest - MAX_RECALLED_ROUNDS, 0), -1):
        index, num_accepted = 0, 1
        while index < num_accepted and not participation.is_full:
            page = await stores.rounds.accepted_devices(run_id, number, index)
            assert page is not None, "the numbers of a run's rounds have no gaps"
            for device in page.device_ids:
                participation.recall(device, number)
            if not page.device_ids:
                # The Round accepted none, or retention removed the set.
                break
            index, num_accepted = index + len(page.device_ids), page.num_accepted


async def _recall_extension(run: RunRecord, round_number: int, stores: Stores) -> float:
    """Return the seconds by which the deadline of a Round has moved, by the events."""
    extension_s, sequence = 0.0, 0
    if not run.start.plan.cohort.max_extension_s:
        return extension_s
    while page := await stores.runs.event_page(run.start.run_id, sequence):
        sequence = page[-1].sequence + 1
        for event in (entry.event for entry in page):
            if isinstance(event, RoundExtended) and event.round == round_number:
                extension_s = max(extension_s, event.extension_s)
    return extension_s


async def clear_spool(
    run: RunRecord, current: RoundRecord | None, recent: RecentRounds, stores: Stores, files: Files
) -> None:
    """Forget the Rounds whose Updates no longer count, and remove the files that no Version uses or will use.

    Args:
        run: The Run.
        current: The Round under way. Without one, the function keeps the Rounds whose Updates will count in the next
            Round.
        recent: The Rounds in memory.
        stores: The record, which names the payloads to keep.
        files: The spool.
    """
    run_id = run.start.run_id
    newest = await stores.runs.newest_version(run_id)
    for opened in recent:
        number = opened.record.round
        if current is not None:
            counts = recent.counts_in(number, current)
        else:
            counts = run.state.is_live and recent.counts_from(number, newest.number)
        if not counts:
            committed = await stores.rounds.headers_made_for(run_id, number)
            await files.run(files.spool.clear_round, run_id, number, committed)
            recent.forget(opened.record)
    await remove_erased(run, stores, files)


async def noise_in(setup: RunSetup, base: Version, stores: Stores, files: Files) -> CentralNoise | SharedNoise | None:
    """Return the noise of a Round on a Version; None without differential privacy.

    Its clip norm is that of the Plan, or the one that is recorded with its base Version. So a restart, a rollback and
    ``fanin verify`` get the same one.

    Raises:
        Damaged: The record of the clip norm is missing or damaged.
    """
    noise = setup.noise
    if not isinstance(noise, CentralNoise) or not noise.bits_noise:
        return noise
    state = await stores.rounds.recorded_state(base)
    try:
        recorded = await files.run(recorded_clipping, state, files.blobs.read_artifact)
    except (Corrupted, NotFound) as exc:
        raise Damaged(f"the clip norm after version {base.number} is damaged on the coordinator's disk") from exc
    return noise if recorded is None else noise.at(recorded[1])
