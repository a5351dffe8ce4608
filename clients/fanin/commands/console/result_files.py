"""The files of a simulation's results, which the options of ``fanin simulate`` name."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fanin.commands.console.terminal import write_json
from fanin.edge.parameter_files import write_npz
from fanin.protos.errors import InvalidInput

if TYPE_CHECKING:
    from fanin.simulation import Result, SimulationEvent
    from fanin.simulation.rows import OnEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFiles:
    """The options that name files for the results of a simulation."""

    out: Path | None
    csv: Path | None
    clients_csv: Path | None
    per_client_csv: Path | None
    events: Path | None
    tensorboard: Path | None
    plot: Path | None
    json: str

    @property
    def names(self) -> tuple[Path | None, ...]:
        """The files that are named; None for the others."""
        tables = self.csv, self.clients_csv, self.per_client_csv
        return self.out, *tables, self.tensorboard, self.plot, self.events

    def check(self, *, has_client_tests: bool) -> None:
        """Raise InvalidInput unless the files can be written: a training may take long."""
        if self.per_client_csv is not None and not has_client_tests:
            raise InvalidInput(
                "--per-client-csv: got it without --client-test, expected test examples of each client; add "
                "--client-test 0.2",
                code="FN-1837",
            )
        if self.out is not None and self.out.suffix != ".npz":
            raise InvalidInput(f"--out: got {self.out}, expected FILE.npz", code="FN-1006")
        files = (
            ("--out", self.out),
            ("--csv", self.csv),
            ("--clients-csv", self.clients_csv),
            ("--per-client-csv", self.per_client_csv),
            ("--events", self.events),
        )
        for option, path in files:
            if path is not None and not path.parent.is_dir():
                raise InvalidInput(
                    f"{option}: {path} cannot be written, {path.parent} is not a folder; create it", code="FN-1001"
                )
        if self.csv is not None and self.csv == self.clients_csv:
            raise InvalidInput(f"--csv, --clients-csv: got {self.csv} for both, expected two files", code="FN-1001")
        if self.tensorboard is not None:
            from fanin.simulation.studies.boards import check_board

            check_board()
        if self.plot is not None:
            from fanin.simulation.data.figures import check_figure_file

            check_figure_file(self.plot)

    @contextmanager
    def open_events(self, show: "OnEvent") -> "Iterator[OnEvent]":
        """Yield a function that shows and writes an event at once: the log of a simulation that fails is complete."""
        if self.events is None:
            yield show
            return
        with self.events.open("w", buffering=1, encoding="utf-8") as file:

            def write(event: "SimulationEvent") -> None:
                show(event)
                file.write(f"{event.line}\n")

            yield write

    def write(self, result: "Result") -> None:
        """Write the files of a result. With several seeds the CSV file has their mean and spread."""
        if self.out is not None:
            write_npz(self.out, result.arrays)
        if self.csv is not None:
            result.write_spread_csv(self.csv) if result.repeats else result.write_csv(self.csv)
        if self.clients_csv is not None:
            result.write_clients_csv(self.clients_csv)
        if self.per_client_csv is not None:
            result.write_per_client_csv(self.per_client_csv)
        if self.tensorboard is not None:
            result.tensorboard(self.tensorboard)
        if self.json:
            write_json(self.json, _result_row(result))
        if self.plot is not None:
            result.plot(self.plot)

    def stopped(self, result: "Result") -> str:
        """Return the message for an interrupted simulation: its last Round, and the files that have its result."""
        last_row = (result.repeats or (result,))[-1].rounds[-1]
        last, seed = last_row.round, f" of seed {last_row.seed}" if result.repeats else ""
        names = ", ".join(str(path) for path in self.names if path is not None)
        where = f"the result so far is in {names}" if names else "no file has the result; name one, as by --csv FILE"
        return f"fanin simulate: stopped after round {last}{seed}; {where}\n"


def _result_row(result: "Result") -> dict[str, object]:
    """Return the JSON object of a result: that of the first seed, and in ``repeats`` those of all."""
    rounds = [asdict(each) for each in result.rounds]
    row: dict[str, object] = {
        "seed": result.rounds[0].seed,
        "engine": result.engine,
        "selection": result.selection,
        "is_complete": result.is_complete,
        "rounds": rounds,
        "versions": list(result.digests),
        "failures": [asdict(each) for each in result.failures],
    }
    if result.best is not None:
        row["best_round"] = result.best.row.round
    if result.baseline:
        row["baseline"] = [asdict(each) for each in result.baseline]
    if result.baseline_end:
        row["baseline_end"] = result.baseline_end
    if result.per_client:
        row["per_client"] = [asdict(each) for each in result.per_client]
        row["per_client_summary"] = {name: asdict(each) for name, each in result.per_client_summary.items()}
    if result.repeats:
        row["spread"] = [asdict(each) for each in result.spread]
        row["repeats"] = [_result_row(each) for each in result.repeats]
    return row
