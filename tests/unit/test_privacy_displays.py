"""What people and programs see of a privacy budget: descriptions, events, rows, metrics, and the time of a check."""

import asyncio
import time
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

from support.epochs import reclaim_of
from support.private import NUM_ROUNDS, begin, private, rested, story
from support.scrape import Scrape
from support.virtual import Place

from fanin.commands.console.show import event_row, event_text, run_row
from fanin.commands.control.describe import description_text
from fanin.commands.display.rounds import RoundLine
from fanin.commands.privacy import population_row, population_text
from fanin.edge.noise.loss import Loss
from fanin.protos.messages import (
    LostInterval,
    Principal,
    PrincipalKind,
    RunInfo,
    SpentPrivacy,
    VersionPublished,
)
from fanin.protos.wire import from_proto, to_proto
from fanin.server.access.limits import Limits
from fanin.server.care.certificates import local_certificates, utc_now
from fanin.server.care.forecast import DiskWatch
from fanin.server.health import Readiness
from fanin.server.privacy.ledger import Budget, from_text, to_text
from fanin.server.privacy.releases import PlainRelease
from fanin.server.storage.disk import Durability
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.engine import open_engine, writing
from fanin.server.storage.sqlite.ledger.rows import SqliteLedger
from fanin.server.telemetry.exposition import Exposition, MetricSources
from fanin.server.telemetry.instruments import Instruments
from fanin.server.web import reads
from fanin.server.web.overview import budget_row
from fanin.server.web.rendering import environment
from fanin.v1 import control_pb2

NUM_ROWS = 10_000


async def no_rounds() -> int:
    return 0


def test_epsilon_is_shown_after_each_round(tmp_path: Path) -> None:
    async def tell(place: Place) -> None:
        instruments = Instruments(asyncio.get_running_loop().time)
        await begin(place, tmp_path, private(epsilon=1.75))
        await rested(place)
        entries = [entry for entry in place.state.runs.events("run") if isinstance(entry.event, VersionPublished)]
        spent = [entry.event.privacy for entry in entries if isinstance(entry.event, VersionPublished)]
        rows = await place.state.stores.ledger.ledger_page("phones", 1)
        assert spent == [
            SpentPrivacy(population="phones", epsilon=row.epsilon, delta=1e-6, budget=1.75, clip_norm=0.5)
            for row in rows
        ]
        assert len(spent) == NUM_ROUNDS
        # No device of a private Run reports a loss or counts, so they are unknown and not zero.
        row = event_row(entries[0])
        assert [row[name] for name in ("train_loss", "num_saturated", "num_rounded", "total_examples")] == [None] * 4
        assert "epsilon 0.9000 of 1.75 at delta 1e-06 (0.8500 left)" in event_text(entries[0].event)
        assert event_row(entries[0])["privacy"] == asdict(rows_spent(spent))
        line = RoundLine(version=entries[0].event, num_devices=4).text()
        assert "epsilon 0.900 of 1.75  clip 0.5" in line
        assert len(line) <= 100
        description = await place.runs.describe("run", 3)
        assert (
            "  privacy   epsilon 1.6244 of 1.75 at delta 1e-06 (0.1256 left), clip norm 0.5, population phones"
            in description_text(description)
        )
        assert run_row(description.run)["privacy"] == asdict(rows_spent(spent[-1:]))
        html = (
            environment()
            .get_template("run.html")
            .render(
                run=description.run,
                described=description,
                quality=await reads.quality(place.state.history, description.run),
                page=await reads.rounds_page(place.state.history, "run", None),
                visitor=SimpleNamespace(can_act=False, principal=""),
                path="/runs/run",
                done="",
            )
        )
        assert "Epsilon" in html
        assert "of phones, clip norm 0.5" in html
        assert 'data-chart="epsilon"' in html
        assert html.count('data-k="epsilon" data-v="1.62') == 1
        (population,) = (await place.runs.populations.page("")).populations
        assert population_row(population)["num_rows"] == NUM_ROUNDS
        assert "  spent   epsilon 1.6244 at delta 1e-06" in population_text(population)
        sources = MetricSources(
            runs=place.runs,
            state=place.state,
            coordinator=place.coordinator,
            limits=Limits(),
            readiness=Readiness(),
            instruments=instruments,
            disk=DiskWatch(tmp_path, no_rounds, lambda: 0.0),
            certificates=local_certificates(tmp_path / "tls", frozenset({"localhost"}), utc_now),
            last_backup=lambda: None,
        )
        data, _ = await Exposition(sources).render("")
        scrape = Scrape(data.decode())
        assert scrape.value("fanin_privacy_epsilon", population="phones") == rows[-1].epsilon
        assert scrape.value("fanin_privacy_budget_epsilon", population="phones") == 1.75
        assert scrape.value("fanin_privacy_charge_due", population="phones") == 0

    story(tmp_path, tell)


