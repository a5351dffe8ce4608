"""The populations whose privacy budgets Runs share, for people: their ledgers, and charges for lost intervals."""

from collections.abc import Sequence
from functools import partial
from typing import Final

from fanin.protos.errors import InvalidInput, NotFound
from fanin.protos.messages import (
    LedgerPage,
    LedgerRow,
    LostInterval,
    PopulationPage,
    Principal,
    PrivacyPopulation,
)
from fanin.server.privacy.accounting import Entry, epsilon
from fanin.server.privacy.ledger import from_text, to_text
from fanin.server.runs.driving.drivers import Drivers
from fanin.server.storage.stores import Files, Stores

MAX_PAGE_POPULATIONS: Final = 500


class Populations:
    """The populations of one coordinator.

    Args:
        stores: The record.
        files: Its lane runs the accounting.
        drivers: The Runs, which know what one of their Rounds releases.
    """

    def __init__(self, stores: Stores, files: Files, drivers: Drivers) -> None:
        self._stores, self._files, self._drivers = stores, files, drivers

    async def page(self, after: str) -> PopulationPage:
        """Return populations whose names follow ``after``."""
        later = [each for each in await self._stores.ledger.populations() if each.name > after]
        page = tuple(later[:MAX_PAGE_POPULATIONS])
        return PopulationPage(populations=page, next=page[-1].name if len(later) > len(page) else "")

    async def ledger(self, name: str, from_number: int) -> LedgerPage:
        """Return rows of the ledger of a population from a number on. Raises NotFound, and Corrupted for a lost row."""
        population, ledger = await self._population(name), self._stores.ledger
        # A ledger that lost a row has a wrong epsilon.
        await ledger.counts(name)
        return LedgerPage(population=population, rows=await ledger.ledger_page(name, from_number))

    async def charge(self, lost: LostInterval, by: Principal | None) -> PrivacyPopulation:
        """Charge Rounds that a restored coordinator does not know. Repeating the request changes nothing more.

        The budget does not limit the charge: what was released was released.

        Raises:
            NotFound: There is no such population, or no such Run in it.
            InvalidInput: No Run is named and none waits.
            Conflict: The ledger has a newer row.
        """
        population, ledger = await self._population(lost.population), self._stores.ledger
        runs = (lost.run_id,) if lost.run_id else population.uncharged
        newest = 0 if population.newest is None else population.newest.number
        if not runs:
            if newest > lost.after:
                # A repeated request, which was carried out.
                return population
            raise InvalidInput(
                f"population {population.name}: got no run, and none of its runs waits for a charge; name one (--run) "
                "to charge it anyway",
                code="FN-1693",
            )
        rows = await self._rows(population, lost, runs)
        await ledger.charge(population.name, rows, runs, by=by, now_s=self._stores.wall())
        return await self._population(lost.population)

    async def _rows(
        self, population: PrivacyPopulation, lost: LostInterval, runs: Sequence[str]
    ) -> tuple[LedgerRow, ...]:
        counts = (await self._stores.ledger.counts(population.name)).counts
        entries: list[Entry] = [(from_text(text), count) for text, count in counts.items()]
        rows = []
        for number, run_id in enumerate(runs if lost.rounds else (), lost.after + 1):
            setup = self._drivers.driver(run_id).setup
            if setup.noise is None or setup.plan.privacy.population != population.name:
                raise NotFound(
                    f"run {run_id}: is not one of the population {population.name}; fanin privacy ledger "
                    f"{population.name} lists its runs",
                    code="FN-1694",
                )
            entries.append((setup.noise.release, lost.rounds))
            rows.append(
                LedgerRow(
                    number=number,
                    run_id=run_id,
                    epoch=setup.delegation.epoch,
                    lineage=await self._stores.runs.lineage_start(run_id),
                    round=0,
                    release=to_text(setup.noise.release),
                    count=lost.rounds,
                    epsilon=await self._files.run(partial(epsilon, tuple(entries), population.delta)),
                    delta=population.delta,
                    committed_at=self._stores.wall(),
                )
            )
        return tuple(rows)

    async def _population(self, name: str) -> PrivacyPopulation:
        population = await self._stores.ledger.population(name)
        if population is None:
            raise NotFound(
                f"population {name}: no run of this coordinator has named it; fanin privacy ledger lists those that "
                "are known",
                code="FN-1694",
            )
        return population
