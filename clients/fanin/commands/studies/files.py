"""The file of a study, in TOML. Its words are those of ``Study``, ``Method`` and ``fanin simulate``.

An example::

    app = "app.py:app"
    folder = "study"
    cohort = 5
    rounds = 20
    seeds = [0, 1]
    target = 0.8                       # the Rounds to this value of column
    column = "test_accuracy"           # the default

    [data]                             # or several: [data.iid], [data.skewed]
    name = "digits"
    clients = 20
    by = "dirichlet"
    alpha = 0.3

    [plan]
    training.epochs = 2

    [grid]
    training.learning_rate = [0.02, 0.1]

    [methods.FedAvg]
    work = { stragglers = 0.5, drop = true }

    [methods.FedProx]
    plan.training.proximal_weight = 0.1

Paths of ``app`` and ``folder`` are relative to the working directory, as those of ``fanin simulate`` are.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fanin.clients.textfiles import reason_of
from fanin.commands.console.splits import SimulationData
from fanin.protos.errors import InvalidInput
from fanin.simulation import ClientWork

Kinds = tuple[type, ...]
NUMBER: Final[Kinds] = (int, float)
REQUIRED: Final[Mapping[str, Kinds]] = {"app": (str,), "folder": (str,), "cohort": (int,), "rounds": (int,)}
KEYS: Final[Mapping[str, Kinds]] = {
    **REQUIRED,
    "data": (dict,),
    "seeds": (list,),
    "validation": NUMBER,
    "engine": (str,),
    "plan": (dict,),
    "grid": (dict,),
    "methods": (dict,),
    "column": (str,),
    "target": NUMBER,
    "higher_is_better": (bool,),
}
OF_DATA: Final[Mapping[str, Kinds]] = {
    "name": (str,),
    "clients": (int,),
    "by": (str,),
    "alpha": NUMBER,
    "options": (dict,),
    "seed": (int,),
}
OF_METHOD: Final[Mapping[str, Kinds]] = {"plan": (dict,), "app": (str,), "work": (dict,)}
OF_WORK: Final[Mapping[str, Kinds]] = {"epochs": (list,), "steps": (list,), "stragglers": NUMBER, "drop": (bool,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMethod:
    """A method of the file.

    Attributes:
        plan: Its keys of the Plan, by dotted name.
        app: Its App; "" for that of the study.
        work: The work of its clients; None for all steps.
    """

    plan: Mapping[str, object]
    app: str = ""
    work: ClientWork | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFile:
    """The content of the file of a study. See the module for the keys."""

    app: str
    folder: str
    cohort: int
    rounds: int
    data: Mapping[str, tuple[SimulationData, int]]
    seeds: tuple[int, ...] = (0,)
    validation: float = 0.1
    engine: str = "graph"
    plan: Mapping[str, object]
    grid: Mapping[str, object]
    methods: Mapping[str, FileMethod]
    column: str = "test_accuracy"
    target: float | None = None
    higher_is_better: bool | None = None


def read_study(path: Path) -> StudyFile:
    """Read the file of a study.

    Raises:
        InvalidInput: The file cannot be read, or a key is missing, unknown or of another type.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise InvalidInput(f"{path}: cannot be read ({reason_of(exc)})", code="FN-1893") from exc
    except ValueError as exc:
        raise InvalidInput(f"{path}: not TOML ({exc})", code="FN-1893") from exc
    _check(str(path), table, KEYS)
    if missing := [key for key in REQUIRED if key not in table]:
        raise InvalidInput(f"{path}: got no {', '.join(missing)}, expected them; add the keys", code="FN-1893")
    data = table.pop("data", {})
    several = data if data and all(isinstance(each, dict) for each in data.values()) else {"": data}
    methods = table.pop("methods", {"study": {}})
    plan, grid = (keys_of(table.pop(name, {})) for name in ("plan", "grid"))
    seeds = tuple(table.pop("seeds", (0,)))
    return StudyFile(
        **table,
        plan=plan,
        grid=grid,
        seeds=seeds,
        data={name: _data(f"{path}: data{name and '.'}{name}", each) for name, each in several.items()},
        methods={name: _method(f"{path}: methods.{name}", each) for name, each in methods.items()},
    )


def keys_of(table: Mapping[str, object]) -> dict[str, object]:
    """Return keys of a Plan by dotted name: those of a section may be a table of TOML."""
    keys: dict[str, object] = {}
    for name, value in table.items():
        is_section = isinstance(value, dict) and "." not in name
        keys |= {f"{name}.{key}": item for key, item in value.items()} if is_section else {name: value}  # type: ignore[attr-defined]
    return keys


def _data(where: str, table: object) -> tuple[SimulationData, int]:
    row = _check(where, table, OF_DATA)
    options = row.get("options", {})
    split = SimulationData(
        data=row.get("name", "digits"),
        num_clients=row.get("clients", 100),
        by=row.get("by", "dirichlet"),
        alpha=row.get("alpha"),
        options=[f"{key}={value}" for key, value in options.items()],
    )
    return split, row.get("seed", 0)


def _method(where: str, table: object) -> FileMethod:
    row = _check(where, table, OF_METHOD)
    work = _check(f"{where}.work", row["work"], OF_WORK) if "work" in row else None
    try:
        limits = None if work is None else ClientWork(**work)
    except InvalidInput as exc:
        raise InvalidInput(f"{where}: {exc}", code=exc.code) from exc
    return FileMethod(plan=keys_of(row.get("plan", {})), app=row.get("app", ""), work=limits)


def _check(where: str, table: object, keys: Mapping[str, Kinds]) -> dict[str, Any]:
    """Return a table whose keys are known and have values of their types."""
    if not isinstance(table, dict):
        raise InvalidInput(f"{where}: got {table!r}, expected a table of {', '.join(keys)}", code="FN-1893")
    if unknown := sorted(set(table) - set(keys)):
        raise InvalidInput(f"{where}: got the keys {unknown}, expected only {', '.join(keys)}", code="FN-1893")
    for key, value in table.items():
        # A bool is an int of Python.
        if not isinstance(value, keys[key]) or (isinstance(value, bool) and bool not in keys[key]):
            names = " or ".join(kind.__name__ for kind in keys[key])
            raise InvalidInput(f"{where}: {key}: got {value!r}, expected {names}", code="FN-1893")
    return table
