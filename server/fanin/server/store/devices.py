"""Who is known: devices by their keys, and tokens by their digests."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from sqlalchemy import Engine, func, insert, select
from sqlalchemy.dialects.sqlite import insert as upsert

from fanin.server.store import schema


class Role(Enum):
    """What a token is good for."""

    DEVICE = "device"
    """Enrolling devices."""
    OPERATOR = "operator"
    """The Control service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An enrolled device."""

    device_id: str
    public_key: str


class DeviceStore:
    """Devices and tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def enroll(self, device: Device, now_s: float) -> None:
        """Remember a device; harmless if it is known."""
        self.enroll_all([device], now_s)

    def enroll_all(self, devices: Iterable[Device], now_s: float) -> None:
        """Remember devices, all or none."""
        rows = [{"device_id": one.device_id, "public_key": one.public_key, "enrolled_at": now_s} for one in devices]
        if rows:
            with self._engine.begin() as connection:
                connection.execute(upsert(schema.devices).on_conflict_do_nothing(), rows)

    def find(self, device_id: str) -> Device | None:
        """The device of this id."""
        query = select(schema.devices).where(schema.devices.c.device_id == device_id)
        with self._engine.connect() as connection:
            row = connection.execute(query).mappings().first()
        return None if row is None else Device(device_id=row["device_id"], public_key=row["public_key"])

    def count(self) -> int:
        """How many devices are enrolled."""
        with self._engine.connect() as connection:
            return int(connection.execute(select(func.count()).select_from(schema.devices)).scalar_one())

    def add_token(self, sha256: str, role: Role, now_s: float) -> None:
        """Make a token, known by its digest, good for a role."""
        row = {"sha256": sha256, "role": role.value, "created_at": now_s}
        with self._engine.begin() as connection:
            connection.execute(insert(schema.tokens).values(row))

    def has_token(self, sha256: str, role: Role) -> bool:
        """Whether a token with this digest is good for this role."""
        query = select(schema.tokens.c.sha256).where(
            schema.tokens.c.sha256 == sha256, schema.tokens.c.role == role.value
        )
        with self._engine.connect() as connection:
            return connection.execute(query).first() is not None
