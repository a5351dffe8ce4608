"""The result of a simulation: its rows, and the final module."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fanin.edge.bundles.arrays import ArrayLayout
from fanin.edge.tensors import Array, Float32s, TensorTable
from fanin.protos.errors import FaninError, InvalidInput
from fanin.protos.plans.named import raised_text
from fanin.simulation.rows import ClientFailure, ClientRow, RoundRow, SimulationEvent, cells
from fanin.simulation.studies.baseline import BaselineRow
from fanin.simulation.studies.boards import open_board, write_scalars
from fanin.simulation.studies.per_client import ClientQuality, QualitySummary, quality_columns
from fanin.simulation.studies.seeds import SpreadRow, spread_of, write_spread

if TYPE_CHECKING:
    from fanin.edge.export.app.app import App
    from fanin.edge.export.module.prepare import Module

NO_CLIENTS: Final = tuple(each.name for each in fields(ClientRow) if each.name not in ("statistics", "means"))
"""The columns of a table without clients: no Round has ended."""
SUMMARY: Final = ("train_loss", "test_loss", "test_accuracy", "test_accuracy_int8")
"""The values of a Round in the ``repr`` of a result."""
Columns = dict[str, list[float]]
"""The cells of each column, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptVersion:
    """A Version of a simulation with its parameters.

    Attributes:
        app: The App; None for a Flower app.
        table: The layout of the parameters.
        row: Its Round.
        parameters: Its parameters (num_values,).
        layout: See ``Result.layout``.
    """

    app: "App | None"
    table: TensorTable
    row: RoundRow
    parameters: Float32s
    layout: ArrayLayout | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_summary(self.app, self.row)}; see .row, .parameters and .module)"

    @property
    def module(self) -> "Module":
        """A copy of the App's module with these parameters, for evaluation.

        Raises:
            InvalidInput: A Flower app was trained; ``arrays`` has its parameters.
        """
        return _module(self.app, self.table, self.parameters)

    @property
    def arrays(self) -> dict[str, Array]:
        """The parameters by name, each in its shape. See ``Result.arrays``."""
        views = self.table.views(self.parameters)
        return dict(views) if self.layout is None else self.layout.complete(views)


