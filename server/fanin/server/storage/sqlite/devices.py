"""Who is known: devices by their keys, and tokens by their digests."""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Final

from sqlalchemy import Engine, insert, select

from fanin.protos.errors import Corrupted
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.population import EnrolledDevice, Population

BATCH_ROWS: Final = 10_000


class Role(Enum):
    """What a token is good for."""

    DEVICE = "device"
    """Enrolling devices."""
    OPERATOR = "operator"
    """The Control service."""


class DeviceStore:
    """Devices and tokens.

    Reads are answered from memory and may come from any thread; writes go to the database first. So nothing that an
    unknown caller sends reaches the database. One process writes these tables (``hold_folder``).
    """

    def __init__(self, engine: Engine) -> None:
        """Read all devices and tokens, about 2 s for a million devices. Raises Corrupted."""
        self._engine = engine
        try:
            self._population = Population(_device_rows(engine))
        except ValueError as exc:
            raise Corrupted(f"{engine.url.database}: its table of devices cannot be read ({exc})") from exc
        with engine.connect() as connection:
            rows = connection.execute(select(schema.tokens.c.sha256, schema.tokens.c.role)).all()
        self._tokens = {(sha256, Role(role)) for sha256, role in rows}

    def enroll(self, device: EnrolledDevice, now_s: float) -> None:
        """Remember a device; harmless if it is known."""
        self.enroll_all([device], now_s)

    def enroll_all(self, devices: Iterable[EnrolledDevice], now_s: float) -> None:
        """Remember devices, all or none."""
        unknown = {one.device_id: one for one in devices if self.find(one.device_id) is None}
        rows = [
            {"device_id": one.device_id, "public_key": one.public_key, "enrolled_at": now_s} for one in unknown.values()
        ]
        if rows:
            with self._engine.begin() as connection:
                connection.execute(insert(schema.devices), rows)
            for device in unknown.values():
                self._population.add(device)

    def find(self, device_id: str) -> EnrolledDevice | None:
        """The device of this id."""
        return self._population.find(device_id)

    @property
    def num_devices(self) -> int:
        """How many devices are enrolled."""
        return len(self._population)

    def add_token(self, sha256: str, role: Role, now_s: float) -> None:
        """Make a token, known by its digest, good for a role."""
        row = {"sha256": sha256, "role": role.value, "created_at": now_s}
        with self._engine.begin() as connection:
            connection.execute(insert(schema.tokens).values(row))
        self._tokens.add((sha256, role))

    def has_token(self, sha256: str, role: Role) -> bool:
        """Whether a token with this digest is good for this role."""
        return (sha256, role) in self._tokens


def _device_rows(engine: Engine) -> Iterator[Sequence[tuple[str, str]]]:
    """(device id, public key) in batches, by the driver's own cursor: rows of SQLAlchemy take three times as long."""
    query = str(select(schema.devices.c.device_id, schema.devices.c.public_key).compile(engine))
    with engine.connect() as connection:
        # SQLAlchemy executes it, so that its errors become ours.
        cursor = connection.exec_driver_sql(query).cursor
        try:
            while batch := cursor.fetchmany(BATCH_ROWS):
                yield batch
        finally:
            cursor.close()
