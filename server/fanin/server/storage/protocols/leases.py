"""The lease of a Run, and the writes of the driver that holds it.

One driver at a time writes the Rounds of a Run. The store enforces this, not the caller: a driver takes the lease when
it starts, which raises the Run's epoch by one. Every write of a driver is compared with the newest epoch in the write's
own transaction. A write of an older epoch raises Superseded and changes nothing. So a driver that was paused or
disconnected from the store can never overwrite the records of its successor.

Reference: Gray and Cheriton, "Leases", SOSP 1989; the epoch is the fencing token of Burrows, "The Chubby lock service",
OSDI 2006, section 2.4 (there a "sequencer").
"""

from collections.abc import Sequence
from typing import Protocol

from fanin.protos.messages import (
    DevicesGone,
    RoundExtended,
    RoundLacks,
    RunRested,
    RunWarned,
    Version,
    VersionPublished,
)
from fanin.protos.plans import CohortPlan
from fanin.server.storage.protocols.ledger import PrivacyCharge
from fanin.server.storage.records import (
    UNKNOWN_SHORTAGE,
    CommittedUpdate,
    Lease,
    MeasuredRanges,
    OuterState,
    Roster,
    RoundMessage,
    RoundRecord,
    Shortage,
)


class RoundWriter(Protocol):
    """The writes of a driver to the Rounds of its Run. Each method may raise Superseded."""

    async def open(self, record: RoundRecord) -> bool:
        """Record a new Round, if its Run is running. It may be repeated.

        Args:
            record: The Round; its mark is OPEN.

        Returns:
            Whether the Round is open.

        Raises:
            Superseded: Another driver took the Run.
        """
        ...

    async def set_deadline(
        self, round_number: int, deadline_at_s: float, now_s: float, *, num_rosters: int = 0
    ) -> None:
        """Record the deadline of a phase of a Round. If the Run is paused, record the seconds that are left.

        Args:
            round_number: The number of the Round.
            deadline_at_s: Wall time of the deadline, in seconds.
            now_s: Wall time, in seconds.
            num_rosters: The number of rosters that were frozen before the phase.

        Raises:
            Superseded: Another driver took the Run.
        """
        ...

    async def add_message(self, message: RoundMessage) -> RoundMessage | None:
        """Record a device's message of a phase, unless the Round has ended or the roster of the phase is frozen.

        Returns:
            The recorded message of the device. It may be an earlier one, which cannot be replaced. None if the message
            comes too late.

        Raises:
            Superseded: Another driver took the Run.
        """
        ...

    async def freeze(
        self, round_number: int, phase: str, *, quorum: int, now_s: float, others_wait: bool = False
    ) -> Roster | None:
        """Record the roster of a phase: the devices with a message of it. Without a quorum, record the failure.

        Args:
            round_number: The number of the Round.
            phase: The name of the phase.
            quorum: The least number of messages.
            now_s: Wall time, in seconds.
            others_wait: Whether enough other devices wait for a quorum, for the event of a failure.

        Returns:
            The recorded roster, for ever the same. None if the Round has ended.

        Raises:
            Superseded: Another driver took the Run.
        """
        ...

    async def commit(self, update: CommittedUpdate, *, buffer: int) -> CommittedUpdate | None:
        """Accept an Update if its Round is open and has a free place. Counting and inserting is one transaction.

        Args:
            update: The Update. Its payload is durable.
            buffer: The number of places of the Round.

        Returns:
            The Update that is recorded for the Assignment. It may be an earlier Update, which cannot be replaced. None
            if the Round does not accept the Update.

        Raises:
            Superseded: Another driver took the Run.
        """
        ...

    async def close(
        self,
        round_number: int,
        *,
        cohort: CohortPlan,
        now_s: float,
        shortage: Shortage = UNKNOWN_SHORTAGE,
        charge: PrivacyCharge | None = None,
    ) -> RoundRecord:
        """Record the set: the Updates committed until now, in order. Without a quorum, record the failure.

        A Round that is not open is not changed.

        Args:
            round_number: The number of the Round.
            cohort: The Plan's quorum and deadline.
            now_s: Wall time, in seconds.
            shortage: What the event of a failure says.
            charge: The row of the ledger and the seed, which the same transaction records. None without a mechanism of
                privacy. A failure is not charged.

        Returns:
            The record after that. It is still open if the ledger has other rows than the budget was checked with, or
            has a lost interval that is not charged.

        Raises:
            Superseded: Another driver took the Run.
        """
        ...

    async def publish(
        self,
        version: Version,
        event: VersionPublished,
        *,
        next_grid: Sequence[int],
        outer_state: OuterState,
        now_s: float,
    ) -> RoundRecord:
        """Record the Version of a Round, with the grid and the outer state after it.

        Of a Run with privacy, the seeds of the Rounds before its last ``keep_seed_rounds`` are erased, and the Updates
        of these Rounds are recorded as removed.

        A Round that has ended is not changed, so a call can be repeated after an error.

        Args:
            version: The Version.
            event: The event; it names the Round.
            next_grid: The grid of the next Round: an exponent for each block.
            outer_state: The state of the outer optimizer after the Round.
            now_s: Wall time, in seconds.

        Returns:
            The record after that.

        Raises:
            Conflict: The number of the Version is taken.
            Superseded: Another driver took the Run.
        """
        ...

    async def fail(self, round_number: int, *, reason: str, now_s: float) -> RoundRecord:
        """Record the failure of a Round. A Round that has ended is not changed.

        Args:
            round_number: The number of the Round.
            reason: The reason, for operators.
            now_s: Wall time, in seconds.

        Returns:
            The record after that.

        Raises:
            Superseded: Another driver took the Run.
        """
        ...


