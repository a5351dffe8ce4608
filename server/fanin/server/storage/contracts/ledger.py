"""The contract of privacy ledgers: one row and one seed for each close, for ever."""

from dataclasses import replace
from typing import Final

from fanin.protos.errors import Conflict
from fanin.protos.messages import LedgerRow
from fanin.protos.plans import AggregationPlan, PrivacyPlan
from fanin.server.storage.contracts.values import COHORT, NEVER, OPERATOR, committed, opened, published, refusal, start
from fanin.server.storage.contracts.values import version as version_of
from fanin.server.storage.protocols.ledger import SEED_BYTES, LedgerCounts, PrivacyCharge
from fanin.server.storage.records import RoundMark
from fanin.server.storage.stores import DriverStores, Stores

NAME: Final = "hospital"
RELEASE: Final = '{"form":1,"rho":"1/8","xi":"0"}'
FIRST, SECOND = "private-first", "private-second"


async def check_ledger(stores: Stores) -> None:
    """Check the ledger of a population that two Runs share. Raises AssertionError."""
    ledger = stores.ledger
    assert await ledger.populations() == (), "populations: has one before the first run"
    assert await ledger.population(NAME) is None, "population: returned one that is not recorded"
    before = (await stores.audit.audit_page(1)).num_entries
    await _begin(stores, FIRST, 2.0, 1e-6)
    await _begin(stores, SECOND, 1.0, 1e-7)
    assert (await stores.audit.audit_page(1)).num_entries == before + 1, "add_run: expected an entry for a population"
    for epsilon, delta in ((3.0, 1e-6), (2.0, 1e-5)):
        call = _begin(stores, "looser", epsilon, delta)
        await refusal(Conflict, call, "add_run: with a larger budget of its population", "FN-1690")
    assert await stores.runs.run("looser") is None, "add_run: recorded a run that it refused"
    (population,) = await ledger.populations()
    budget = (population.epsilon, population.delta, population.size, population.run_id)
    assert budget == (2.0, 1e-6, 1000, FIRST), f"populations: got {budget}, expected that of the first run"
    await _check_closes(stores)
    await _check_charges(stores)


async def _check_closes(stores: Stores) -> None:
    ledger, first, second = stores.ledger, await stores.take(FIRST), await stores.take(SECOND)
    await _open(first, FIRST, 1, 0)
    failed = await first.writer.close(1, cohort=NEVER, now_s=20.0, charge=_charge(0))
    assert failed.mark is RoundMark.FAILED, "close: a round without a quorum did not fail"
    assert await ledger.charged(FIRST, 1) is None, "close: charged a round without a quorum"
    await _open(first, FIRST, 2, 0)
    for _ in range(2):
        closed = await first.writer.close(2, cohort=COHORT, now_s=20.0, charge=_charge(0, seed=1))
        assert closed.mark is RoundMark.CLOSED, f"close: got {closed.mark}, expected CLOSED"
    charged = await ledger.charged(FIRST, 2)
    expected = LedgerRow(
        number=1,
        run_id=FIRST,
        epoch=1,
        lineage=0,
        round=2,
        release=RELEASE,
        count=1,
        epsilon=0.5,
        delta=1e-6,
        committed_at=20.0,
    )
    assert charged is not None, "charged: lost the row of a round"
    assert charged.row == expected, f"charged: got {charged.row}, expected {expected}"
    assert charged.seed == bytes([1]) * SEED_BYTES, "close: replaced the seed of a round, or lost it"
    await _open(second, SECOND, 1, 0)
    still = await second.writer.close(1, cohort=COHORT, now_s=21.0, charge=_charge(0))
    assert still.mark is RoundMark.OPEN, "close: closed a round whose budget was checked with an older ledger"
    assert (await second.writer.close(1, cohort=COHORT, now_s=22.0, charge=_charge(1))).mark is RoundMark.CLOSED
    assert await ledger.counts(NAME) == LedgerCounts(newest=2, counts={RELEASE: 2}), "counts: expected two releases"
    assert [row.number for row in await ledger.ledger_page(NAME, 2)] == [2], "ledger_page: expected the second row"
    await second.writer.fail(1, reason="damaged", now_s=23.0)
    failed_close = await ledger.charged(SECOND, 1)
    assert failed_close is not None, "fail: a round that closed is charged no longer"
    assert failed_close.seed is None, "fail: kept the seed of a round"
    await _check_erasure(first)


