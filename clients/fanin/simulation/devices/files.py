"""Device models in TOML files, and traces of presence in CSV or JSON lines.

    examples_per_s = { name = "lognormal", median = 50.0, sigma = 1.0 }
    bytes_up_per_s = 1e6
    dropout = 0.05
    availability = { name = "on_off", on_s = 600.0, off_s = 1800.0 }
    battery = { work_s = 1800.0, charge_s = 7200.0 }

A trace has the columns ``client``, ``time`` (seconds) and ``state`` (``on`` or ``off``). From that time on, the
client's device is present (``on``) or away (``off``).
"""

import csv
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from fanin.clients.testing.availability import Availability, Battery, DailyWindow, OnOff, Trace
from fanin.clients.textfiles import reason_of
from fanin.protos.errors import InvalidInput
from fanin.simulation.devices.distributions import Distribution, built, distribution_of
from fanin.simulation.devices.models import DeviceModel, Traces

PATTERNS: Final[Mapping[str, Callable[..., Availability]]] = MappingProxyType(
    {"daily_window": DailyWindow, "on_off": OnOff}
)
NUMBERS: Final = ("examples_per_s", "bytes_down_per_s", "bytes_up_per_s")
KEYS: Final = (*NUMBERS, "availability", "dropout", "battery")
COLUMNS: Final = ("client", "time", "state")
STATES: Final = {"on": True, "off": False}
ENCODING: Final = "utf-8-sig"
"""UTF-8, with or without the byte order mark that spreadsheets write."""
TRACE: Final = '{ trace = "FILE.csv" }'
BATTERY: Final = "{ work_s = 1800.0, charge_s = 7200.0 }"


def read_devices(path: Path | str) -> DeviceModel:
    """Read a device model from a TOML file. The path of a trace is relative to the file.

    Raises:
        InvalidInput: The file cannot be read, or a key is unknown or has a wrong value. The message names the key.
    """
    where = str(path)
    try:
        table = tomllib.loads(Path(path).read_text(ENCODING))
    except OSError as exc:
        raise InvalidInput(f"{where}: cannot be read ({reason_of(exc)})") from exc
    except ValueError as exc:
        raise InvalidInput(f"{where}: not TOML ({exc})") from exc
    unknown = sorted(set(table) - set(KEYS))
    if unknown:
        raise InvalidInput(f"{where}: got the keys {unknown}, expected only {', '.join(KEYS)}")
    numbers: dict[str, Distribution] = {
        key: distribution_of(f"{where}: {key}", table[key]) for key in NUMBERS if key in table
    }
    dropout = table.get("dropout", 0.0)
    if not isinstance(dropout, int | float) or isinstance(dropout, bool) or not 0.0 <= dropout < 1.0:
        raise InvalidInput(f"{where}: dropout: got {dropout!r}, expected a share from 0 to below 1")
    return DeviceModel(
        **numbers,
        availability=_availability(Path(path), table["availability"]) if "availability" in table else None,
        dropout=dropout,
        battery=_battery(f"{where}: battery", table["battery"]) if "battery" in table else None,
    )


def read_traces(path: Path | str) -> Traces:
    """Read traces from a CSV file with a header, or from JSON lines (``.jsonl``).

    The traces are in the order of the clients' names: first the names of decimal digits, by their number, then the
    others, by their characters.

    Raises:
        InvalidInput: The file cannot be read, has no change, or a line is wrong. The message names the line.
    """
    try:
        text = Path(path).read_text(ENCODING)
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidInput(f"{path}: cannot be read ({reason_of(exc)})") from exc
    changes: dict[str, list[tuple[float, bool]]] = {}
    for where, row in _rows(path, text):
        client, time_s, state = (_word(row.get(name)) for name in COLUMNS)
        try:
            seconds = float(time_s)
        except ValueError:
            seconds = math.nan
        if not client or not math.isfinite(seconds) or state not in STATES:
            raise InvalidInput(f"{where}: got {row}, expected a client, a time in seconds and the state on or off")
        before = changes.setdefault(client, [])
        if seconds < 0.0 or (before and seconds <= before[-1][0]):
            expected = f"a time above {before[-1][0]:g}, that of its line before" if before else "a time of 0 or more"
            raise InvalidInput(f"{where}: client {client!r}: got the time {seconds:g}, expected {expected}")
        before.append((seconds, STATES[state]))
    if not changes:
        raise InvalidInput(f"{path}: got no changes, expected a line for at least one client")
    return Traces(traces=tuple(Trace(changes=tuple(each)) for _, each in sorted(changes.items(), key=_by_client)))


def _rows(path: Path | str, text: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the place of each row, for errors, and its values by column. Empty lines are ignored."""
    lines = text.splitlines()
    if Path(path).suffix == ".jsonl":
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}: line {number}", _json_row(f"{path}: line {number}", line)
        return
    reader = csv.reader(lines)
    try:
        header = [name.strip() for name in next(reader, ())]
        if not set(COLUMNS) <= set(header):
            raise InvalidInput(f"{path}: got the columns {header}, expected {', '.join(COLUMNS)}")
        for row in reader:
            where = f"{path}: line {reader.line_num}"
            if row and len(row) != len(header):
                raise InvalidInput(f"{where}: got {len(row)} values, expected {len(header)} as in the first line")
            if row:
                yield where, dict(zip(header, row, strict=True))
    except csv.Error as exc:
        raise InvalidInput(f"{path}: line {reader.line_num}: not CSV ({exc})") from exc


def _json_row(where: str, line: str) -> Mapping[str, object]:
    try:
        row = json.loads(line)
    except ValueError as exc:
        raise InvalidInput(f"{where}: no JSON ({exc})") from exc
    if not isinstance(row, dict):
        raise InvalidInput(f"{where}: got {line.strip():.60}, expected an object with {', '.join(COLUMNS)}")
    return row


def _word(value: object) -> str:
    """Return the text of a value, "" if it is neither a text nor a number."""
    return str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def _by_client(item: tuple[str, object]) -> tuple[bool, float, str]:
    """Sort clients by their number, and other names after them."""
    name = item[0]
    return (False, float(name), name) if name.isdecimal() else (True, 0.0, name)


def _availability(path: Path, value: object) -> Availability | Traces:
    where = f"{path}: availability"
    expected = f"a table with a name of {', '.join(PATTERNS)} and its numbers, or {TRACE}"
    if isinstance(value, dict) and set(value) == {"trace"} and isinstance(value["trace"], str):
        return read_traces(path.parent / value["trace"])
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or name not in PATTERNS:
        raise InvalidInput(f"{where}: got {value!r}, expected {expected}")
    return built(where, PATTERNS[name], {key: item for key, item in value.items() if key != "name"})


def _battery(where: str, value: object) -> Battery:
    if not isinstance(value, dict):
        raise InvalidInput(f"{where}: got {value!r}, expected a table such as {BATTERY}")
    return built(where, Battery, value)
