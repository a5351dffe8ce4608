"""The rows of a database in memory."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fanin.protos.messages import (
    BundleRef,
    LedgerRow,
    LoggedEvent,
    PrivacyPopulation,
    RoundFailed,
    RunEvent,
    RunRested,
    RunWarned,
    Version,
    VersionEvaluation,
    VersionPublished,
)
from fanin.server.storage.memory.administration import MemoryAudit
from fanin.server.storage.protocols.retention import Removed
from fanin.server.storage.records import (
    CommittedUpdate,
    Lease,
    OuterState,
    Roster,
    RoundMark,
    RoundMessage,
    RoundRecord,
    RoundSummary,
    RunRecord,
)
from fanin.server.storage.retention import RemovedKind, check_has_parameters


@dataclass(slots=True, kw_only=True)
class RunRows:
    """The rows of one Run.

    Attributes:
        record: The Run.
        versions: The Versions by number.
        round_by_version: The Round that published each Version, 0 for a Version from outside.
        events: The events in order; the first one had the number 1.
        rounds: The Rounds by number.
        updates: The Updates of each Round by device, in the order of their commits.
        updates_by_assigned_round: The Updates by the Round of their Assignment, then by device.
        outer_states: The outer state after each Round.
        evaluations: The evaluation and the score of each Version that has one.
        published_at_s: The wall time of the publication of each Version.
        publications: The event that published each Version but Version 0.
        removals: The wall time at which retention removed parameters or Updates, by kind and number.
        contributions: Of the Updates of a device whose rows are gone: their number, the last Round, its Assignment's.
        unfinished: The removals whose bytes may still be stored.
        lease: The newest lease.
        messages: The messages of the phases of each Round, in the order of their commits.
        rosters: The rosters of each Round.
        seeds: The seed of the noise of each Round that was charged, None after it was erased.
    """

    record: RunRecord
    versions: dict[int, Version] = field(default_factory=dict)
    round_by_version: dict[int, int] = field(default_factory=dict)
    events: list[LoggedEvent] = field(default_factory=list)
    rounds: dict[int, RoundRecord] = field(default_factory=dict)
    updates: defaultdict[int, dict[str, CommittedUpdate]] = field(default_factory=lambda: defaultdict(dict))
    updates_by_assigned_round: defaultdict[int, dict[str, CommittedUpdate]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    outer_states: dict[int, OuterState] = field(default_factory=dict)
    evaluations: dict[int, tuple[VersionEvaluation, float | None]] = field(default_factory=dict)
    published_at_s: dict[int, float] = field(default_factory=dict)
    publications: dict[int, VersionPublished] = field(default_factory=dict)
    removals: dict[tuple[RemovedKind, int], float] = field(default_factory=dict)
    contributions: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    unfinished: set[tuple[RemovedKind, int]] = field(default_factory=set)
    lease: Lease | None = None
    messages: defaultdict[int, dict[tuple[str, str], RoundMessage]] = field(default_factory=lambda: defaultdict(dict))
    rosters: defaultdict[int, list[Roster]] = field(default_factory=lambda: defaultdict(list))
    seeds: dict[int, bytes | None] = field(default_factory=dict, repr=False)

    @property
    def num_published(self) -> int:
        """The number of Rounds that published a Version."""
        return sum(record.mark is RoundMark.PUBLISHED for record in self.rounds.values())

    @property
    def newest(self) -> Version:
        """The newest Version."""
        return self.versions[max(self.versions)]

    @property
    def warnings(self) -> tuple[RunWarned, ...]:
        """The warnings, oldest first."""
        current: dict[tuple[str, str], RunWarned] = {}
        for event in (logged.event for logged in self.events):
            if isinstance(event, RunWarned):
                current.pop((event.code, event.subject), None)
                if not event.is_over:
                    current[event.code, event.subject] = event
        return tuple(current.values())

    @property
    def removed(self) -> Removed:
        """What retention removed."""
        times: dict[RemovedKind, dict[int, float]] = {kind: {} for kind in RemovedKind}
        for (kind, number), removed_at_s in self.removals.items():
            times[kind][number] = removed_at_s
        return Removed(versions=times[RemovedKind.PARAMETERS], rounds=times[RemovedKind.UPDATES])

    def summary(self, record: RoundRecord) -> RoundSummary:
        """Return a Round with its counts."""
        version = next((number for number, one in self.round_by_version.items() if one == record.round), 0)
        num_updates = len(self.updates[record.round]) if record.forgotten is None else record.num_accepted
        return RoundSummary(record=record, num_updates=num_updates, version=version)

    def check_adoptable(self, number: int) -> None:
        """Raise Conflict if retention removed the parameters of a Version."""
        removed_at_s = self.removals.get((RemovedKind.PARAMETERS, number))
        check_has_parameters(self.record.start.run_id, number, removed_at_s)

    def add_version(self, version: Version, event: VersionPublished | None, now_s: float) -> None:
        """Add a Version whose number is free, with the event that publishes it; None for Version 0."""
        self.versions[version.number] = version
        self.round_by_version[version.number] = 0 if event is None else event.round
        self.published_at_s[version.number] = now_s
        if event is not None:
            self.publications[version.number] = event

    @property
    def newest_sequence(self) -> int:
        """The number of the newest event, 0 without one."""
        return self.events[-1].sequence if self.events else 0

    def add_event(self, event: RunEvent, now_s: float) -> None:
        """Append an event."""
        self.events.append(LoggedEvent(sequence=self.newest_sequence + 1, time=now_s, event=event))

    def rest(self, rested: RunRested, now_s: float) -> None:
        """Record that the Run rests."""
        self.record = replace(self.record, state=rested.state, reason=rested.reason)
        self.add_event(rested, now_s)

    def fail_round(self, failure: RoundFailed, now_s: float) -> RoundRecord:
        """Record the failure of a Round and return the record after that."""
        record = replace(self.rounds[failure.round], mark=RoundMark.FAILED)
        self.rounds[failure.round] = record
        self.messages.pop(failure.round, None)
        self.erase_seeds((failure.round,))
        self.add_event(failure, now_s)
        return record

    def erase_seeds(self, rounds: Iterable[int]) -> None:
        """Erase the seeds of Rounds."""
        self.seeds |= dict.fromkeys(self.seeds.keys() & set(rounds))

    def erase_old_seeds(self, published: int, now_s: float) -> None:
        """Erase the seeds that the Plan does not keep after a publication, and record the Updates as removed."""
        last = published - self.record.start.plan.privacy.keep_seed_rounds
        rounds = [number for number, seed in self.seeds.items() if number <= last and seed is not None]
        self.erase_seeds(rounds)
        for number in rounds:
            self.removals.setdefault((RemovedKind.UPDATES, number), now_s)
            self.unfinished.add((RemovedKind.UPDATES, number))

    def publication(self, number: int) -> VersionPublished | None:
        """Return the event that published a Version, or None without one."""
        return self.publications.get(number)


@dataclass(slots=True, kw_only=True)
class MemoryDatabase:
    """All rows.

    Attributes:
        bundles: The Bundles by the digest of their manifest.
        run_keys: The private key of each epoch of each Run, and the wall time of its creation.
        runs: The rows of each Run, oldest first.
        commands: The digest of each command that was carried out, by its id.
        audit: The audit log.
        populations: The populations by name.
        ledgers: The rows of the ledger of each population.
        uncharged: The Runs with a lost interval that is not charged.
    """

    bundles: dict[str, BundleRef] = field(default_factory=dict)
    run_keys: dict[tuple[str, int], tuple[bytes, float]] = field(default_factory=dict)
    runs: dict[str, RunRows] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    audit: MemoryAudit = field(default_factory=MemoryAudit)
    populations: dict[str, PrivacyPopulation] = field(default_factory=dict)
    ledgers: defaultdict[str, list[LedgerRow]] = field(default_factory=lambda: defaultdict(list))
    uncharged: set[str] = field(default_factory=set)
