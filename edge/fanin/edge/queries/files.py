"""The query as TOML, as people write it, and as JSON in a manifest.

People write ``[[features]]`` with fewer keys: ``classes = 10`` for the labels 0 to 9, ``count = 64`` for features
without names, and no step or bins for 2^16 steps and at most 32 bins. A manifest has every key.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from fanin.edge.queries.query import ALL, INVALID, FeatureGroup, StatisticsQuery
from fanin.protos.errors import InvalidInput
from fanin.protos.plans.entries import as_float
from fanin.protos.plans.keys import shown

UNREADABLE: Final = "FN-1862"
QUERY_KEYS: Final = {"groups": list, "min_devices": int, "num_devices": int, "max_values": int}
GROUP_KEYS: Final = {
    "input": str,
    "names": list,
    "by": str,
    "low": float,
    "high": float,
    "step": float,
    "bins": int,
    "quantiles": list,
}
FILE_KEYS: Final = {"features": list, "min_devices": int, "max_values": int}
SHORT_KEYS: Final = {"classes": int, "count": int}
DEFAULT_STEPS: Final = 1 << 16
DEFAULT_BINS: Final = 32
MAX_COUNT: Final = 1 << 20


def query_row(query: StatisticsQuery) -> dict[str, object]:
    """Return the query as an object of JSON."""
    groups = [{**asdict(group), "names": [*group.names], "quantiles": [*group.quantiles]} for group in query.groups]
    return {
        "groups": groups,
        "min_devices": query.min_devices,
        "num_devices": query.num_devices,
        "max_values": query.max_values,
    }


def parse_query(row: object, where: str) -> StatisticsQuery:
    """Return the query of an object of JSON with every key. Raises InvalidInput; ``where`` begins the error."""
    table = _table(row, QUERY_KEYS, where, needed=QUERY_KEYS)
    groups = [_table(each, GROUP_KEYS, f"{where}.groups", needed=GROUP_KEYS) for each in table.pop("groups")]
    return StatisticsQuery(groups=tuple(_group(group, where) for group in groups), **table)


def read_query(path: Path, num_devices: int) -> StatisticsQuery:
    """Read a query from a TOML file.

    Args:
        path: The file.
        num_devices: Devices of a Round, at most.

    Raises:
        InvalidInput: The file cannot be read, has an unknown key or a wrong value.
    """
    # Imported here: a device, which reads manifests alone, would pay for the memory.
    import tomllib

    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as exc:
        raise InvalidInput(f"{path}: cannot be read ({exc.strerror})", code=UNREADABLE) from exc
    except (ValueError, RecursionError) as exc:
        raise InvalidInput(f"{path}: not TOML ({exc})", code=UNREADABLE) from exc
    table = _table(document, FILE_KEYS, str(path), needed=("features",))
    groups = []
    for number, row in enumerate(table.pop("features")):
        where = f"{path}: features.{number}"
        groups.append(_group(_completed(_table(row, GROUP_KEYS | SHORT_KEYS, where, needed=("input",)), where), where))
    return StatisticsQuery(groups=tuple(groups), num_devices=num_devices, **table)


def _completed(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a table of features with every key."""
    classes, count = row.pop("classes", None), row.pop("count", None)
    if isinstance(classes, int):
        if clash := sorted(row.keys() & {"low", "high", "step", "bins"}):
            raise InvalidInput(
                f"{where}: got classes with {', '.join(clash)}, expected classes alone: the labels 0 to classes - 1",
                code=INVALID,
            )
        if classes < 2:
            raise InvalidInput(f"{where}: classes: got {classes}, expected at least 2", code=INVALID)
        row |= {"low": 0.0, "high": float(classes - 1), "step": 1.0, "bins": classes}
    if lacking := sorted({"low", "high"} - row.keys()):
        raise InvalidInput(f"{where}: got no {' and '.join(lacking)}, expected the range of the values", code=INVALID)
    low, high = row["low"], row["high"]
    row.setdefault("step", (high - low) / DEFAULT_STEPS)
    step = row["step"]
    row.setdefault("bins", min(DEFAULT_BINS, int(max(high - low, 0.0) / step) + 1 if step > 0 else 1))
    row.setdefault("by", ALL)
    row.setdefault("quantiles", [])
    if count is not None and ("names" in row or not isinstance(count, int) or not 0 < count <= MAX_COUNT):
        raise InvalidInput(
            f"{where}: count: got {shown(count)}{' with names' if 'names' in row else ''}, expected 1 to {MAX_COUNT} "
            "features without names",
            code=INVALID,
        )
    row.setdefault("names", [str(index) for index in range(count if isinstance(count, int) else 1)])
    return row


def _group(row: dict[str, Any], where: str) -> FeatureGroup:
    names, quantiles = row.pop("names"), row.pop("quantiles")
    numbers = [number for number in map(as_float, quantiles) if isinstance(number, float)]
    if not all(isinstance(each, str) for each in names) or len(numbers) < len(quantiles):
        raise InvalidInput(
            f"{where}: got names {shown(names)} and quantiles {shown(quantiles)}, expected texts and numbers",
            code=INVALID,
        )
    return FeatureGroup(names=tuple(names), quantiles=tuple(numbers), **row)


def _table(row: object, kinds: Mapping[str, type], where: str, needed: Collection[str]) -> dict[str, Any]:
    """Return a table with keys of these types. An integer is accepted as a number."""
    if not isinstance(row, Mapping):
        raise InvalidInput(f"{where}: got {shown(row)}, expected a table", code=INVALID)
    table = {str(name): as_float(value) if kinds.get(str(name)) is float else value for name, value in row.items()}
    if unknown := sorted(table.keys() - kinds.keys()):
        raise InvalidInput(
            f"{where}: got the unknown key {unknown[0]!r}, expected keys of {', '.join(kinds)}", code=INVALID
        )
    if missing := [name for name in needed if name not in table]:
        raise InvalidInput(f"{where}: got no {missing[0]}, expected it; add the key", code=INVALID)
    for name, value in table.items():
        if type(value) is not kinds[name]:
            raise InvalidInput(f"{where}: {name}: got {shown(value)}, expected {kinds[name].__name__}", code=INVALID)
    return table
