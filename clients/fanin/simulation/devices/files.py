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
from collections.abc import Callable, Mapping
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


def read_devices(path: Path | str) -> DeviceModel:
    """Read a device model from a TOML file. The path of a trace is relative to the file.

    Raises:
        InvalidInput: The file cannot be read, or a key is unknown or has a wrong value. The message names the key.
    """
    where = str(path)
    try:
        table = tomllib.loads(Path(path).read_text())
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
    if not isinstance(dropout, int | float) or isinstance(dropout, bool):
        raise InvalidInput(f"{where}: dropout: got {dropout!r}, expected a share from 0 to below 1")
    battery = table.get("battery")
    return DeviceModel(
        **numbers,
        availability=_availability(Path(path), table["availability"]) if "availability" in table else None,
        dropout=dropout,
        battery=None if battery is None else built(f"{where}: battery", Battery, _table(where, battery)),
    )


def read_traces(path: Path | str) -> Traces:
    """Read traces from a CSV file with a header, or from JSON lines (``.jsonl``).

    Raises:
        InvalidInput: The file cannot be read, or a line is wrong. The message names the line.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidInput(f"{path}: cannot be read ({reason_of(exc)})") from exc
    changes: dict[str, list[tuple[float, bool]]] = {}
    for number, row in _rows(path, text):
        client, time_s, state = (str(row.get(name, "")).strip() for name in COLUMNS)
        try:
            seconds = float(time_s)
        except ValueError:
            seconds = math.nan
        if not client or not math.isfinite(seconds) or state not in STATES:
            raise InvalidInput(
                f"{path}: line {number}: got {dict(row)}, expected a client, a time in seconds and the state on or off"
            )
        changes.setdefault(client, []).append((seconds, STATES[state]))
    try:
        return Traces(traces=tuple(Trace(changes=tuple(each)) for _, each in sorted(changes.items(), key=_by_client)))
    except ValueError as exc:
        raise InvalidInput(f"{path}: {exc}") from exc


def _rows(path: Path | str, text: str) -> list[tuple[int, Mapping[str, object]]]:
    lines = text.splitlines()
    if Path(path).suffix == ".jsonl":
        rows: list[tuple[int, Mapping[str, object]]] = []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError as exc:
                raise InvalidInput(f"{path}: line {number}: no JSON ({exc})") from exc
            rows.append((number, row if isinstance(row, dict) else {}))
        return rows
    reader = csv.DictReader(lines)
    if not set(COLUMNS) <= set(reader.fieldnames or ()):
        raise InvalidInput(f"{path}: got the columns {reader.fieldnames}, expected {', '.join(COLUMNS)}")
    return list(enumerate(reader, start=2))


def _by_client(item: tuple[str, object]) -> tuple[bool, float, str]:
    """Sort clients by their number, and other names after them."""
    name = item[0]
    return (False, float(name), name) if name.isdigit() else (True, 0.0, name)


def _availability(path: Path, value: object) -> Availability | Traces:
    where = f"{path}: availability"
    table = _table(where, value)
    if set(table) == {"trace"} and isinstance(table["trace"], str):
        return read_traces(path.parent / table["trace"])
    if table.get("name") not in PATTERNS:
        raise InvalidInput(
            f"{where}: got {dict(table)}, expected a name of {', '.join(PATTERNS)} with its numbers, or "
            '{ trace = "FILE.csv" }'
        )
    options = {key: item for key, item in table.items() if key != "name"}
    return built(where, PATTERNS[str(table["name"])], options)


def _table(where: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise InvalidInput(f"{where}: got {value!r}, expected a table of numbers")
    return value
