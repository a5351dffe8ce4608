"""Rounds after a rollback: a Version that no Round published starts a new lineage."""

from dataclasses import replace
from pathlib import Path

from sqlalchemy import select, update
from support.stage_runs import problems, roll_back
from support.staleness import assignment, send, settle
from support.virtual import bundle_in, open_place, plan, start

from fanin.protos import messages as m
from fanin.protos.wire import from_proto, to_proto
from fanin.server.storage.disk import Durability
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.engine import open_engine
from fanin.simulation import run_virtual
from fanin.v1 import fleet_pb2


def backdate(folder: Path, device: str, version_sha256: str) -> None:
    """Record that the Update of a device was made for Round 1, on this Version."""
    engine, table = open_engine(folder / "state" / "fanin.db", Durability.PROCESS), schema.updates
    with engine.begin() as connection:
        own = table.c.device_id == device
        data = connection.execute(select(table.c.header_proto).where(own)).scalar_one()
        header = from_proto(m.UpdateHeader, fleet_pb2.UpdateHeader.FromString(data))
        older = to_proto(replace(header, round=1, version_sha256=version_sha256), fleet_pb2.UpdateHeader)
        connection.execute(update(table).where(own).values(made_for=1, header_proto=older.SerializeToString()))
    engine.dispose()


def test_verify_finds_an_update_of_an_earlier_lineage(tmp_path: Path) -> None:
    """The Update's Round is within ``max_staleness``, but the rollback has discarded the Updates before it."""

    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(buffer=1, quorum=1, max_staleness=50, max_rounds=9))
        await send(place, "first")
        await settle()
        await roll_back(place, 0, "back")
        await send(place, "second")
        await settle()
        await place.runs.stop()
        assert problems(place) == []
        newest, initial = await place.state.stores.runs.newest_version("run"), place.state.runs.version("run", 0)
        assert initial is not None
        assert newest.number == 3
        (record,) = [one for one in place.state.rounds.rounds("run") if one.base_version == 2]
        backdate(tmp_path, "second", initial.sha256)
        assert problems(place) == [f"round {record.round}: an update of round 1 is too old to count in it"]

    run_virtual(main())


def test_an_assignment_without_stages_names_no_state_in_a_later_lineage(tmp_path: Path) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        await start(place.runs, bundle_in(tmp_path), plan(buffer=1, quorum=1, max_rounds=9))
        await send(place, "first")
        await settle()
        await roll_back(place, 1, "back")
        work = await assignment(place, "first")
        assert work.version.number == 2
        assert work.state == m.StageState()
        await place.runs.stop()

    run_virtual(main())
