"""The contract of leases: the older of two drivers cannot write."""

from collections.abc import Awaitable, Callable

from fanin.protos.errors import Superseded
from fanin.protos.messages import RunRested, RunState, devices_gone
from fanin.server.storage.contracts.values import COHORT, committed, opened, published, refusal, start, version
from fanin.server.storage.stores import DriverStores, Stores

RUN = "taken"


async def check_leases(here: Stores, there: Stores) -> None:
    """Check that the driver of one handle supersedes the driver of another one. Raises AssertionError.

    Args:
        here: A database.
        there: Another handle of it.
    """
    await here.runs.add_run(start(RUN), 100.0)
    assert await here.leases.lease(RUN) is None, "lease: a run that no driver took has one"
    older = await here.take(RUN)
    await older.writer.open(opened(run_id=RUN))
    newer = await there.take(RUN)
    assert (older.writer.lease.epoch, newer.writer.lease.epoch) == (1, 2), "take: expected the epochs 1 and 2"
    assert await here.leases.lease(RUN) == newer.writer.lease, "lease: is not the newest one"
    before = await _record(here)
    await _check_refusals(older)
    assert await _record(here) == before, "a write of the older driver was refused, and changed the record"
    assert (await newer.writer.fail(1, reason="over", now_s=20.0)).round == 1, "fail: refused the newer driver"
    again = await here.take(RUN)
    assert again.writer.lease.epoch == 3, "take: the epoch did not rise"
    await refusal(Superseded, newer.writer.open(opened(2, run_id=RUN)), "open: of a driver that was superseded")
    assert await again.writer.open(opened(2, run_id=RUN)), "open: refused the newest driver"


async def _check_refusals(older: DriverStores) -> None:
    writer, following = older.writer, version(version(run_id=RUN), RUN)
    rested = RunRested(state=RunState.FAILED, reason="old")
    event = published(following, 1)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "open": lambda: writer.open(opened(2, run_id=RUN)),
        "set_deadline": lambda: writer.set_deadline(1, 70.0, 10.0),
        "commit": lambda: writer.commit(committed("a"), buffer=3),
        "close": lambda: writer.close(1, cohort=COHORT, now_s=20.0),
        "publish": lambda: writer.publish(following, event, next_grid=(), outer_state={}, now_s=20.0),
        "fail": lambda: writer.fail(1, reason="old", now_s=20.0),
        "note": lambda: writer.note(devices_gone(1, ("a",)), 20.0),
        "rest": lambda: writer.rest(rested, 20.0, next_sequence=99),
    }
    for name, call in calls.items():
        await refusal(Superseded, call(), f"{name}: of a driver that was superseded")


async def _record(stores: Stores) -> tuple[object, ...]:
    runs, rounds = stores.runs, stores.rounds
    return (
        *(await runs.run(RUN), await runs.newest_version(RUN), await runs.event_page(RUN, 0)),
        *(await rounds.last(RUN), await rounds.updates(RUN, 1)),
    )
