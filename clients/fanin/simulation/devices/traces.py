"""Traces of devices: their recorded presence, speed, bandwidth and battery, in CSV, Parquet or JSON lines.

    client,time,state,examples_per_s,bytes_down_per_s,bytes_up_per_s
    7,0,on,120,2e6,5e5
    7,600,off,,,

A row is a device, or with the column ``time`` a change of a device. An empty cell keeps the value of the row before.
The first value of a device also holds before its time; before its first state, the device is away.
"""

import csv
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from fanin.clients.textfiles import reason_of
from fanin.protos.errors import InvalidInput
from fanin.protos.texts import counted
from fanin.simulation.data.tables import parquet_columns
from fanin.simulation.devices.availability import Availability, Battery, Rate, Trace

CLIENT: Final = "client"
TIME: Final = "time"
STATE: Final = "state"
RATES: Final = ("examples_per_s", "bytes_down_per_s", "bytes_up_per_s")
BATTERY: Final = ("battery_work_s", "battery_charge_s")
NUMBERS: Final = (*RATES, *BATTERY)
COLUMNS: Final = (CLIENT, TIME, STATE, *NUMBERS)
STATES: Final = MappingProxyType({"on": True, "off": False})
FORMATS: Final = "CSV, Parquet (.parquet) or JSON lines (.jsonl)"
COMPRESSED: Final = MappingProxyType(
    {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
)
"""The first bytes of compressed files."""
ENCODING: Final = "utf-8-sig"
"""UTF-8, with or without the byte order mark that spreadsheets write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTrace:
    """The record of one device. Its attributes are those of ``DeviceModel``; None for one that was not recorded."""

    availability: Availability | None = None
    examples_per_s: float | Rate | None = None
    bytes_down_per_s: float | Rate | None = None
    bytes_up_per_s: float | Rate | None = None
    battery: Battery | None = None

    @property
    def recorded(self) -> tuple[str, ...]:
        """The names of the recorded attributes."""
        return tuple(each.name for each in fields(self) if getattr(self, each.name) is not None)

    def over(self, other: "DeviceTrace") -> "DeviceTrace":
        """Return the other device with the attributes that are recorded here."""
        return replace(other, **{name: getattr(self, name) for name in self.recorded})


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """The records of several devices, all with the same attributes.

    Attributes:
        devices: The devices, in the order of the clients.
        names: The names of the devices; empty for traces that are not from a file.
        sha256: Digest of the file, for the event log; empty for traces that are not from a file.
    """

    devices: tuple[DeviceTrace, ...]
    names: tuple[str, ...] = ()
    sha256: str = ""

    def __post_init__(self) -> None:
        if not self.devices or not self.keys:
            raise InvalidInput("traces: got none, expected the record of at least one device", code="FN-1160")
        for index, device in enumerate(self.devices):
            if device.recorded != self.keys:
                raise InvalidInput(
                    f"traces: device {index}: got {', '.join(device.recorded) or 'none'}, expected "
                    f"{', '.join(self.keys)} as for device 0",
                    code="FN-1160",
                )
        if self.names and len(set(self.names)) != len(self.devices):
            raise InvalidInput(
                f"traces: got {counted(len(set(self.names)), 'name')} for {counted(len(self.devices), 'device')}, "
                "expected another name for each device, or none",
                code="FN-1162",
            )

    @property
    def keys(self) -> tuple[str, ...]:
        """The recorded attributes, by the names of ``DeviceModel``."""
        return self.devices[0].recorded


def read_traces(path: Path | str, sha256: str = "") -> Traces:
    """Read traces from a CSV file with a header, a Parquet file (``.parquet``), or from JSON lines (``.jsonl``).

    The devices are in the order of their names in ``client``: first the names of decimal digits, by their number, then
    the others, by their characters.

    Args:
        path: The file.
        sha256: The expected digest of the file in hexadecimal digits; empty for any.

    Raises:
        InvalidInput: The file cannot be read, has another digest or no rows, or a value is wrong. The message names
            the row, the column and the value.
        RuntimeMissing: The file is Parquet, and pyarrow is not installed.
    """
    several: object = path
    if not isinstance(several, Path | str):
        raise InvalidInput(
            f"traces: got {several!r}, expected the path of one file; pass several files as [read_traces(first), "
            "read_traces(second)]",
            code="FN-1156",
        )
    try:
        data = Path(path).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        if sha256 and sha256 != digest:
            raise InvalidInput(
                f"{path}: got the sha256 {digest}, expected {sha256}; use the file of that simulation", code="FN-1163"
            )
        if packed := next((name for magic, name in COMPRESSED.items() if data.startswith(magic)), ""):
            raise InvalidInput(
                f"{path}: got a file compressed by {packed}, expected {FORMATS}; decompress it", code="FN-1150"
            )
        table = _table(Path(path), data)
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidInput(f"{path}: cannot be read ({reason_of(exc)})", code="FN-1150") from exc
    _check_columns(path, table.columns)
    recordings: dict[str, _Recording] = {}
    for where, row in table.rows:
        client = _word(row.get(CLIENT))
        if not client:
            raise InvalidInput(
                f"{where}, column {CLIENT}: got {row.get(CLIENT)!r}, expected the name of a device", code="FN-1162"
            )
        if client not in recordings:
            recordings[client] = _Recording(columns=table.columns)
        recordings[client].add(f"{where}, client {client!r}", row)
    if not recordings:
        raise InvalidInput(f"{path}: got no rows, expected a row for at least one device", code="FN-1160")
    names = tuple(sorted(recordings, key=_by_number))
    return Traces(
        devices=tuple(recordings[name].device(f"{path}: client {name!r}") for name in names), names=names, sha256=digest
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """The columns of a file, and its rows: the place of each, for errors, and its values by column."""

    columns: tuple[str, ...]
    rows: Iterable[tuple[str, Mapping[str, object]]]


@dataclass(slots=True, kw_only=True)
class _Recording:
    """The rows of one device so far."""

    columns: tuple[str, ...]
    time_s: float | None = None
    presence: list[tuple[float, bool]] = field(default_factory=list)
    numbers: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, where: str, row: Mapping[str, object]) -> None:
        """Add a row. Raises InvalidInput."""
        time_s = self._time(where, row)
        if not _is_empty(row.get(STATE)):
            if (state := _word(row.get(STATE))) not in STATES:
                raise InvalidInput(
                    f"{where}, column {STATE}: got {row.get(STATE)!r}, expected on or off", code="FN-1166"
                )
            self.presence.append((time_s, STATES[state]))
        for name in NUMBERS:
            if _is_empty(row.get(name)):
                continue
            changes = self.numbers.setdefault(name, [])
            number = _number(where, name, row)
            if not number > 0.0:
                raise InvalidInput(
                    f"{where}, column {name}: got {row.get(name)!r}, expected a number above 0", code="FN-1166"
                )
            if not changes or changes[-1][1] != number:
                changes.append((time_s, number))
            if name in BATTERY and len(changes) > 1:
                raise InvalidInput(
                    f"{where}, column {name}: got {number:g} after {changes[0][1]:g}, expected one battery for each "
                    "device; leave the cell empty",
                    code="FN-1166",
                )
        self.time_s = time_s

    def _time(self, where: str, row: Mapping[str, object]) -> float:
        if TIME not in self.columns:
            if self.time_s is not None:
                raise InvalidInput(
                    f"{where}: got a second row, expected one for each client, or the column {TIME}", code="FN-1167"
                )
            return 0.0
        time_s = _number(where, TIME, row)
        if time_s < 0.0 or (self.time_s is not None and time_s <= self.time_s):
            expected = "0 or more" if self.time_s is None else f"a time above {self.time_s:g}, that of its row before"
            raise InvalidInput(f"{where}, column {TIME}: got {row.get(TIME)!r}, expected {expected}", code="FN-1167")
        return time_s

    def device(self, where: str) -> DeviceTrace:
        """Return the record of the device. Raises InvalidInput if a column has no value of it."""
        for name in self.columns:
            if name not in (CLIENT, TIME) and not (self.presence if name == STATE else self.numbers.get(name)):
                raise InvalidInput(
                    f"{where}, column {name}: got no value, expected one in a row of this device", code="FN-1160"
                )
        rates = {name: self.numbers[name] for name in RATES if name in self.numbers}
        # A number that never changes takes less memory: a trace may have a million devices.
        steady = {
            name: changes[0][1] if len(changes) == 1 else Rate(changes=tuple(changes))
            for name, changes in rates.items()
        }
        battery = [self.numbers[name][0][1] for name in BATTERY if name in self.numbers]
        return DeviceTrace(
            availability=Trace(changes=tuple(self.presence)) if self.presence else None,
            battery=Battery(work_s=battery[0], charge_s=battery[1]) if battery else None,
            **steady,
        )


def _check_columns(path: Path | str, columns: Sequence[str]) -> None:
    """Raise InvalidInput unless the columns describe devices."""
    names, expected = f"{path}: got the columns {', '.join(columns) or 'none'}", ""
    if unknown := [name for name in columns if name not in COLUMNS]:
        names, expected = f"{path}: got the unknown columns {', '.join(unknown)}", f"only {', '.join(COLUMNS)}"
    elif len(set(columns)) < len(columns):
        expected = "each one once"
    elif CLIENT not in columns or not set(columns) - {CLIENT, TIME}:
        expected = f"{CLIENT} and at least one of {', '.join((STATE, *NUMBERS))}"
    elif STATE in columns and TIME not in columns:
        expected = f"{TIME} beside {STATE}: the seconds from which on the state holds"
    elif len(set(BATTERY) & set(columns)) == 1:
        expected = f"both of {', '.join(BATTERY)}, or none"
    if expected:
        raise InvalidInput(f"{names}, expected {expected}", code="FN-1165")


def _table(path: Path, data: bytes) -> _Table:
    """Return the table of a file. Raises InvalidInput, RuntimeMissing and UnicodeDecodeError."""
    match path.suffix.lower():
        case ".parquet":
            values = parquet_columns(path)
            cells = enumerate(zip(*values.values(), strict=True), start=1)
            named = ((f"{path}: row {number}", dict(zip(values, row, strict=True))) for number, row in cells)
            return _Table(columns=tuple(values), rows=named)
        case ".jsonl":
            lines = enumerate(data.decode(ENCODING).splitlines(), start=1)
            parsed = [_json_row(f"{path}: line {number}", line) for number, line in lines if line.strip()]
            return _Table(columns=tuple(dict.fromkeys(name for _, row in parsed for name in row)), rows=parsed)
        case _:
            rows = _csv_rows(path, data.decode(ENCODING).splitlines())
            columns = tuple(name.strip() for name in next(rows, ("", ()))[1])
            return _Table(columns=columns, rows=(_with_names(where, columns, row) for where, row in rows))


def _csv_rows(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the place and the cells of each line. Empty lines are ignored."""
    reader = csv.reader(lines)
    try:
        yield from ((f"{path}: line {reader.line_num}", row) for row in reader if row)
    except csv.Error as exc:
        raise InvalidInput(f"{path}: line {reader.line_num}: not CSV ({exc})", code="FN-1164") from exc


def _with_names(where: str, columns: Sequence[str], row: Sequence[str]) -> tuple[str, Mapping[str, object]]:
    if len(row) != len(columns):
        raise InvalidInput(
            f"{where}: got {len(row)} values, expected {len(columns)} as in the first line", code="FN-1164"
        )
    return where, dict(zip(columns, row, strict=True))


def _json_row(where: str, line: str) -> tuple[str, Mapping[str, object]]:
    try:
        row = json.loads(line, object_pairs_hook=partial(_json_object, where))
    except ValueError as exc:
        raise InvalidInput(f"{where}: no JSON ({exc})", code="FN-1164") from exc
    if not isinstance(row, dict):
        raise InvalidInput(
            f"{where}: got {line.strip():.60}, expected an object with {CLIENT} and other columns", code="FN-1164"
        )
    return where, row


def _json_object(where: str, pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Return an object, of which JSON would keep the last value of a repeated key. Raises InvalidInput."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(
            f"{where}: got {names.count(repeated)} values of the key {repeated!r}, expected one; remove the others",
            code="FN-1164",
        )
    return row


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _word(value: object) -> str:
    """Return the text of a value, "" if it is neither a text nor a number."""
    return str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def _number(where: str, name: str, row: Mapping[str, object]) -> float:
    """Return a finite number. Raises InvalidInput."""
    with suppress(ValueError):
        number = float(_word(row.get(name)))
        if math.isfinite(number):
            return number
    raise InvalidInput(f"{where}, column {name}: got {row.get(name)!r}, expected a number", code="FN-1166")


def _by_number(name: str) -> tuple[bool, float, str]:
    """Sort clients by their number, and other names after them."""
    return (False, float(name), name) if name.isdecimal() else (True, 0.0, name)