def test_an_epsilon_with_a_charge_due_is_shown_as_a_lower_bound(tmp_path: Path) -> None:
    """After a reclaim, somebody else with the key may have released what the ledger lacks."""

    async def tell(place: Place) -> None:
        await begin(place, tmp_path, private(max_rounds=1))
        await rested(place)
        assert "charge due" not in await shown(place)
        await place.runs.reclaim(await reclaim_of(place.runs, (await place.runs.view("run")).newest))
        texts = await shown(place)
        assert "epsilon at least 0.9000 of 1.8 at delta 1e-06 (charge due)" in texts
        assert "at least epsilon 0.9000 at delta 1e-06 (charge due)" in texts
        assert "epsilon at least 0.9000 of 1.8 at delta 1e-06; charge due for run" in texts
        info = await place.runs.info("run")
        assert info.privacy is not None and info.privacy.is_charge_due
        assert from_proto(RunInfo, to_proto(info, control_pb2.RunInfo)) == info
        assert run_row(info)["privacy"] == asdict(info.privacy)
        lost = LostInterval(population="phones", rounds=0, after=1)
        population = await place.runs.populations.charge(lost, Principal(kind=PrincipalKind.ADMIN, id="0123456789ab"))
        assert population_row(population)["is_charge_due"] is False
        assert "charge due" not in await shown(place)

    async def shown(place: Place) -> str:
        description = await place.runs.describe("run", 1)
        (population,) = (await place.runs.populations.page("")).populations
        name, text = budget_row(population)
        return "\n".join([description_text(description), population_text(population), f"{name} {text}"])

    story(tmp_path, tell)


def rows_spent(spent: list[SpentPrivacy | None]) -> SpentPrivacy:
    (first, *_) = spent
    assert first is not None
    return first


def test_a_check_of_ten_thousand_rows_takes_less_than_a_tenth_of_a_second(tmp_path: Path) -> None:
    """Equal rows are composed as counts. The first check is not measured: it imports the library."""
    engine = open_engine(tmp_path / "fanin.db", Durability.PROCESS)
    releases = [PlainRelease(loss=Loss(rho=Fraction(1, 10**6 + number))) for number in range(3)]
    texts = [to_text(release) for release in releases]
    row = {"population": "phones", "run_id": "run", "epoch": 1, "lineage": 0, "count": 1, "epsilon": 1.0, "delta": 1e-6}
    population = {
        "population": "phones",
        "epsilon": 50.0,
        "delta": 1e-6,
        "size": 1000,
        "run_id": "run",
        "begun_at": 1.0,
    }
    with writing(engine) as connection:
        connection.execute(
            schema.populations.insert(), population | {"relation": "zero-out", "num_rows": NUM_ROWS, "place": None}
        )
        connection.execute(
            schema.privacy_ledger.insert(),
            [
                row | {"number": number, "round": number, "release": texts[number % 3], "committed_at": 1.0}
                for number in range(1, NUM_ROWS + 1)
            ],
        )
    ledger, budget, times = SqliteLedger(engine), Budget(epsilon=50.0, delta=1e-6), []
    for _ in range(4):
        began_s = time.perf_counter()
        counts = ledger.counts("phones")
        entries = [(from_text(text), count) for text, count in counts.counts.items()]
        epsilon, excess = budget.after(entries, (releases[0], 1))
        times.append(time.perf_counter() - began_s)
        assert (counts.newest, sum(counts.counts.values()), excess) == (NUM_ROWS, NUM_ROWS, "")
        assert epsilon > 0.1
    assert min(times[1:]) < 0.1
    engine.dispose()
    print(f"{1e3 * min(times[1:]):.1f} ms")
