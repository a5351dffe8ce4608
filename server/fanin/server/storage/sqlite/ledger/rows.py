"""Populations, and the rows of their ledgers.

A row is appended in the transaction that closes its Round, and no statement changes or removes one. The transaction
compares the number of the newest row with the one that the budget was checked with, so two Runs never spend the same
rest of a budget.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Engine, Row, func, insert, select, update

from fanin.protos.errors import Corrupted
from fanin.protos.messages import (
    MAX_PAGE_LEDGER,
    LedgerRow,
    Principal,
    PrivacyPopulation,
    StartRun,
)
from fanin.protos.texts import counted
from fanin.server.storage.decisions import begun_fact, charge_fact, check_charge, check_population, population_of
from fanin.server.storage.protocols.ledger import ChargedRound, LedgerCounts, PrivacyCharge
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.administration import append_audit
from fanin.server.storage.sqlite.engine import writing
from fanin.server.storage.sqlite.ledger.places import begin_place, count_rows, find_place
from fanin.server.storage.sqlite.ledger.seeds import add_seed, find_seed

_POPULATIONS: Final = schema.populations
_LEDGER: Final = schema.privacy_ledger


class SqliteLedger:
    """The ledgers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def populations(self) -> tuple[PrivacyPopulation, ...]:
        """See ``LedgerStore.populations``."""
        with self._engine.connect() as connection:
            rows = connection.execute(select(_POPULATIONS).order_by(_POPULATIONS.c.population)).all()
            return tuple(_population(connection, row) for row in rows)

    def population(self, name: str) -> PrivacyPopulation | None:
        """See ``LedgerStore.population``."""
        with self._engine.connect() as connection:
            return find_population(connection, name)

    def counts(self, name: str) -> LedgerCounts:
        """See ``LedgerStore.counts``."""
        query = (
            select(_LEDGER.c.release, func.sum(_LEDGER.c["count"]), func.count())
            .where(_LEDGER.c.population == name)
            .group_by(_LEDGER.c.release)
        )
        # One transaction, so that the newest row is among those that are counted.
        with self._engine.begin() as connection:
            newest, expected = _newest_number(connection, name), _num_rows(connection, name)
            rows = connection.execute(query).all()
        num_rows = sum(number for _, _, number in rows)
        if num_rows != expected or newest != expected:
            raise Corrupted(
                f"fanin.db: the privacy ledger of population {name} has {counted(num_rows, 'row')} up to number "
                f"{newest}, expected {expected}: epsilon is not known without the others; restore a backup of the "
                "folder",
                code="FN-1661",
            )
        return LedgerCounts(newest=newest, counts={release: int(count) for release, count, _ in rows})

    def ledger_page(self, name: str, from_number: int) -> tuple[LedgerRow, ...]:
        """See ``LedgerStore.ledger_page``."""
        with self._engine.connect() as connection:
            return _rows(connection, name, from_number, MAX_PAGE_LEDGER)

    def charged(self, run_id: str, round_number: int) -> ChargedRound | None:
        """See ``LedgerStore.charged``."""
        query = select(_LEDGER).where(_LEDGER.c.run_id == run_id, _LEDGER.c["round"] == round_number)
        with self._engine.begin() as connection:
            row = connection.execute(query).first()
            return (
                None if row is None else ChargedRound(row=_row(row), seed=find_seed(connection, run_id, round_number))
            )

    def charge(
        self, name: str, rows: Sequence[LedgerRow], runs: Sequence[str], *, by: Principal | None, now_s: float
    ) -> None:
        """See ``LedgerStore.charge``."""
        table = schema.runs
        with writing(self._engine) as connection:
            first = rows[0].number if rows else _newest_number(connection, name) + 1
            if not check_charge(name, rows, _rows(connection, name, first, None), _newest_number(connection, name)):
                return
            for row in rows:
                _append(connection, name, row)
            is_run = (table.c.population == name) & table.c.run_id.in_(list(runs))
            connection.execute(update(table).where(is_run).values(uncharged_at=None))
            append_audit(connection, [charge_fact(name, rows, runs, by)], now_s)
        note_rows(self._engine)


def begin_population(connection: Connection, start: StartRun, by: Principal | None, now_s: float) -> None:
    """Record the population of a Run within the transaction that records the Run, unless it is recorded.

    Raises:
        Conflict: Its budget is smaller than that of the Plan, or its claim is another one.
    """
    population = population_of(start, now_s)
    known = find_population(connection, population.name)
    if known is not None:
        check_population(start, known)
        return
    connection.execute(
        insert(_POPULATIONS).values(
            population=population.name,
            epsilon=population.epsilon,
            delta=population.delta,
            size=population.size,
            run_id=population.run_id,
            begun_at=now_s,
            relation=population.relation,
            num_rows=0,
            place=_token(connection),
        )
    )
    append_audit(connection, [begun_fact(population, by)], now_s)


