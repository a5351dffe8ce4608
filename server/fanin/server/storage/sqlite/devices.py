"""Enrolled devices by their keys, and tokens by their digests."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from sqlalchemy import Engine, insert, select
from sqlalchemy.dialects.sqlite import insert as upsert

from fanin.server.storage.population import Population
from fanin.server.storage.records import EnrolledDevice, Role
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.engine import writing

LOG: Final = logging.getLogger("fanin.server.storage.devices")
BATCH_ROWS: Final = 10_000


class SqliteDevices:
    """Devices and tokens.

    Reads are answered from memory and may come from any thread. Writes go to the database first. So no call of an
    unknown peer reaches the database. A store does not see what another process records after the store was opened.
    The folder of a coordinator has only one process (``hold_folder``).
    """

    def __init__(self, engine: Engine) -> None:
        """Read all devices and tokens, about 2 s for a million devices."""
        self._engine = engine
        self._population = Population(_device_rows(engine))
        if damaged := self._population.damaged:
            LOG.error(
                "%s: damaged rows in the table of devices: %d, such as %r; these devices are refused until they are "
                "started again and enroll, all others are served",
                *(engine.url.database, len(damaged), damaged[0]),
            )
        with engine.connect() as connection:
            rows = connection.execute(select(schema.tokens.c.sha256, schema.tokens.c.role)).all()
        self._tokens = {(sha256, Role(role)) for sha256, role in rows}

    def enroll(self, devices: Iterable[EnrolledDevice], now_s: float) -> None:
        """See ``DeviceStore.enroll``."""
        unknown = {one.device_id: one for one in devices if self.find(one.device_id) is None}
        rows = [
            {"device_id": one.device_id, "public_key": one.public_key, "enrolled_at": now_s} for one in unknown.values()
        ]
        if rows:
            with writing(self._engine) as connection:
                # Another process may have recorded some of them since this one read the table, or a row is damaged.
                # The id is the digest of the key, so an intact row does not change.
                row = upsert(schema.devices)
                key = {"public_key": row.excluded.public_key}
                connection.execute(row.on_conflict_do_update(index_elements=["device_id"], set_=key), rows)
            for device in unknown.values():
                self._population.add(device)

    def find(self, device_id: str) -> EnrolledDevice | None:
        """Return the device of an id, or None if it is not enrolled."""
        return self._population.find(device_id)

    @property
    def num_devices(self) -> int:
        """Number of enrolled devices."""
        return len(self._population)

    def add_token(self, sha256: str, role: Role, now_s: float) -> None:
        """Record a token for a role, by its digest."""
        row = {"sha256": sha256, "role": role.value, "created_at": now_s}
        with writing(self._engine) as connection:
            connection.execute(insert(schema.tokens).values(row))
        self._tokens.add((sha256, role))

    def has_token(self, sha256: str, role: Role) -> bool:
        """Return whether a token with this digest was issued for this role."""
        return (sha256, role) in self._tokens


def _device_rows(engine: Engine) -> Iterator[Sequence[tuple[str, str]]]:
    """Yield batches of (device id, public key), with the driver's cursor: SQLAlchemy takes three times as long."""
    query = str(select(schema.devices.c.device_id, schema.devices.c.public_key).compile(engine))
    with engine.connect() as connection:
        # SQLAlchemy executes it, so that its errors become ours.
        cursor = connection.exec_driver_sql(query).cursor
        try:
            while batch := cursor.fetchmany(BATCH_ROWS):
                yield batch
        finally:
            cursor.close()
