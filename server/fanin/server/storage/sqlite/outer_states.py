"""The states of outer optimizers: for each Round that published a Version, the artifacts of its tensors."""

from sqlalchemy import Connection, Engine, Select, insert, select

from fanin.protos.chunks import Artifact
from fanin.protos.wire import to_proto
from fanin.server.storage.records import OuterState
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.columns import decode
from fanin.v1 import fleet_pb2


def add_outer_state(connection: Connection, run_id: str, round_number: int, state: OuterState) -> None:
    """Record the state after a Round, within the caller's transaction."""
    for name, artifact in state.items():
        connection.execute(
            insert(schema.outer_states).values(
                run_id=run_id,
                round=round_number,
                name=name,
                artifact_proto=to_proto(artifact, fleet_pb2.Artifact).SerializeToString(deterministic=True),
            )
        )


def outer_state(engine: Engine, run_id: str, round_number: int) -> OuterState:
    """Return the state after a Round, empty if its optimizer has none."""
    table = schema.outer_states
    query = select(table.c.name, table.c.artifact_proto).where(table.c.run_id == run_id, table.c.round == round_number)
    return _read(engine, query)


def outer_state_of_version(engine: Engine, run_id: str, version: int) -> OuterState:
    """Return the state after the Round that published a Version, empty if no Round did or its optimizer has none."""
    table, versions = schema.outer_states, schema.versions
    query = (
        select(table.c.name, table.c.artifact_proto)
        .join(versions, (versions.c.run_id == table.c.run_id) & (versions.c.round == table.c.round))
        .where(versions.c.run_id == run_id, versions.c.number == version)
    )
    return _read(engine, query)


def _read(engine: Engine, query: Select[tuple[str, bytes]]) -> OuterState:
    with engine.connect() as connection:
        rows = connection.execute(query.order_by(schema.outer_states.c.name)).mappings().all()
    what = "the state of an outer optimizer"
    return {row["name"]: decode(what, Artifact, fleet_pb2.Artifact, row["artifact_proto"]) for row in rows}