async def _check_erasure(first: DriverStores) -> None:
    ledger, base = first.ledger, version_of(version_of(run_id=FIRST), FIRST)
    event = published(base, 2)
    await first.writer.publish(base, event, next_grid=(), outer_state={}, now_s=30.0)
    kept = await ledger.charged(FIRST, 2)
    assert kept is not None, "publish: lost a row of the ledger"
    assert kept.seed is not None, "publish: erased the seed of a round that the plan keeps"
    assert (await first.retention.removed(FIRST)).rounds == {}, "publish: removed updates that the plan keeps"
    await _open(first, FIRST, 3, 1)
    await first.writer.close(3, cohort=COHORT, now_s=40.0, charge=_charge(2, seed=3))
    following = version_of(base, FIRST)
    await first.writer.publish(following, published(following, 3), next_grid=(), outer_state={}, now_s=41.0)
    older, newer = [await ledger.charged(FIRST, number) for number in (2, 3)]
    assert older is not None, "publish: erased a row of the ledger"
    assert newer is not None, "publish: erased a row of the ledger"
    assert older.seed is None, "publish: kept the seed of more rounds than the plan says"
    assert newer.seed is not None, "publish: erased the seed of a round that the plan keeps"
    assert (await first.retention.removed(FIRST)).rounds == {2: 41.0}, "publish: expected the older one as removed"
    pending = {each.round for each in await first.retention.pending_rounds() if each.run_id == FIRST}
    assert pending == {2}, f"pending_rounds: got {pending}, expected the round whose updates were removed"


async def _check_charges(stores: Stores) -> None:
    ledger = stores.ledger
    row = LedgerRow(
        number=4,
        run_id=FIRST,
        epoch=2,
        lineage=2,
        round=0,
        release=RELEASE,
        count=7,
        epsilon=1.5,
        delta=1e-6,
        committed_at=50.0,
    )
    before = (await stores.audit.audit_page(1)).num_entries
    for _ in range(2):
        await ledger.charge(NAME, (row,), (FIRST,), by=OPERATOR, now_s=50.0)
    assert (await ledger.counts(NAME)) == LedgerCounts(newest=4, counts={RELEASE: 10}), "charge: expected 7 more, once"
    assert (await stores.audit.audit_page(1)).num_entries == before + 1, "charge: expected one entry"
    call = ledger.charge(NAME, (replace(row, count=8),), (FIRST,), by=OPERATOR, now_s=51.0)
    await refusal(Conflict, call, "charge: other rows with numbers that are taken", "FN-1692")
    population = await ledger.population(NAME)
    assert population is not None, "population: lost one"
    assert (population.newest, population.uncharged) == (row, ()), f"population: got {population.newest} as newest row"


async def _begin(stores: Stores, run_id: str, epsilon: float, delta: float) -> None:
    privacy = PrivacyPlan(
        mechanism="central",
        clip_norm=1.0,
        noise_multiplier=1.0,
        population=NAME,
        epsilon=epsilon,
        delta=delta,
        population_size=1000,
        keep_seed_rounds=1,
    )
    plain = start(run_id)
    plan = replace(plain.plan, aggregation=AggregationPlan(max_examples=1), privacy=privacy)
    await stores.runs.add_run(replace(plain, plan=plan), 5.0, OPERATOR)


async def _open(stores: DriverStores, run_id: str, number: int, base_version: int) -> None:
    await stores.writer.open(opened(number, base_version, run_id))
    update = committed("a", made_for=number, round_number=number)
    await stores.writer.commit(replace(update, header=replace(update.header, run_id=run_id)), buffer=1)


def _charge(after: int, seed: int = 0) -> PrivacyCharge:
    return PrivacyCharge(
        population=NAME,
        after=after,
        release=RELEASE,
        epoch=1,
        lineage=0,
        epsilon=0.5 * (after + 1),
        delta=1e-6,
        seed=bytes([seed]) * SEED_BYTES,
    )