class BestVersion(KeptVersion):
    """The best Version of a simulation on the test data, by the metric ``evaluation.best`` of the Plan."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """The result of ``simulate``. With several seeds, its tables and files have the rows of all seeds.

    Attributes:
        app: The trained App; None for a Flower app.
        engine: The engine that trained the clients, such as ``graph`` or ``vmap:cuda``; ``flower`` for a Flower app.
        selection: The name of the selection policy: the Plan's, or that of the settings.
        table: The layout of the parameters.
        rounds: The initial model, then a row for each Round that published a Version. Failed Rounds have no row, but
            use a number.
        clients: The clients of each Round.
        failures: Errors in the training of clients, and Updates that the coordinator refused.
        events: The event log: the actions of each client, with their virtual times.
        parameters: The final parameters (num_values,).
        best: The best Version on the test data; None without test data.
        digests: The SHA-256 of each Version, oldest first.
        is_complete: Whether all Rounds were run, of all seeds. False after Ctrl-C, and in ``RunStopped``.
        baseline: The rows of the centralized baseline, if the settings enable it.
        baseline_end: Why the baseline ended before the last Round; empty if it did not.
        local: The personal parameters of each client that has trained, by its index and by name.
        per_client: The quality of the last Version for each client, with ``SimulationSettings.client_test``.
        per_client_summary: Mean, weighted mean and worst decile of its columns, such as ``personal.accuracy``.
        versions: The newest Versions by number, as many as ``SimulationSettings.keep_versions``.
        repeats: The results of all seeds, if the settings have ``seeds``. This one is the first of them.
        layout: The names of a Flower app's arrays in its order, and the initial values of those that do not travel.
            None for an App.
    """

    app: "App | None"
    engine: str
    selection: str
    table: TensorTable
    rounds: tuple[RoundRow, ...]
    clients: tuple[ClientRow, ...]
    failures: tuple[ClientFailure, ...]
    events: tuple[SimulationEvent, ...]
    parameters: Float32s
    best: BestVersion | None
    digests: tuple[str, ...]
    is_complete: bool
    baseline: tuple[BaselineRow, ...] = ()
    baseline_end: str = ""
    repeats: "tuple[Result, ...]" = ()
    local: Mapping[int, Mapping[str, Float32s]] = field(default_factory=dict)
    per_client: tuple[ClientQuality, ...] = ()
    per_client_summary: Mapping[str, QualitySummary] = field(default_factory=dict)
    versions: Mapping[int, KeptVersion] = field(default_factory=dict)
    layout: ArrayLayout | None = None

    def __repr__(self) -> str:
        return f"Result({_summary(self.app, self.rounds[-1])}; see .rounds, .clients, .failures, .events and .arrays)"

    @property
    def module(self) -> "Module":
        """A copy of the App's module with the final parameters, for evaluation. Personal ones have initial values.

        Raises:
            InvalidInput: A Flower app was trained; ``arrays`` has its parameters.
        """
        return _module(self.app, self.table, self.parameters)

    def module_of(self, client: int) -> "Module":
        """Return a copy of the App's module with the final parameters and a client's personal ones.

        Raises:
            InvalidInput: The App has no personal parameters, or the client has not trained.
        """
        if self.app is None or client not in self.local:
            raise InvalidInput(
                f"result: got client {client}, expected one of the {len(self.local)} clients with personal parameters "
                "that have trained: those of Recipe(local=[...]), or Ditto's copy; a fine-tuned model is evaluated, "
                "and not kept",
                code="FN-1196",
            )
        from fanin.edge.export.module.prepare import with_parameters

        return with_parameters(self.app, {**self.table.views(self.parameters), **self.local[client]})

    @property
    def arrays(self) -> dict[str, Array]:
        """The final parameters by name, each in its shape.

        A Flower app has all of its arrays in its order and with its dtypes. Those that do not travel have their initial
        values.
        """
        newest = KeptVersion(
            app=self.app, table=self.table, row=self.rounds[-1], parameters=self.parameters, layout=self.layout
        )
        return newest.arrays

    @property
    def spread(self) -> tuple[SpreadRow, ...]:
        """The mean and the deviation of each column over the seeds, for each Round that a seed has."""
        return spread_of([result.rounds for result in self._seeds])

    def plot(self, path: Path | str | None = None) -> object:
        """Draw loss and accuracy over the Rounds: of several seeds the mean, and a band of one standard deviation.

        Args:
            path: The file to write, in the format of its suffix. None writes none.

        Returns:
            The matplotlib Figure, which a notebook shows.

        Raises:
            InvalidInput: matplotlib does not know the format.
            ModuleNotFoundError: matplotlib is not installed.
        """
        from fanin.simulation.studies.plots import plot_rounds

        return plot_rounds(self, path)

    def write_csv(self, path: Path | str) -> None:
        """Write the Rounds as a CSV file."""
        _write_csv(path, self.columns())

    def write_spread_csv(self, path: Path | str) -> None:
        """Write ``spread`` as a CSV file with the columns ``NAME.mean`` and ``NAME.std``."""
        write_spread(path, self.spread)

    def tensorboard(self, folder: Path | str) -> None:
        """Write the Rounds as TensorBoard event files; of several seeds, each into a folder ``seed-INDEX``.

        Raises:
            RuntimeMissing: tensorboardX is not installed.
        """
        if not self.repeats:
            write_scalars(self.rounds, open_board(folder))
        for index, result in enumerate(self.repeats):
            write_scalars(result.rounds, open_board(Path(folder) / f"seed-{index}"))

    def write_clients_csv(self, path: Path | str) -> None:
        """Write the clients of each Round as a CSV file."""
        _write_csv(path, self.client_columns())

    def write_per_client_csv(self, path: Path | str) -> None:
        """Write the quality of the last Version for each client as a CSV file."""
        _write_csv(path, self.per_client_columns())

    def plot_per_client(self, path: Path | str | None = None, metric: str = "accuracy") -> object:
        """Draw the share of the clients whose value is at most x, for the Version and for the personal models.

        Args:
            path: The file to write, in the format of its suffix. None writes none.
            metric: The metric.

        Returns:
            The matplotlib Figure, which a notebook shows.

        Raises:
            InvalidInput: No client has the metric, or matplotlib does not know the format.
            ModuleNotFoundError: matplotlib is not installed.
        """
        from fanin.simulation.studies.plots import plot_shares

        return plot_shares(self.per_client_columns(), metric, path)

    def write_events(self, path: Path | str) -> None:
        """Write the event log as JSON lines."""
        Path(path).write_text(
            "".join(f"{event.line}\n" for each in self._seeds for event in each.events), encoding="utf-8"
        )

    def columns(self) -> Columns:
        """Return the Rounds as columns by name: ``pandas.DataFrame(result.columns())``."""
        return _columns([row for each in self._seeds for row in each.rounds])

    def client_columns(self) -> Columns:
        """Return the clients of each Round as columns by name: ``pandas.DataFrame(result.client_columns())``."""
        return _columns([row for each in self._seeds for row in each.clients])

    def per_client_columns(self) -> Columns:
        """Return the quality for each client as columns by name: ``global.METRIC`` and ``personal.METRIC``."""
        return quality_columns([row for each in self._seeds for row in each.per_client])

    @property
    def _seeds(self) -> "tuple[Result, ...]":
        """The result of each seed."""
        return self.repeats or (self,)


class RunStopped(FaninError):
    """A simulated Run ended before its last Round.

    Attributes:
        result: The result so far: the completed Rounds, of all seeds.
    """

    def __init__(self, message: str, result: Result, *, code: str = "") -> None:
        super().__init__(message, code=code)
        self.result = result


class ClientFailed(FaninError):
    """The training of a client raised an error, and the simulation ends: its settings say so, or no client can train.

    Its code is that of the client's error.

    Attributes:
        failure: The error of the client.
        result: The result so far: the completed Rounds, of all seeds.
    """

    def __init__(self, message: str, failure: ClientFailure, result: Result, *, code: str = "") -> None:
        super().__init__(message, code=code)
        self.failure = failure
        self.result = result


def text_of(error: Exception) -> str:
    """Return the text of an error that ends a simulation: of an evaluation, or of a function of the settings."""
    return str(error) if isinstance(error, FaninError) else f"simulate: {raised_text(error)}"


def code_of(error: BaseException | None) -> str:
    """Return the code of an error that ends a simulation."""
    return error.code if isinstance(error, FaninError) else "FN-1189"


def total_of(results: Sequence[Result], seeds: Sequence[int]) -> Result:
    """Return the result of all seeds."""
    if not seeds:
        return results[0]
    is_complete = len(results) == len(seeds) and all(each.is_complete for each in results)
    return replace(results[0], repeats=tuple(results), is_complete=is_complete)


def _module(app: "App | None", table: TensorTable, parameters: Float32s) -> "Module":
    if app is None:
        raise InvalidInput("result: got no module of a Flower app; load Result.arrays into yours", code="FN-1196")
    from fanin.edge.export.module.prepare import with_parameters

    return with_parameters(app, table.views(parameters))


def _summary(app: "App | None", row: RoundRow) -> str:
    """Return the name of an App, and the Round and the measured values of a row, for a short ``repr``."""
    values = {name: getattr(row, name) for name in SUMMARY} | dict(row.metrics)
    measured = "".join(f", {name}={value:.4g}" for name, value in values.items() if math.isfinite(value))
    return f"app={None if app is None else app.name!r}, round={row.round}{measured}"


def _columns(rows: Sequence[RoundRow | ClientRow]) -> Columns:
    table = [cells(row) for row in rows]
    # A Version that was not evaluated has no values of named test sets.
    return {name: [row.get(name, math.nan) for row in table] for name in (table[0] if table else NO_CLIENTS)}


def _write_csv(path: Path | str, columns: Columns) -> None:
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
