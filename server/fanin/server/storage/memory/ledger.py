"""The privacy ledgers of populations in memory, and the seeds of noise."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fanin.protos.messages import (
    MAX_PAGE_LEDGER,
    LedgerRow,
    Principal,
    PrivacyPopulation,
    StartRun,
)
from fanin.server.storage.decisions import begun_fact, charge_fact, check_charge, check_population, population_of
from fanin.server.storage.memory.database import MemoryDatabase
from fanin.server.storage.protocols.ledger import ChargedRound, LedgerCounts, PrivacyCharge


class MemoryLedger:
    """``LedgerStore`` in memory."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database

    async def populations(self) -> tuple[PrivacyPopulation, ...]:
        """See ``LedgerStore.populations``."""
        return tuple(_population(self._database, name) for name in sorted(self._database.populations))

    async def population(self, name: str) -> PrivacyPopulation | None:
        """See ``LedgerStore.population``."""
        return _population(self._database, name) if name in self._database.populations else None

    async def counts(self, name: str) -> LedgerCounts:
        """See ``LedgerStore.counts``."""
        rows, counts = self._database.ledgers[name], Counter[str]()
        for row in rows:
            counts[row.release] += row.count
        return LedgerCounts(newest=len(rows), counts=counts)

    async def ledger_page(self, name: str, from_number: int) -> tuple[LedgerRow, ...]:
        """See ``LedgerStore.ledger_page``."""
        start = max(from_number - 1, 0)
        return tuple(self._database.ledgers[name][start : start + MAX_PAGE_LEDGER])

    async def charged(self, run_id: str, round_number: int) -> ChargedRound | None:
        """See ``LedgerStore.charged``."""
        for rows in self._database.ledgers.values():
            for row in rows:
                if (row.run_id, row.round) == (run_id, round_number):
                    return ChargedRound(row=row, seed=self._database.runs[run_id].seeds[round_number])
        return None

    async def charge(
        self, name: str, rows: Sequence[LedgerRow], runs: Sequence[str], *, by: Principal | None, now_s: float
    ) -> None:
        """See ``LedgerStore.charge``."""
        ledger = self._database.ledgers[name]
        first = rows[0].number if rows else len(ledger) + 1
        if check_charge(name, rows, ledger[first - 1 :], len(ledger)):
            ledger.extend(rows)
            self._database.uncharged.difference_update(runs)
            self._database.audit.add(charge_fact(name, rows, runs, by), now_s)


def begin_population(database: MemoryDatabase, start: StartRun, by: Principal | None, now_s: float) -> None:
    """Record the population of a Run, unless it is recorded. Raises Conflict if its budget is smaller."""
    population = population_of(start, now_s)
    if population.name in database.populations:
        check_population(start, database.populations[population.name])
        return
    database.populations[population.name] = population
    database.audit.add(begun_fact(population, by), now_s)


def add_charge(database: MemoryDatabase, run_id: str, round_number: int, charge: PrivacyCharge, now_s: float) -> bool:
    """Append the row of a Round and its seed. Return False if the ledger has other rows, or a lost interval."""
    ledger = database.ledgers[charge.population]
    if len(ledger) != charge.after or _population(database, charge.population).uncharged:
        return False
    row = LedgerRow(
        number=len(ledger) + 1,
        run_id=run_id,
        epoch=charge.epoch,
        lineage=charge.lineage,
        round=round_number,
        release=charge.release,
        count=1,
        epsilon=charge.epsilon,
        delta=charge.delta,
        committed_at=now_s,
    )
    ledger.append(row)
    database.runs[run_id].seeds[round_number] = charge.seed
    return True


def _population(database: MemoryDatabase, name: str) -> PrivacyPopulation:
    ledger, runs = database.ledgers[name], database.runs
    blocked = (run_id for run_id in database.uncharged if runs[run_id].record.start.plan.privacy.population == name)
    newest = ledger[-1] if ledger else None
    return replace(database.populations[name], newest=newest, uncharged=tuple(sorted(blocked)))
