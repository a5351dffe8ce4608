"""The seeds of noise in the database: one for each closed Round, and no byte of them after they were erased."""

from dataclasses import replace
from pathlib import Path

from support.stored import OPEN, START, Driven, commit, committed_update, published_event
from support.values import RUN, version

from fanin.protos.plans import AggregationPlan, CohortPlan, PrivacyPlan
from fanin.server.storage.disk import Durability
from fanin.server.storage.protocols.ledger import PrivacyCharge
from fanin.server.storage.sqlite.engine import open_engine
from fanin.server.storage.sqlite.ledger.rows import SqliteLedger
from fanin.server.storage.sqlite.runs import SqliteRuns

SEED = b"32 bytes that nobody may read ag"
PRIVACY = PrivacyPlan(
    mechanism="central",
    clip_norm=1.0,
    noise_multiplier=1.0,
    epsilon=2.0,
    delta=1e-6,
    population="hospital",
    population_size=1000,
)
PRIVATE = replace(
    START, plan=replace(START.plan, aggregation=AggregationPlan(max_examples=1, max_staleness=0), privacy=PRIVACY)
)
CHARGE = PrivacyCharge(
    population="hospital",
    after=0,
    release='{"form":1,"rho":"1/8","xi":"0"}',
    epoch=1,
    lineage=0,
    epsilon=0.5,
    delta=1e-6,
    seed=SEED,
)
COHORT = CohortPlan(concurrency=2, buffer=2, quorum=1, deadline_s=60.0)


def test_the_publication_leaves_no_byte_of_the_seed_in_the_database(tmp_path: Path) -> None:
    path = tmp_path / "fanin.db"
    engine = open_engine(path, Durability.PROCESS)
    SqliteRuns(engine).add_run(PRIVATE, 5.0)
    driven = Driven(engine)
    driven.open(OPEN)
    commit(driven, committed_update("a"), 2)
    driven.close(1, cohort=COHORT, now_s=20.0, charge=CHARGE)
    engine.dispose()
    assert SEED in path.read_bytes()
    engine = open_engine(path, Durability.PROCESS)
    following = version(parent=PRIVATE.version)
    Driven(engine).publish(following, published_event(1), next_grid=(1, 2), outer_state={}, now_s=30.0)
    charged = SqliteLedger(engine).charged(RUN, 1)
    engine.dispose()
    assert charged is not None
    assert charged.seed is None
    assert SEED not in path.read_bytes()
