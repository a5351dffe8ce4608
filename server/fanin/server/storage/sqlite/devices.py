"""Enrolled devices by their keys, what is recorded of each, and their tokens."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from sqlalchemy import Connection, Engine, Row, bindparam, delete, func, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from fanin.protos.messages import (
    MAX_PAGE_DEVICE_INFOS,
    Ban,
    DeviceChange,
    DeviceInfo,
    DevicePage,
    DeviceQuery,
    DeviceState,
    NewToken,
    Principal,
    RemoveDevice,
    TokenInfo,
)
from fanin.protos.wire import to_proto
from fanin.server.storage.access import (
    change_fact,
    changed,
    enrolled,
    enrollment_fact,
    resting_state,
    tags_of,
    tags_text,
    unknown_device,
)
from fanin.server.storage.population import Population
from fanin.server.storage.records import EnrolledDevice, Sighting
from fanin.server.storage.sqlite import schema
from fanin.server.storage.sqlite.administration import SqliteTokens, append_audit
from fanin.server.storage.sqlite.engine import writing
from fanin.server.storage.sqlite.schema import decode
from fanin.v1 import access_pb2

LOG: Final = logging.getLogger("fanin.server.storage.devices")
BATCH_ROWS: Final = 10_000
MAX_SCANNED_ROWS: Final = 10_000
"""Rows that one page may read, some 20 ms: the lane of the store also records Rounds."""
_TABLE: Final = schema.devices


class SqliteDevices:
    """Devices and tokens.

    Reads of callers are answered from memory and may come from any thread. Writes go to the database first. So no call
    of an unknown peer reaches the database. A store does not see what another process records after the store was
    opened. The folder of a coordinator has only one process (``hold_folder``).

    Attributes:
        tokens: The tokens.
    """

    def __init__(self, engine: Engine) -> None:
        """Read all devices and tokens, about 2 s for a million devices."""
        self._engine = engine
        self.tokens = SqliteTokens(engine)
        self._population = Population(_device_rows(engine))
        if damaged := self._population.damaged:
            LOG.error(
                "%s: damaged rows in the table of devices: %d, such as %r; these devices are refused until they are "
                "started again and enroll, all others are served",
                *(engine.url.database, len(damaged), damaged[0]),
            )
        with engine.connect() as connection:
            columns = _TABLE.c.device_id, _TABLE.c.banned_at
            banned = connection.execute(select(*columns).where(_TABLE.c.banned_at.is_not(None)))
            self._banned: dict[str, float] = {row.device_id: row.banned_at for row in banned}
            # The record of a removal is its entry in the audit log: the row of the device is deleted.
            audit = schema.audit.c
            subjects = connection.execute(select(audit.subject).where(audit.subject.like("device %: remove"))).scalars()
            self._removed = {subject.removeprefix("device ").removesuffix(": remove") for subject in subjects}

    def enroll(self, devices: Iterable[EnrolledDevice], now_s: float, token_sha256: str = "") -> None:
        """See ``DeviceStore.enroll``."""
        unknown = {one.device_id: one for one in devices if self.find(one.device_id) is None}
        if not unknown:
            return
        with writing(self._engine) as connection:
            recorded = _recorded(connection, unknown)
            token: TokenInfo | None = None
            if token_sha256 and (num_new := len(unknown) - len(recorded)):
                token = self.tokens.use(connection, token_sha256, num_new, now_s)
            infos = [enrolled(one.device_id, one.public_key, token, now_s) for one in unknown.values()]
            # Another process may have recorded some of them since this one read the table, or a row is damaged. The id
            # is the digest of the key, so an intact row does not change.
            row = upsert(_TABLE)
            key = {"public_key": row.excluded.public_key}
            connection.execute(
                row.on_conflict_do_update(index_elements=["device_id"], set_=key), list(map(_row, infos))
            )
            facts = (enrollment_fact(info.device_id, token) for info in infos if info.device_id not in recorded)
            append_audit(connection, facts, now_s)
        for device in unknown.values():
            self._population.add(device)
        if token is not None:
            self.tokens.refresh(token_sha256, token)

    def find(self, device_id: str) -> EnrolledDevice | None:
        """Return the device of an id, or None if it is not enrolled."""
        return self._population.find(device_id)

    @property
    def num_devices(self) -> int:
        """Number of enrolled devices."""
        return len(self._population)

    @property
    def num_banned(self) -> int:
        """See ``DeviceDirectory.num_banned``."""
        return len(self._banned)

    def banned_at(self, device_id: str) -> float | None:
        """See ``DeviceDirectory.banned_at``."""
        return self._banned.get(device_id)

    def is_removed(self, device_id: str) -> bool:
        """See ``DeviceDirectory.is_removed``."""
        return device_id in self._removed and self.find(device_id) is None

    def add_token(self, new: NewToken, now_s: float) -> None:
        """Record a token of the coordinator itself."""
        self.tokens.create(new, None, now_s)

    def find_token(self, sha256: str) -> TokenInfo | None:
        """See ``DeviceDirectory.find_token``."""
        return self.tokens.find(sha256)

    def device(self, device_id: str) -> DeviceInfo:
        """See ``DeviceStore.device``."""
        with self._engine.connect() as connection:
            return _find(connection, device_id)

    def device_page(
        self, query: DeviceQuery, among: Collection[str] | None = None, seen_before_s: float | None = None
    ) -> DevicePage:
        """See ``DeviceStore.device_page``."""
        ids = _TABLE.c.device_id
        bounds = [ids > query.after]
        if query.prefix:
            # Not LIKE, which ignores the case of letters and reads no index.
            bounds += [ids >= query.prefix, ids < query.prefix[:-1] + chr(ord(query.prefix[-1]) + 1)]
        selected = select(_TABLE).where(*bounds)
        with self._engine.begin() as connection:
            last = ""
            if among is None:
                scanned = select(ids).where(*bounds).order_by(ids).limit(1).offset(MAX_SCANNED_ROWS - 1)
                last = connection.execute(scanned).scalar() or ""
            else:
                selected = selected.where(ids.in_(among))
            if last:
                selected = selected.where(ids <= last)
            if seen_before_s is not None:
                seen = func.coalesce(_TABLE.c.last_seen, _TABLE.c.enrolled_at)
                selected = selected.where(seen < seen_before_s)
            for name, value in query.tags.items():
                # Not LIKE, which ignores the case of letters.
                selected = selected.where(func.instr(_TABLE.c.tags, f"\n{name}={value}\n") > 0)
            match query.state:
                case DeviceState.BANNED:
                    selected = selected.where(_TABLE.c.banned_at.is_not(None))
                case DeviceState.NEW:
                    selected = selected.where(_TABLE.c.banned_at.is_(None), _TABLE.c.last_seen.is_(None))
                case DeviceState.AWAY:
                    selected = selected.where(_TABLE.c.banned_at.is_(None), _TABLE.c.last_seen.is_not(None))
                case _:
                    pass
            rows = connection.execute(selected.order_by(ids).limit(MAX_PAGE_DEVICE_INFOS)).all()
            counts = _num_updates(connection, [row.device_id for row in rows])
        following = rows[-1].device_id if len(rows) == MAX_PAGE_DEVICE_INFOS else last
        infos = tuple(_info(row, counts.get(row.device_id, 0)) for row in rows)
        return DevicePage(devices=infos, next=following, num_devices=self.num_devices)

    def change(self, change: DeviceChange, by: Principal | None, now_s: float) -> DeviceInfo:
        """See ``DeviceStore.change``."""
        device_id = change.device_id
        is_removed = isinstance(change.what, RemoveDevice)
        with writing(self._engine) as connection:
            info = changed(_find(connection, device_id), change, by, now_s)
            if is_removed:
                connection.execute(delete(_TABLE).where(_TABLE.c.device_id == device_id))
            else:
                connection.execute(update(_TABLE).where(_TABLE.c.device_id == device_id).values(_changeable(info)))
            append_audit(connection, [change_fact(change, by)], now_s)
        if is_removed:
            self._population.remove(device_id)
            self._removed.add(device_id)
        if info.ban is None or is_removed:
            self._banned.pop(device_id, None)
        else:
            self._banned[device_id] = info.ban.time
        return info

    def note(self, sightings: Mapping[str, Sighting]) -> None:
        """See ``DeviceStore.note``."""
        seen, rejected = [], []
        for device_id, one in sightings.items():
            if one.seen_at is not None:
                seen.append({"id": device_id, "seen": one.seen_at, "reported": _reported(one)})
            if one.rejected_at is not None:
                rejected.append({"id": device_id, "text": one.rejection, "at": one.rejected_at})
        row = update(_TABLE).where(_TABLE.c.device_id == bindparam("id"))
        with writing(self._engine) as connection:
            if seen:
                connection.execute(row.values(last_seen=bindparam("seen"), reported_proto=bindparam("reported")), seen)
            if rejected:
                connection.execute(row.values(last_rejection=bindparam("text"), rejected_at=bindparam("at")), rejected)


def _recorded(connection: Connection, device_ids: Iterable[str]) -> set[str]:
    """Return those of these devices that have a row."""
    ids, found = list(device_ids), set[str]()
    for start in range(0, len(ids), BATCH_ROWS):
        query = select(_TABLE.c.device_id).where(_TABLE.c.device_id.in_(ids[start : start + BATCH_ROWS]))
        found.update(connection.execute(query).scalars())
    return found


def _find(connection: Connection, device_id: str) -> DeviceInfo:
    row = connection.execute(select(_TABLE).where(_TABLE.c.device_id == device_id)).first()
    if row is None:
        raise unknown_device(device_id)
    return _info(row, _num_updates(connection, [device_id]).get(device_id, 0))


def _num_updates(connection: Connection, device_ids: Sequence[str]) -> dict[str, int]:
    kept, forgotten = schema.updates, schema.contributions
    totals = Counter[str]()
    for table, number in ((kept, func.count()), (forgotten, func.sum(forgotten.c.num_updates))):
        query = select(table.c.device_id, number).where(table.c.device_id.in_(device_ids)).group_by(table.c.device_id)
        totals.update({row[0]: row[1] for row in connection.execute(query)})
    return totals


def _info(row: Row[tuple[object, ...]], num_updates: int) -> DeviceInfo:
    ban = None
    if row.banned_at is not None:
        ban = Ban(reason=row.ban_reason or "", time=row.banned_at, by=row.banned_by or "")
    info = DeviceInfo(
        device_id=row.device_id,
        public_key=row.public_key,
        label=row.label or "",
        tags=tags_of(row.tags),
        state=resting_state(is_banned=ban is not None, last_seen=row.last_seen),
        enrolled_at=row.enrolled_at,
        enrolled_by=row.enrolled_by or "",
        ban=ban,
        last_seen=row.last_seen,
        num_updates=num_updates,
        last_rejection=row.last_rejection or "",
        rejected_at=row.rejected_at,
    )
    if row.reported_proto is None:
        return info
    what = f"the last check-in of device {info.device_id}"
    reported = decode(what, DeviceInfo, access_pb2.DeviceInfo, row.reported_proto)
    return replace(
        info,
        runtimes=reported.runtimes,
        fanin_version=reported.fanin_version,
        condition=reported.condition,
    )


def _row(info: DeviceInfo) -> dict[str, object]:
    known = {"device_id": info.device_id, "public_key": info.public_key, "enrolled_at": info.enrolled_at}
    return known | {"label": info.label, "tags": tags_text(info.tags), "enrolled_by": info.enrolled_by}


def _changeable(info: DeviceInfo) -> dict[str, object]:
    ban = info.ban
    return {
        "label": info.label,
        "tags": tags_text(info.tags),
        "banned_at": None if ban is None else ban.time,
        "ban_reason": None if ban is None else ban.reason,
        "banned_by": None if ban is None else ban.by,
    }


def _reported(one: Sighting) -> bytes:
    info = DeviceInfo(
        device_id="",
        public_key="",
        enrolled_at=0.0,
        runtimes=one.runtimes,
        fanin_version=one.fanin_version,
        condition=one.condition,
    )
    return to_proto(info, access_pb2.DeviceInfo).SerializeToString(deterministic=True)


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
