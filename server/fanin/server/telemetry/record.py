"""What the record says of Runs, followed event by event when it is read.

Nothing is counted while a Round runs: a reader asks, and the events since the last time are added. The totals begin
with the first reader, which is no loss: Prometheus shows increases between two scrapes. The tally of a Run that nobody
asked for in a while begins again.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from fanin.protos.errors import Corrupted
from fanin.protos.messages import DevicesGone, LoggedEvent, RoundFailed, VersionEvaluation, VersionPublished
from fanin.server.runs.view import RunView
from fanin.server.storage.lanes import LONG_S, Durations
from fanin.server.storage.stores import Stores


@dataclass(slots=True)
class RunTally:
    """The totals of one Run.

    Attributes:
        next_sequence: The number of the first event that is not added yet.
        changed_s: Wall time of the last event, 0.0 without one.
        durations: The durations of the Rounds that published a Version.
        num_published: Number of these Rounds.
        num_failed: Rounds that failed.
        last_success_s: Wall time of the last publication by a Round, 0.0 without one.
        received_bytes: Bytes of the Updates of published Rounds.
        sent_bytes: Bytes that devices downloaded for them.
        num_saturated: Values beyond the largest encoded value.
        num_clamped: Values that were set to the end of their range.
        num_stale: Updates that were trained from an older Version.
        num_gone: Devices that were silent for too long.
        newest: The last publication by a Round, None without one.
        evaluated: The last publication with an evaluation by devices, None without one.
        held_out: The newest evaluation on held-out data, None without one.
    """

    next_sequence: int = 1
    changed_s: float = 0.0
    durations: Durations = field(default_factory=lambda: Durations(LONG_S))
    num_published: int = 0
    num_failed: int = 0
    last_success_s: float = 0.0
    received_bytes: int = 0
    sent_bytes: int = 0
    num_saturated: int = 0
    num_clamped: int = 0
    num_stale: int = 0
    num_gone: int = 0
    newest: VersionPublished | None = None
    evaluated: VersionPublished | None = None
    held_out: VersionEvaluation | None = None

    def add(self, entry: LoggedEvent) -> None:
        """Add the next event."""
        self.next_sequence, self.changed_s = entry.sequence + 1, entry.time
        match entry.event:
            case VersionPublished(round=round_number) as event if round_number:
                self.num_published += 1
                self.durations.note(event.round_s)
                self.received_bytes += event.bytes_up
                self.sent_bytes += event.bytes_down
                self.num_saturated += event.num_saturated
                self.num_clamped += event.num_clamped
                self.num_stale += event.num_stale
                self.show(event, entry.time)
            case RoundFailed():
                self.num_failed += 1
            case DevicesGone(num_devices=num_devices):
                self.num_gone += num_devices
            case _:
                pass

    def show(self, event: VersionPublished, published_s: float) -> None:
        """Show a publication by a Round as the last one, without adding it to the totals."""
        self.newest, self.last_success_s = event, published_s
        if event.evaluation is not None:
            self.evaluated = event


class RecordFollower:
    """The tallies of Runs. All methods are for one task at a time.

    Args:
        stores: The record.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._tallies: dict[str, RunTally] = {}
        # Runs with events that do not count: from before the start, or from a time in which nobody asked.
        self._earlier: set[str] = set()
        self._has_started = False

    async def start(self, views: Sequence[RunView]) -> None:
        """Begin with the Runs of the record, once: their earlier events do not count."""
        if self._has_started:
            return
        self._has_started = True
        self._earlier.update(view.run_id for view in views)
        for view in views:
            # The others have no new events.
            if view.state.is_live:
                self._tallies[view.run_id] = await self._recall(view)

    def keep(self, run_ids: Set[str]) -> None:
        """Forget all other Runs."""
        self._earlier.update(self._tallies)
        self._tallies = {run_id: tally for run_id, tally in self._tallies.items() if run_id in run_ids}

    async def tally(self, view: RunView) -> RunTally:
        """Return the tally of a Run up to now."""
        run_id, runs = view.run_id, self._stores.runs
        tally = self._tallies.get(run_id)
        if tally is None:
            tally = await self._recall(view) if run_id in self._earlier else RunTally()
            self._tallies[run_id] = tally
        try:
            while page := await runs.event_page(run_id, tally.next_sequence):
                for entry in page:
                    tally.add(entry)
            if view.record.start.plan.evaluation.data:
                tally.held_out = await self._stores.evaluations.newest_evaluation(run_id)
        except Corrupted:
            # The Run itself shows its damage; the totals stay as they are.
            pass
        return tally

    async def _recall(self, view: RunView) -> RunTally:
        """Return the tally of a Run whose earlier events are not counted."""
        tally = RunTally()
        try:
            await self._read_last(view, tally)
        except Corrupted:
            tally = RunTally()
        return tally

    async def _read_last(self, view: RunView, tally: RunTally) -> None:
        runs, run_id = self._stores.runs, view.run_id
        newest = await runs.newest_sequence(run_id)
        for entry in await runs.event_page(run_id, max(newest, 1)):
            tally.next_sequence, tally.changed_s = entry.sequence + 1, entry.time
        publication = await runs.publication(run_id, view.newest.number)
        if publication is None or not publication.round:
            return
        for summary in await self._stores.rounds.latest(run_id, 2):
            if summary.record.round == publication.round:
                tally.show(publication, summary.record.opened_at_s + publication.round_s)
