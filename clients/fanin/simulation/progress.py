"""The lines that a simulation prints on standard error: the export, each Round, and the baseline.

A notebook shows them below the cell. ``SimulationSettings(quiet=True)`` prints none but
the warning that the first Rounds have cut many values. Steps are also log records, which
``fanin simulate`` prints itself.
"""

import logging
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from fanin.edge.runtimes.evaluations import OF_VALIDATIONS
from fanin.protos.texts import counted
from fanin.simulation.rows import EVALUATED, ClientFailure, OnFailure, RoundRow, SimulationEvent

if TYPE_CHECKING:
    from fanin.simulation.studies.baseline import BaselineRow
    from fanin.simulation.studies.per_client import QualitySummary

LOGGER: Final = logging.getLogger(__name__)
SHOWN_EVERY_S: Final = 15.0
"""A longer export or baseline prints its state this often. Most take less, and one line is enough."""


FIRST_ROUNDS: Final = 3
"""Rounds in which the grid may not fit the changes yet. It follows them by 2 bits a Round."""


class SimulationProgress:
    """Prints the progress of one simulation."""

    def __init__(self, *, quiet: bool, every_s: float = SHOWN_EVERY_S) -> None:
        self._quiet = quiet
        self._every_s = every_s
        self._began_s = time.monotonic()
        self._step_s = self._began_s
        self._has_warned = False
        self._failed = FirstFailures(lambda failure: self.show(f"{failure}; result.failures has its traceback"))

    def show(self, text: str) -> None:
        """Print one line with the seconds since the simulation began."""
        if not self._quiet:
            self._write(text)

    def _write(self, text: str) -> None:
        sys.stderr.write(f"simulate: {time.monotonic() - self._began_s:5.1f} s: {text}\n")
        sys.stderr.flush()

    def step(self, text: str) -> None:
        """Print the begin or the state of a long step, and log it."""
        self._step_s = time.monotonic()
        self.show(text)
        LOGGER.info(text)

    def baseline(self, row: "BaselineRow", num_rounds: int) -> None:
        """Print a Round of the baseline, from time to time."""
        if time.monotonic() - self._step_s >= self._every_s:
            self.step(f"baseline: round {row.round} of {num_rounds}: {line_of_baseline(row)}")

    @contextmanager
    def exporting(self, name: str) -> Iterator[None]:
        """Print that the App is exported. A long export prints its current step from time to time."""
        self.show(f"exporting {name}: tracing, converting and verifying its graphs, once")
        steps, logger, has_ended = _NewestStep(), logging.getLogger("fanin.edge.export"), threading.Event()

        def remind() -> None:
            while not has_ended.wait(self._every_s):
                self.show(f"still exporting {name}: {steps.newest}")

        before = logger.level, logger.propagate
        logger.addHandler(steps)
        logger.setLevel(logging.INFO)
        # The exporter's libraries configure the root logger, which would repeat each step.
        logger.propagate = False
        threading.Thread(target=remind, daemon=True, name="export-progress").start()
        try:
            yield
        finally:
            has_ended.set()
            logger.level, logger.propagate = before
            logger.removeHandler(steps)

    def failure(self, failure: ClientFailure) -> None:
        """Print an error in the training of a client, if it is the first one of its cause."""
        self._failed(failure)

    def row(self, row: RoundRow, label: str = "") -> None:
        """Print a Round, after a label."""
        self.show(label + line_of(row))
        if row.num_saturated_clients and row.round <= FIRST_ROUNDS and not self._has_warned:
            # Also if it is quiet: the result is not that of the algorithm.
            self._has_warned = True
            self._write(f"warning: {label}{saturation_text(row)}")

    def event(self, event: SimulationEvent, label: str = "") -> None:
        """Print the evaluation of a Version by the clients of a Flower app, after a label."""
        if event.event == EVALUATED:
            self.show(label + line_of_evaluation(event))