def add_charge(connection: Connection, run_id: str, round_number: int, charge: PrivacyCharge, now_s: float) -> bool:
    """Append the row of a Round and its seed within the transaction that closes it.

    Returns:
        Whether they were appended. If not, the ledger has other rows than the budget was checked with.
    """
    newest = _newest_number(connection, charge.population)
    if newest != charge.after or find_uncharged(connection, charge.population):
        return False
    row = LedgerRow(
        number=newest + 1,
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
    _append(connection, charge.population, row)
    if charge.seed is not None:
        add_seed(connection, run_id, round_number, charge.seed)
    return True


def find_population(connection: Connection, name: str) -> PrivacyPopulation | None:
    """Return a population within the caller's transaction, or None without one."""
    row = connection.execute(select(_POPULATIONS).where(_POPULATIONS.c.population == name)).first()
    return None if row is None else _population(connection, row)


def _population(connection: Connection, row: Row[tuple[object, ...]]) -> PrivacyPopulation:
    newest = connection.execute(
        select(_LEDGER).where(_LEDGER.c.population == row.population).order_by(_LEDGER.c.number.desc()).limit(1)
    ).first()
    return PrivacyPopulation(
        name=row.population,
        epsilon=row.epsilon,
        delta=row.delta,
        size=row.size,
        run_id=row.run_id,
        begun_at=row.begun_at,
        relation=row.relation,
        newest=None if newest is None else _row(newest),
        uncharged=find_uncharged(connection, row.population),
    )


def find_uncharged(connection: Connection, name: str) -> tuple[str, ...]:
    """Return the Runs of a population with a lost interval that is not charged, within the caller's transaction."""
    table = schema.runs
    query = select(table.c.run_id).where(table.c.population == name, table.c.uncharged_at.is_not(None))
    return tuple(connection.execute(query.order_by(table.c.run_id)).scalars())


def mark_copied(engine: Engine, now_s: float) -> tuple[str, ...]:
    """Let the Runs of the populations wait for a charge whose ledgers were written in another place (``places``).

    The folder is a copy then, or its database was put back: more may have been released than the ledgers have.

    Returns:
        The populations.
    """
    folder, runs = _folder(engine), schema.runs
    with engine.connect() as connection:
        if connection.execute(select(_POPULATIONS.c.population).limit(1)).first() is None:
            return ()
        rows = _all_rows(connection)
    place = find_place(folder)
    if place is None or place.rows > rows:
        # Before the transaction: a kill between the two leaves populations with another token, which wait, too.
        place = begin_place(folder, rows)
    elif place.rows < rows:
        count_rows(folder, place, rows)
    with writing(engine) as connection:
        is_copied = _POPULATIONS.c.place.is_not(None) & (_POPULATIONS.c.place != place.token)
        query = select(_POPULATIONS.c.population).where(is_copied).order_by(_POPULATIONS.c.population)
        names = tuple(connection.execute(query).scalars())
        connection.execute(update(runs).where(runs.c.population.in_(names)).values(uncharged_at=now_s))
        is_new = _POPULATIONS.c.place.is_distinct_from(place.token)
        connection.execute(update(_POPULATIONS).where(is_new).values(place=place.token))
    return names


def note_rows(engine: Engine) -> None:
    """Record outside of the database how many rows the ledgers have, after a transaction that appended one.

    Raises StorageFull, StorageUnavailable.
    """
    place = find_place(_folder(engine))
    if place is not None:
        with engine.connect() as connection:
            count_rows(_folder(engine), place, _all_rows(connection))


def forget_place(connection: Connection) -> None:
    """Forget the place in the transaction of a restore, which decides itself what is not charged."""
    connection.execute(update(_POPULATIONS).values(place=None))


def _folder(engine: Engine) -> Path:
    return Path(str(engine.url.database)).parent


def _token(connection: Connection) -> str:
    """Return the token of the place, which begins with the first population."""
    folder = _folder(connection.engine)
    place = find_place(folder) or begin_place(folder, _all_rows(connection))
    return place.token


def _all_rows(connection: Connection) -> int:
    return int(connection.execute(select(func.sum(_POPULATIONS.c.num_rows))).scalar() or 0)


def _num_rows(connection: Connection, name: str) -> int:
    query = select(_POPULATIONS.c.num_rows).where(_POPULATIONS.c.population == name)
    return int(connection.execute(query).scalar() or 0)


def _newest_number(connection: Connection, name: str) -> int:
    query = select(func.max(_LEDGER.c.number)).where(_LEDGER.c.population == name)
    return int(connection.execute(query).scalar() or 0)


def _rows(connection: Connection, name: str, from_number: int, limit: int | None) -> tuple[LedgerRow, ...]:
    query = select(_LEDGER).where(_LEDGER.c.population == name, _LEDGER.c.number >= from_number)
    return tuple(map(_row, connection.execute(query.order_by(_LEDGER.c.number).limit(limit))))


def _row(row: Row[tuple[object, ...]]) -> LedgerRow:
    fields = dict(row._mapping)
    del fields["population"]
    return LedgerRow(**fields)


def _append(connection: Connection, name: str, row: LedgerRow) -> None:
    """Append a row, and count it where the loss of the newest one is noticed, too."""
    connection.execute(insert(_LEDGER).values(population=name, **asdict(row)))
    connection.execute(update(_POPULATIONS).where(_POPULATIONS.c.population == name).values(num_rows=row.number))
