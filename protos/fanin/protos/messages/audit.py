"""The audit log, and the privacy ledgers of populations.

The audit log has entries that are chained by their digests (``AuditEntry`` in access.proto).

    digest = hex(SHA-256(digest of the entry before LF entry as JSON))

A digest that was kept elsewhere proves every entry up to it: an edit, an exchange or a removal changes all digests that
follow. A log that was cut does not contain it.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from fanin.protos.errors import Corrupted
from fanin.protos.messages.commands import check_rounds
from fanin.protos.names import check_name, check_run_id
from fanin.protos.plans.privacy import COINS, PrivacyPlan

AUDIT_CONTEXT: Final = "fanin audit v1"
NO_DIGEST: Final = "0" * 64
"""The digest before the first entry."""
MAX_PAGE_AUDIT: Final = 500

COORDINATOR: Final = "coordinator"
"""The principal of what the coordinator does by itself."""
RESTORE_CALL: Final = "Restore"
"""The call of the entry that a restore of a backup appends."""
STOP_CALL: Final = "Stop"
"""The call of the entry that a coordinator appends when it ends. One that is killed appends none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """An entry of the audit log. ``time_us`` is in microseconds since the Unix epoch."""

    sequence: int
    time_us: int
    principal: str
    call: str
    subject: str
    outcome: str
    digest: str

    def chained(self, previous: str) -> str:
        """Return the digest that the entry must have after one with the digest ``previous``."""
        row = [AUDIT_CONTEXT, self.sequence, self.time_us, self.principal, self.call, self.subject, self.outcome]
        text = json.dumps(row, separators=(",", ":"))
        return hashlib.sha256(f"{previous}\n{text}".encode("ascii")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPage:
    """A page of the audit log, with the number of all entries and the digest of the newest."""

    entries: tuple[AuditEntry, ...]
    num_entries: int = 0
    head: str = NO_DIGEST


class AuditChain:
    """The verification of a log, from its first entry on.

    Args:
        head: A digest that was kept elsewhere; "" without one.

    Attributes:
        num_entries: The entries verified so far.
        digest: The digest of the last one.
        head_sequence: The number of the entry with the digest ``head``; 0 until it was read.
        restores: The entries of restores. What was logged between a backup and its restore is not in the log.
    """

    def __init__(self, head: str = "") -> None:
        self._head = head
        self.num_entries = 0
        self.digest = NO_DIGEST
        self.head_sequence = 0
        self.restores: list[AuditEntry] = []

    def add(self, entries: Iterable[AuditEntry]) -> None:
        """Verify the entries that follow. Raises Corrupted."""
        for entry in entries:
            expected = self.num_entries + 1
            if entry.sequence != expected:
                raise Corrupted(
                    f"audit log: got entry {entry.sequence} after entry {self.num_entries}, expected {expected}: "
                    "entries were removed or exchanged; compare with a backup of fanin.db",
                    code="FN-1410",
                )
            digest = entry.chained(self.digest)
            if entry.digest != digest:
                raise Corrupted(
                    f"audit log: entry {entry.sequence} has the digest {entry.digest[:16]}, expected {digest[:16]}: it "
                    "or an entry before it was changed; compare with a backup of fanin.db",
                    code="FN-1410",
                )
            self.num_entries, self.digest = expected, digest
            if digest == self._head:
                self.head_sequence = expected
            if (entry.principal, entry.call) == (COORDINATOR, RESTORE_CALL):
                self.restores.append(entry)

    def finish(self, last: AuditPage) -> None:
        """Verify the end of the log: the page after its last entry. Raises Corrupted.

        An entry before the first number is on no page, but among the number of all. And the log must contain the head
        that was kept elsewhere.
        """
        if last.num_entries != self.num_entries:
            raise Corrupted(
                f"audit log: has {last.num_entries} entries, expected {self.num_entries}, of the numbers from 1 on: "
                "entries were inserted; compare with a backup of fanin.db",
                code="FN-1410",
            )
        if self._head and not self.head_sequence and self._head != NO_DIGEST:
            if self.restores:
                restores = "; ".join(f"entry {entry.sequence}, {entry.subject}" for entry in self.restores)
                raise Corrupted(
                    f"audit log: none of its {self.num_entries} entries has the digest {self._head[:16]}. Entries that "
                    f"followed a backup were lost by its restore ({restores}): the head may be of one of those, but "
                    "a cut or rewritten log is not excluded; compare with a head that was kept before the backup",
                    code="FN-1475",
                )
            raise Corrupted(
                f"audit log: none of its {self.num_entries} entries has the digest {self._head[:16]}: the log was cut "
                "before that entry or rewritten, or the head is of another coordinator; compare with a backup of "
                "fanin.db",
                code="FN-1411",
            )


MAX_PAGE_LEDGER: Final = 500
"""Largest number of rows of a privacy ledger in a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """A row of the ledger of a population. Rows are only appended.

    Attributes:
        number: Its number, from 1.
        run_id: The Run.
        epoch: The epoch of the Run.
        lineage: The number of the Version with which its lineage began.
        round: The Round whose close was charged; 0 for an interval that a restored coordinator lost.
        release: The text of the release.
        count: How often it was released.
        epsilon: The epsilon of the ledger up to this row.
        delta: Its delta.
        committed_at: Wall time.
    """

    number: int
    run_id: str
    epoch: int
    lineage: int
    round: int
    release: str
    count: int
    epsilon: float
    delta: float
    committed_at: float


ZERO_OUT: Final = "zero-out"
ADD_OR_REMOVE: Final = "add-or-remove"
"""The neighbouring federations of a claim (docs/explanation/differential-privacy.md)."""


def relation_of(privacy: PrivacyPlan) -> str:
    """Return the relation of the claim of a Plan. With coins, no place and no denominator depends on a device."""
    return ADD_OR_REMOVE if privacy.sampling == COINS else ZERO_OUT


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyPopulation:
    """A population and its budget. It is recorded with its first Run, and for ever.

    Attributes:
        name: Its name.
        epsilon: The largest epsilon of its ledger.
        delta: The delta of that epsilon.
        size: Devices that it covers, at least.
        run_id: The Run that began it.
        begun_at: Wall time.
        relation: The claim of its total: ``ZERO_OUT`` or ``ADD_OR_REMOVE``.
        newest: The newest row of its ledger, None before the first.
        uncharged: The Runs of which this coordinator may lack releases that are not charged yet: after a restore, in a
            copied folder, or after a reclaim.
    """

    name: str
    epsilon: float
    delta: float
    size: int
    run_id: str
    begun_at: float
    relation: str
    newest: LedgerRow | None = None
    uncharged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpentPrivacy:
    """The epsilon of the ledger of a population, and its budget.

    Attributes:
        population: The population.
        epsilon: Of all releases of all its Runs.
        delta: Its delta.
        budget: The largest epsilon that the Plan of the Run allows.
        clip_norm: Largest L2 norm of a device's change in the Round that published the newest Version, or in the first
            one; 0: that Version is of no Round.
        is_charge_due: Whether the ledger may lack releases that are not charged, so that ``epsilon`` is a lower bound.
    """

    population: str
    epsilon: float
    delta: float
    budget: float
    clip_norm: float = 0.0
    is_charge_due: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationPage:
    """A page of the populations in the order of their names, and the name after which the next one starts."""

    populations: tuple[PrivacyPopulation, ...]
    next: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPage:
    """A page of the ledger of a population, and the population."""

    population: PrivacyPopulation
    rows: tuple[LedgerRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LostInterval:
    """An administrator's charge for Rounds that a restored coordinator does not know.

    Attributes:
        population: The population.
        rounds: Rounds of each Run, at least as many as closed after the backup.
        run_id: The Run; "": each Run that waits for it.
        after: The number of the newest row of the ledger that the administrator has seen. So a repeated request charges
            nothing twice.
    """

    population: str
    rounds: int
    run_id: str = ""
    after: int = 0

    def __post_init__(self) -> None:
        check_name("charge: population", self.population)
        if self.run_id:
            check_run_id(self.run_id)
        check_rounds(self.rounds)