class FirstFailures:
    """Passes the first error of each cause to a function: an error in an App or its data comes back in each Round.

    Attributes:
        num: The number of all errors so far.
    """

    def __init__(self, show: OnFailure) -> None:
        self.num = 0
        self._show = show
        self._places: set[tuple[str, ...]] = set()

    def __call__(self, failure: ClientFailure) -> None:
        """Count an error, and pass it on if it is the first one of its cause."""
        self.num += 1
        if failure.place not in self._places:
            self._places.add(failure.place)
            self._show(failure)


class _NewestStep(logging.Handler):
    """Remembers the current step of an export."""

    newest = "preparing the module"

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        self.newest = record.getMessage()


def line_of_baseline(row: "BaselineRow") -> str:
    """Return the centralized baseline after a Round as one line of text."""
    tested = f"  test loss {row.test_loss:.4f}" if math.isfinite(row.test_loss) else ""
    tested += f"  accuracy {row.test_accuracy:.4f}" if math.isfinite(row.test_accuracy) else ""
    return f"{counted(row.num_steps, 'step')}{tested}"


def line_of_clients(summary: "Mapping[str, QualitySummary]") -> str:
    """Return the accuracy for each client, or the loss without one, as one line of text."""
    metric = "accuracy" if any(name.endswith(".accuracy") for name in summary) else "loss"
    parts = [
        f"{name.partition('.')[0]} {metric} {each.mean:.4f}, worst decile {each.worst_decile:.4f}"
        for name, each in summary.items()
        if name.endswith(f".{metric}")
    ]
    return f"clients: {'; '.join(parts)}"


def evaluation_text(row: RoundRow) -> str:
    """Return the clients' evaluation of a row's Version; empty without one."""
    values = {"validation loss": row.validation_loss}
    values |= {name: value for name, value in row.means.items() if name.startswith(OF_VALIDATIONS)}
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items() if math.isfinite(value))


def line_of_evaluation(event: SimulationEvent) -> str:
    """Return the event ``EVALUATED`` as one line of text."""
    return f"round {event.round:4d}  evaluated: {event.detail}"


def saturation_text(row: RoundRow) -> str:
    """Return the warning for a Round whose grid has cut many values of its clients."""
    return (
        f"round {row.round}: the grid cut more than 1 % of the values of {row.num_saturated_clients} of "
        f"{counted(row.num_clients, 'client')}, {counted(row.num_saturated, 'value')} in all, so the Version misses a "
        "part of their changes; raise codec.max_shift, or lower the learning rate (docs/howto/operate.md"
        "#saturated-updates)"
    )


def line_of(row: RoundRow) -> str:
    """Return a Round as one line of text."""
    tested = ""
    if math.isfinite(row.test_loss):
        tested = f"  test loss {row.test_loss:.4f}"
    elif math.isfinite(row.validation_loss):
        tested = f"  validation loss {row.validation_loss:.4f}"
    if math.isfinite(row.test_accuracy):
        tested += f"  accuracy {row.test_accuracy:.4f}"
    if math.isfinite(row.test_accuracy_int8):
        tested += f"  int8 {row.test_accuracy_int8:.4f}"
    values = (*row.metrics.items(), *row.means.items())
    tested += "".join(f"  {name} {value:.4f}" for name, value in values if math.isfinite(value))
    trained = f"  {counted(row.num_clients, 'client')}" if row.round else "  initial model"
    if math.isfinite(row.train_loss):
        trained += f"  train loss {row.train_loss:.4f}"
        if row.train_loss_examples < row.num_examples:
            trained += f" (of {row.train_loss_examples} of {counted(row.num_examples, 'example')})"
    if row.num_diverged:
        trained += f" (cut: num_diverged {row.num_diverged}, lower the learning rate)"
    if row.num_saturated:
        of = f", {counted(row.num_saturated_clients, 'client')} above 1 %" if row.num_saturated_clients else ""
        trained += f" (cut: {counted(row.num_saturated, 'value')} out of the grid's range{of})"
    if row.num_clamped:
        trained += f" (set to the end of a range: {counted(row.num_clamped, 'value')})"
    return f"round {row.round:4d}{trained}{tested}"
