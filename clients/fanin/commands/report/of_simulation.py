"""The report of a simulation: from the JSON that ``fanin simulate --json FILE`` writes."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict, cast

from fanin.clients.textfiles import reason_of
from fanin.commands.report.content import Chart, Content, Grid, Point
from fanin.protos.errors import InvalidInput
from fanin.protos.texts import counted, lasted, sized

ROUND = "Round"


class SimulatedRow(TypedDict):
    """A Round of the JSON, as far as a report has it."""

    round: int
    version: int
    time_s: float
    num_clients: int
    num_examples: int
    train_loss: float | None
    test_loss: float | None
    test_accuracy: float | None
    test_accuracy_int8: float | None
    validation_loss: float | None
    bytes_down: int
    bytes_up: int
    metrics: Mapping[str, float | None]


class SimulatedQuality(TypedDict):
    """The quality for a client of the JSON."""

    of_version: Mapping[str, float | None]
    personal: Mapping[str, float | None]


class SimulatedResult(TypedDict):
    """The JSON of a simulation, as far as a report has it."""

    seed: int
    engine: str
    selection: str
    is_complete: bool
    rounds: list[SimulatedRow]
    versions: list[str]
    failures: list[Mapping[str, object]]
    per_client: NotRequired[list[SimulatedQuality]]
    per_client_summary: NotRequired[Mapping[str, Mapping[str, float]]]


def find_result(what: Path) -> Path | None:
    """Return the JSON of a simulation that a file or a folder has; None if ``what`` is neither. Raises InvalidInput."""
    if what.is_file():
        return what
    if not what.is_dir():
        return None
    results = [path for path in sorted(what.glob("*.json")) if _is_result(_loaded(path))]
    if len(results) > 1:
        names = ", ".join(path.name for path in results)
        raise InvalidInput(f"{what}: got several simulations ({names}), expected one; name the file", code="FN-1466")
    return results[0] if results else None


def content_of_simulation(path: Path) -> Content:
    """Return the report of a simulation. Raises InvalidInput."""
    result = _loaded(path)
    if not _is_result(result):
        raise InvalidInput(
            f"{path}: got no result of a simulation, expected the file of fanin simulate --json FILE", code="FN-1466"
        )
    found = cast("SimulatedResult", result)
    try:
        return _content(path.stem, found)
    except (KeyError, TypeError, AttributeError, IndexError) as exc:
        raise InvalidInput(
            f"{path}: the result of the simulation lacks {exc}; simulate again with --json FILE", code="FN-1466"
        ) from exc


def _loaded(path: Path) -> object:
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as exc:
        raise InvalidInput(f"{path}: cannot be read ({reason_of(exc)}); name another file", code="FN-1466") from exc
    except ValueError:
        return None


def _is_result(result: object) -> bool:
    return isinstance(result, dict) and {"rounds", "engine", "is_complete"} <= set(result) and bool(result["rounds"])


def _content(name: str, result: SimulatedResult) -> Content:
    rows, last = result["rounds"], result["rounds"][-1]
    figures = [
        ("Accuracy, float", _number(last["test_accuracy"]), "on the test data"),
        ("Accuracy, int8", _number(last["test_accuracy_int8"]), "on the test data"),
        ("Test loss", _number(last["test_loss"]), f"after Round {last['round']}"),
        ("Rounds", str(len(rows) - 1), f"Version {last['version']}"),
        ("Virtual time", lasted(last["time_s"]), "of the devices"),
        ("Traffic", sized(_sum(rows, "bytes_down") + _sum(rows, "bytes_up")), f"{sized(_sum(rows, 'bytes_up'))} up"),
    ]
    failures = [f"{counted(len(result['failures']), 'training')} failed"] if result["failures"] else []
    settings = [("engine", result["engine"]), ("selection", result["selection"]), ("seed", str(result["seed"]))]
    return Content(
        name=name,
        kind="simulation",
        state="complete" if result["is_complete"] else "ended early",
        is_good=result["is_complete"],
        figures=[each for each in figures if each[1] != "-"],
        warnings=failures,
        charts=[*_charts(rows), *_client_charts(result.get("per_client", []))],
        tables=[
            Grid(title="Settings", head=(), rows=settings),
            *_client_tables(result.get("per_client_summary", {})),
            _table(rows, result["versions"]),
        ],
    )


def _charts(rows: Sequence[SimulatedRow]) -> list[Chart]:
    def of(name: str) -> list[Point]:
        values = ((row["round"], cast("float | None", row.get(name))) for row in rows)
        return [(number, value) for number, value in values if value is not None and math.isfinite(value)]

    trained = rows[1:]
    charts = [
        Chart(
            title="Accuracy on the test data",
            x_label=ROUND,
            series={"float": of("test_accuracy"), "int8": of("test_accuracy_int8")},
        ),
        Chart(title="Loss", x_label=ROUND, series={"training": of("train_loss"), "test": of("test_loss")}),
    ]
    for name in dict.fromkeys(each.removesuffix("_int8") for row in rows for each in row["metrics"]):
        both = {
            label: [(row["round"], value) for row in rows if (value := row["metrics"].get(key)) is not None]
            for label, key in (("float", name), ("int8", f"{name}_int8"))
        }
        charts.append(Chart(title=f"{name} on the test data", x_label=ROUND, series=both))
    down = [(row["round"], float(row["bytes_down"])) for row in trained]
    up = [(row["round"], float(row["bytes_up"])) for row in trained]
    charts.append(
        Chart(title="Bytes of a Round", x_label=ROUND, series={"down": down, "up": up}, is_amount=True, is_bytes=True)
    )
    clients = [(row["round"], float(row["num_clients"])) for row in trained]
    return [
        *charts,
        Chart(title="Clients of a Round", x_label=ROUND, series={"accepted updates": clients}, is_amount=True),
    ]


def _client_charts(clients: Sequence[SimulatedQuality]) -> list[Chart]:
    """Return the accuracy of each client, the worst one first; none without accuracies."""
    series: dict[str, list[Point]] = {}
    for name, values in (
        ("global", [each["of_version"].get("accuracy") for each in clients]),
        ("personal", [each["personal"].get("accuracy") for each in clients]),
    ):
        ordered = sorted(value for value in values if value is not None)
        if ordered:
            series[name] = list(enumerate(ordered, 1))
    title = "Accuracy of each client on its own test data"
    return [Chart(title=title, x_label="Clients, worst first", series=series)] if series else []


def _client_tables(summary: Mapping[str, Mapping[str, float]]) -> list[Grid]:
    if not summary:
        return []
    head = ("metric", "mean", "weighted mean", "worst decile", "clients")
    cells = [
        (
            name,
            *(_number(row[column]) for column in ("mean", "weighted_mean", "worst_decile")),
            str(row["num_clients"]),
        )
        for name, row in summary.items()
    ]
    note = "The last Version (global) and the own model of each client (personal), on the client's own test examples."
    return [Grid(title="Clients", head=head, rows=cells, note=note)]


def _table(rows: Sequence[SimulatedRow], digests: Sequence[str]) -> Grid:
    head = ("Round", "Version", "digest", "clients", "training loss", "test loss", "accuracy", "int8", "time", "up")
    # ``digests`` has Version 0 first.
    cells = [
        (
            *(str(row["round"]), str(row["version"]), _digest(digests, row["version"]), str(row["num_clients"])),
            *map(_number, (row["train_loss"], row["test_loss"], row["test_accuracy"], row["test_accuracy_int8"])),
            *(lasted(row["time_s"]), sized(row["bytes_up"])),
        )
        for row in reversed(rows)
    ]
    return Grid(title="Rounds, newest first", head=head, rows=cells, note="Round 0 is the model before the first one.")


def _digest(digests: Sequence[str], version: int) -> str:
    return digests[version][:8] if version < len(digests) else "-"


def _sum(rows: Sequence[SimulatedRow], name: str) -> int:
    return sum(cast("int", row.get(name)) for row in rows)


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.4f}"
