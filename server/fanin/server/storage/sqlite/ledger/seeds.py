"""The seeds of noise.

A seed is recorded with the row of its Round, and erased with the Updates of the Round. Its row stays, so a Round never
gets a second seed: noise that is drawn twice is two releases. ``PRAGMA secure_delete`` overwrites an erased seed in the
database file.
"""

from collections.abc import Iterable
from typing import Final

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from fanin.protos.messages import StartRun
from fanin.server.storage.records import RoundMark
from fanin.server.storage.retention import RemovedKind
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.schema import decode
from fanin.v1 import control_pb2

_SEEDS: Final = schema.noise_seeds


def add_seed(connection: Connection, run_id: str, round_number: int, seed: bytes) -> None:
    """Record the seed of a Round within the transaction that closes it."""
    connection.execute(insert(_SEEDS).values(run_id=run_id, round=round_number, seed=seed))


def find_seed(connection: Connection, run_id: str, round_number: int) -> bytes | None:
    """Return the seed of a Round within the caller's transaction, or None if it was erased."""
    query = select(_SEEDS.c.seed).where(_SEEDS.c.run_id == run_id, _SEEDS.c["round"] == round_number)
    seed: bytes | None = connection.execute(query).scalar()
    return seed


def erase_seeds(connection: Connection, run_id: str, rounds: Iterable[int], now_s: float) -> None:
    """Erase the seeds of Rounds within the caller's transaction. Rounds without one are not changed."""
    for number in rounds:
        is_seed = (_SEEDS.c.run_id == run_id) & (_SEEDS.c["round"] == number) & _SEEDS.c.seed.is_not(None)
        connection.execute(update(_SEEDS).where(is_seed).values(seed=None, erased_at=now_s))


def erase_old_seeds(connection: Connection, run_id: str, published: int, now_s: float) -> None:
    """Erase the seeds that the Plan does not keep after a publication, in its transaction.

    The Updates of these Rounds are recorded as removed. Their files are removed after that (``care.pruner``).
    """
    runs = schema.runs
    query = select(runs.c.start_proto).where(runs.c.run_id == run_id, runs.c.population.is_not(None))
    data = connection.execute(query).scalar()
    if data is None:
        return
    start = decode(f"run {run_id}", StartRun, control_pb2.StartRunRequest, data)
    last = published - start.plan.privacy.keep_seed_rounds
    is_old = (_SEEDS.c.run_id == run_id) & (_SEEDS.c["round"] <= last) & _SEEDS.c.seed.is_not(None)
    numbers = connection.execute(select(_SEEDS.c["round"]).where(is_old)).scalars().all()
    erase_seeds(connection, run_id, numbers, now_s)
    _remove_updates(connection, run_id, numbers, now_s)


def leave_out(connection: Connection, now_s: float) -> tuple[tuple[str, int], ...]:
    """Erase all seeds and name no Update of a Run with central noise, in a copy of the database for a backup.

    Returns:
        The Rounds that are under way, which cannot be folded without their Updates.
    """
    rounds = schema.rounds
    connection.execute(update(_SEEDS).where(_SEEDS.c.seed.is_not(None)).values(seed=None, erased_at=now_s))
    query = (
        select(rounds.c.run_id, rounds.c["round"], rounds.c.state)
        .where(rounds.c.run_id.in_(_central(connection)), rounds.c.state != RoundMark.FAILED.value)
        .order_by(rounds.c.run_id, rounds.c["round"])
    )
    under_way = []
    for run_id, number, state in connection.execute(query).all():
        if state == RoundMark.PUBLISHED.value:
            _remove_updates(connection, run_id, (number,), now_s, finished_at_s=now_s)
        else:
            under_way.append((run_id, number))
    return tuple(under_way)


def _central(connection: Connection) -> list[str]:
    """Return the Runs with a seed of noise, whose Updates have none. Updates with noise on devices are masked."""
    runs = schema.runs
    query = select(runs.c.run_id, runs.c.start_proto).where(runs.c.population.is_not(None))
    starts = {
        run_id: decode(f"run {run_id}", StartRun, control_pb2.StartRunRequest, data)
        for run_id, data in connection.execute(query).all()
    }
    return [run_id for run_id, start in starts.items() if not start.plan.privacy.is_shared]


def _remove_updates(
    connection: Connection, run_id: str, numbers: Iterable[int], now_s: float, finished_at_s: float | None = None
) -> None:
    for number in numbers:
        row = {"run_id": run_id, "kind": RemovedKind.UPDATES.value, "number": number, "removed_at": now_s}
        values = upsert(schema.removals).values(**row, finished_at=finished_at_s)
        connection.execute(values.on_conflict_do_nothing())
