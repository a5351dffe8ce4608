"""The result of a simulation: its rows, and the final module."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fanin.edge.tensors import Float32s, TensorTable
from fanin.simulation.devices.events import SimulationEvent
from fanin.simulation.rows import ClientFailure, ClientRow, RoundRow, cells

if TYPE_CHECKING:
    from fanin.edge.export.app import App
    from fanin.edge.export.prepare import Module

NO_CLIENTS: Final = tuple(each.name for each in fields(ClientRow) if each.name != "statistics")
"""The columns of a table without clients: no Round has ended."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """The result of ``simulate``.

    Attributes:
        app: The App that was trained.
        engine: The engine that trained the clients, ``graph`` or ``vmap``.
        table: The layout of the parameters.
        rounds: The Rounds, the initial model first.
        clients: The clients of each Round.
        failures: Errors in the training of clients.
        events: The event log: what each client did at which virtual time.
        parameters: The final parameters (num_values,).
        digests: The SHA-256 of each Version, oldest first.
        is_complete: Whether all Rounds were run. False after Ctrl-C.
    """

    app: "App"
    engine: str
    table: TensorTable
    rounds: tuple[RoundRow, ...]
    clients: tuple[ClientRow, ...]
    failures: tuple[ClientFailure, ...]
    events: tuple[SimulationEvent, ...]
    parameters: Float32s
    digests: tuple[str, ...]
    is_complete: bool

    @property
    def module(self) -> "Module":
        """A copy of the App's module with the final parameters, for evaluation."""
        from fanin.edge.export.prepare import with_parameters

        return with_parameters(self.app, self.table.views(self.parameters))

    def plot(self, path: Path | str | None = None) -> object:
        """Draw loss and accuracy over the Rounds.

        Args:
            path: The file to write, in the format of its suffix. None writes none.

        Returns:
            The matplotlib Figure, which a notebook shows.

        Raises:
            InvalidInput: matplotlib does not know the format.
            ModuleNotFoundError: matplotlib is not installed.
        """
        from fanin.simulation.plots import plot_rounds

        return plot_rounds(self.rounds, path)

    def write_csv(self, path: Path | str) -> None:
        """Write the Rounds as a CSV file."""
        _write_csv(path, self.rounds)

    def write_clients_csv(self, path: Path | str) -> None:
        """Write the clients of each Round as a CSV file."""
        _write_csv(path, self.clients)

    def write_events(self, path: Path | str) -> None:
        """Write the event log as JSON lines."""
        Path(path).write_text("".join(f"{event.line}\n" for event in self.events))

    def columns(self) -> dict[str, list[object]]:
        """Return the Rounds as columns by name: ``pandas.DataFrame(result.columns())``."""
        rows = [cells(row) for row in self.rounds]
        return {name: [row[name] for row in rows] for name in rows[0]}


def _write_csv(path: Path | str, rows: Sequence[RoundRow | ClientRow]) -> None:
    table = [cells(row) for row in rows]
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0] if table else NO_CLIENTS)
        writer.writeheader()
        writer.writerows(table)
