"""The Plan as a TOML file: how operators write it.

Every key has the name of the field that it sets (``fanin.protos.plans``). The file is read strictly: an unknown key or
a wrong type is an error that names the file and the table. ``parse_plan`` lists the defaults of omitted keys.
"""

import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TypeVar

from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import CodecSpec, Training
from fanin.protos.plans import DEFAULT_MAX_SHIFTS, AggregationPlan, CohortPlan, Plan, StopPlan

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A Plan and the model that it trains: either an App to export or a Bundle folder.

    Attributes:
        plan: The Plan.
        app: Name or path of the App; "" if there is a Bundle.
        bundle: Folder of the Bundle, relative to the file; "" if there is an App.
    """

    plan: Plan
    app: str = ""
    bundle: str = ""


def parse_plan(text: str, where: str) -> PlanFile:
    """Parse a Plan from TOML.

    The top level has ``name`` and one of ``app`` and ``bundle``. The tables are [cohort], [training], [codec],
    [aggregation] and [stop]. Defaults: ``buffer`` is ``concurrency``, ``quorum`` is ``buffer``, the codec is
    ``fixed32``, one epoch, seed 0.

    Args:
        text: The TOML document.
        where: Name of the document in error messages.

    Raises:
        InvalidPlan: The document is not TOML, has an unknown key or a wrong type, or is not a valid Plan.
    """
    try:
        root = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise InvalidPlan(f"{where}: not TOML ({exc})") from exc
    known = {"name", "app", "bundle", "cohort", "training", "codec", "aggregation", "stop"}
    if unknown := sorted(set(root) - known):
        raise InvalidPlan(f"{where}: got {unknown}, expected only {sorted(known)}")
    app, bundle = _text(root, "app", "", where), _text(root, "bundle", "", where)
    if bool(app) == bool(bundle):
        raise InvalidPlan(f"{where}: expected either app or bundle, got {'both' if app else 'neither'}")
    codec = {"name": "fixed32"} | _table(root, "codec", where)
    codec = {"max_shift": DEFAULT_MAX_SHIFTS.get(str(codec["name"]), 0)} | codec
    training = {"epochs": 1, "seed": 0} | _table(root, "training", where)
    cohort = _table(root, "cohort", where)
    if "concurrency" in cohort:
        cohort = {"buffer": cohort["concurrency"]} | cohort
        cohort = {"quorum": cohort["buffer"]} | cohort
    plan = Plan(
        name=_text(root, "name", "run", where),
        cohort=_build(CohortPlan, cohort, f"{where}: [cohort]"),
        training=_build(Training, training, f"{where}: [training]"),
        codec=_build(CodecSpec, codec, f"{where}: [codec]"),
        aggregation=_build(AggregationPlan, _table(root, "aggregation", where), f"{where}: [aggregation]"),
        stop=_build(StopPlan, _table(root, "stop", where), f"{where}: [stop]"),
    )
    return PlanFile(plan=plan, app=app, bundle=bundle)


def read_plan(path: Path) -> PlanFile:
    """Read a Plan from a TOML file. Raises InvalidPlan (see ``parse_plan``)."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidPlan(f"{path}: cannot be read ({exc})") from exc
    return parse_plan(text, str(path))


def _table(root: dict[str, object], name: str, where: str) -> dict[str, object]:
    table = root.get(name, {})
    if not isinstance(table, dict):
        raise InvalidPlan(f"{where}: got {name} = {table!r}, expected a table [{name}]")
    return dict(table)


def _text(root: dict[str, object], name: str, default: str, where: str) -> str:
    text = root.get(name, default)
    if not isinstance(text, str):
        raise InvalidPlan(f"{where}: {name} = {text!r}, expected str")
    return text


def _build(kind: type[T], row: dict[str, object], where: str) -> T:
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(row) - set(known)):
        raise InvalidPlan(f"{where}: got {unknown}, expected only {sorted(known)}")
    for name, field in known.items():
        if name not in row:
            if field.default is MISSING:
                raise InvalidPlan(f"{where}: got no {name}, expected a value")
            continue
        expected, value = field.type, row[name]
        if expected is float and type(value) is int:
            # An integer beyond 2^1000 has no float. As infinity the Plan rejects it with its own message.
            row[name] = float(value) if abs(value) < 1 << 1000 else float("inf")
        elif type(value) is not expected:
            raise InvalidPlan(f"{where}: {name} = {value!r}, expected {getattr(expected, '__name__', expected)}")
    return kind(**row)
