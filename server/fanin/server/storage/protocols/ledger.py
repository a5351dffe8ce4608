"""The privacy ledgers of populations, and the seeds of noise.

The start of a Run records its population (``RunStore.add_run``). The close of a Round with a mechanism of privacy
appends its row and its seed (``RoundWriter.close``). The publication erases seeds, as the Plan says
(``RoundWriter.publish``). No method changes or removes a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from fanin.protos.messages import LedgerRow, Principal, PrivacyPopulation

SEED_BYTES: Final = 32
"""Size of the seed of a Round's privacy noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyCharge:
    """What the close of a Round adds to the ledger of its population.

    Attributes:
        population: The population.
        after: The number of the newest row of its ledger when the budget was checked, 0 without one.
        release: The text of the release.
        epoch: The epoch of the Run.
        lineage: The number of the Version with which its lineage began.
        epsilon: The epsilon of the ledger with this row.
        delta: Its delta.
        seed: ``SEED_BYTES`` random bytes, from which the noise of the Round is derived. None: devices add it.
    """

    population: str
    after: int
    release: str
    epoch: int
    lineage: int
    epsilon: float
    delta: float
    seed: bytes | None = field(repr=False)

    def __post_init__(self) -> None:
        if self.seed is not None and len(self.seed) != SEED_BYTES:
            raise ValueError(f"seed of noise: got {len(self.seed)} bytes, expected {SEED_BYTES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """How often each release is in a ledger, by its text, and the number of its newest row."""

    newest: int
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChargedRound:
    """A Round that closed with a mechanism of privacy.

    Attributes:
        row: Its row of the ledger.
        seed: The seed of its noise, None after it was erased, or if devices added the noise.
    """

    row: LedgerRow
    seed: bytes | None = field(repr=False)


class LedgerStore(Protocol):
    """The ledgers."""

    async def populations(self) -> tuple[PrivacyPopulation, ...]:
        """Return all populations, in the order of their names."""
        ...

    async def population(self, name: str) -> PrivacyPopulation | None:
        """Return a population, or None before its first Run."""
        ...

    async def counts(self, name: str) -> LedgerCounts:
        """Return how often each release is in the ledger of a population. Equal rows are counted, not listed."""
        ...

    async def ledger_page(self, name: str, from_number: int) -> tuple[LedgerRow, ...]:
        """Return up to ``MAX_PAGE_LEDGER`` rows of a ledger from a number on, none after the last one."""
        ...

    async def charged(self, run_id: str, round_number: int) -> ChargedRound | None:
        """Return the row and the seed of a Round, or None if its close charged nothing."""
        ...

    async def charge(
        self, name: str, rows: Sequence[LedgerRow], runs: Sequence[str], *, by: Principal | None, now_s: float
    ) -> None:
        """Append rows for lost intervals, and record that those of some Runs are charged, with an audit entry.

        Args:
            name: The population.
            rows: The rows; the number of the first one follows that of the newest row of the ledger. If the ledger has
                exactly these rows from that number on, the call was carried out before, and changes nothing.
            runs: The Runs whose lost intervals are charged from now on.
            by: Who charges.
            now_s: Wall time, in seconds.

        Raises:
            Conflict: The ledger has other rows by now.
        """
        ...