class RunWriter(RoundWriter, Protocol):
    """All writes of the driver that holds the lease of a Run."""

    @property
    def lease(self) -> Lease:
        """The lease whose epoch every write carries."""
        ...

    async def keep_ranges(self, round_number: int, measured: MeasuredRanges) -> RoundRecord:
        """Record the ranges that were measured for the Version of a closed Round, unless some are recorded.

        A Round that is not closed is not changed.

        Args:
            round_number: The number of the Round.
            measured: The ranges.

        Returns:
            The record after that. It may have other ranges, which cannot be replaced.

        Raises:
            Superseded: Another driver took the Run.
        """
        ...

    async def rest(self, rested: RunRested, now_s: float, *, next_sequence: int) -> bool:
        """Record that a running Run rests, unless an event was recorded after this was decided.

        Args:
            rested: The new state and its reason.
            now_s: Wall time, in seconds.
            next_sequence: The sequence number of the next event at the time of the decision.

        Returns:
            Whether it was recorded.

        Raises:
            Superseded: Another driver took the Run.
        """
        ...

    async def warn(self, warnings: Sequence[RunWarned], now_s: float) -> None:
        """Record the warnings whose code and subject the Run does not have, up to ``MAX_WARNINGS`` of a Run.

        A warning that ``is_over`` ends the one of its code and subject. Without one, it is not recorded.

        Args:
            warnings: The warnings.
            now_s: Wall time, in seconds.

        Raises:
            Superseded: Another driver has taken the Run.
        """
        ...

    async def note(self, event: DevicesGone | RoundExtended | RoundLacks, now_s: float) -> None:
        """Record an event that changes neither the Run nor a Round.

        Args:
            event: The event.
            now_s: Wall time, in seconds.

        Raises:
            Superseded: Another driver took the Run.
        """
        ...


class LeaseStore(Protocol):
    """The leases of the Runs."""

    async def take(self, run_id: str, holder: str, now_s: float) -> RunWriter:
        """Take the lease of a Run, even if another driver holds it.

        Args:
            run_id: A recorded Run.
            holder: The process of the driver, for operators.
            now_s: Wall time, in seconds.

        Returns:
            The writes of the driver, with the next epoch. Those of all earlier epochs are refused from now on.
        """
        ...

    async def lease(self, run_id: str) -> Lease | None:
        """Return the newest lease of a Run, or None if no driver ever took it."""
        ...
