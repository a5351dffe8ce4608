"""Device models in TOML files.

An example, in which a trace has the speed::

    bytes_up_per_s = 1e6
    dropout = 0.05
    availability = { name = "on_off", on_s = 600.0, off_s = 1800.0 }
    battery = { work_s = 1800.0, charge_s = 7200.0 }
    traces = "devices.csv"
    attackers = { clients = [0, 1], attack = { name = "alie", z = 1.0 } }
"""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from fanin.clients.textfiles import reason_of
from fanin.protos.errors import InvalidInput
from fanin.protos.numbers import is_number
from fanin.simulation.devices.attackers import Attackers
from fanin.simulation.devices.attacks import ATTACKS, Attack
from fanin.simulation.devices.availability import Availability, Battery, DailyWindow, OnOff
from fanin.simulation.devices.distributions import Distribution, built, distribution_of
from fanin.simulation.devices.models import NUMBERS, DeviceModel
from fanin.simulation.devices.traces import ENCODING, Traces, read_traces

PATTERNS: Final[Mapping[str, Callable[..., Availability]]] = MappingProxyType(
    {"daily_window": DailyWindow, "on_off": OnOff}
)
KEYS: Final = (*NUMBERS, "availability", "dropout", "battery", "traces", "attackers")
TRACES: Final = '"FILE.csv", { file = "FILE.csv", sha256 = "..." }, or a list of these'
ATTACKERS: Final = '{ clients = [0, 1], attack = { name = "alie", z = 1.0 } }'
BATTERY: Final = "{ work_s = 1800.0, charge_s = 7200.0 }"


def read_devices(path: Path | str) -> DeviceModel:
    """Read a device model from a TOML file. The paths of traces are relative to the file.

    Raises:
        InvalidInput: The file cannot be read, or a key is unknown or has a wrong value. The message names the key.
    """
    where = str(path)
    try:
        table = tomllib.loads(Path(path).read_text(ENCODING))
    except OSError as exc:
        raise InvalidInput(f"{where}: cannot be read ({reason_of(exc)})", code="FN-1150") from exc
    except ValueError as exc:
        raise InvalidInput(f"{where}: not TOML ({exc})", code="FN-1150") from exc
    unknown = sorted(set(table) - set(KEYS))
    if unknown:
        raise InvalidInput(f"{where}: got the keys {unknown}, expected only {', '.join(KEYS)}", code="FN-1151")
    numbers: dict[str, Distribution] = {
        key: distribution_of(f"{where}: {key}", table[key]) for key in NUMBERS if key in table
    }
    dropout = table.get("dropout", 0.0)
    if not (is_number(dropout) and 0.0 <= dropout < 1.0):
        raise InvalidInput(f"{where}: dropout: got {dropout!r}, expected a share from 0 to below 1", code="FN-1152")
    return DeviceModel(
        **numbers,
        availability=_availability(f"{where}: availability", table["availability"])
        if "availability" in table
        else None,
        dropout=dropout,
        battery=_battery(f"{where}: battery", table["battery"]) if "battery" in table else None,
        traces=_traces(Path(path), table.get("traces", [])),
        attackers=_attackers(f"{where}: attackers", table["attackers"]) if "attackers" in table else None,
    )


def _availability(where: str, value: object) -> Availability:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or name not in PATTERNS:
        raise InvalidInput(
            f"{where}: got {value!r}, expected a table with a name of {', '.join(PATTERNS)} and its numbers; the key "
            'of recorded devices is traces = "FILE.csv"',
            code="FN-1153",
        )
    return built(where, PATTERNS[name], {key: item for key, item in value.items() if key != "name"})


def _attackers(where: str, value: object) -> Attackers:
    if not isinstance(value, dict) or not {"clients", "attack"} <= set(value) <= {"clients", "attack", "claim"}:
        raise InvalidInput(
            f"{where}: got {value!r}, expected a table such as {ATTACKERS}, and claim if it is set", code="FN-1850"
        )
    attack = _attack(f"{where}: attack", value["attack"])
    try:
        return Attackers(clients=value["clients"], attack=attack, claim=value.get("claim", 0))
    except InvalidInput as exc:
        raise InvalidInput(f"{where}: {exc}", code=exc.code) from exc


def _attack(where: str, value: object) -> Attack:
    name = value if isinstance(value, str) else value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in ATTACKS:
        raise InvalidInput(
            f"{where}: got {value!r}, expected the name of an attack, or a table with it and its numbers, of "
            f"{', '.join(ATTACKS)}",
            code="FN-1850",
        )
    options = value if isinstance(value, dict) else {}
    return built(where, ATTACKS[name], {key: item for key, item in options.items() if key != "name"})


def _traces(path: Path, value: object) -> tuple[Traces, ...]:
    traces = []
    for each in value if isinstance(value, list) else [value]:
        named = {"file": each} if isinstance(each, str) else each
        texts = {key: item for key, item in named.items() if isinstance(item, str)} if isinstance(named, dict) else {}
        if texts != named or not {"file"} <= set(texts) <= {"file", "sha256"}:
            raise InvalidInput(f"{path}: traces: got {each!r}, expected {TRACES}", code="FN-1156")
        traces.append(read_traces(path.parent / texts["file"], texts.get("sha256", "")))
    return tuple(traces)


def _battery(where: str, value: object) -> Battery:
    if not isinstance(value, dict):
        raise InvalidInput(f"{where}: got {value!r}, expected a table such as {BATTERY}", code="FN-1153")
    return built(where, Battery, value)
