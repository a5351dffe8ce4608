"""The text that ``fanin simulate`` prints: its Rounds, the errors of its clients, and the baseline."""

import sys
from typing import TYPE_CHECKING

from fanin.commands.console.terminal import prints_text
from fanin.protos.texts import counted
from fanin.simulation.progress import FirstFailures, line_of, line_of_baseline, line_of_clients, line_of_evaluation
from fanin.simulation.rows import EVALUATED

if TYPE_CHECKING:
    from fanin.simulation import ClientFailure, Result, RoundRow, SimulationEvent


class SimulationText:
    """Prints the Rounds and the baseline on standard output, and errors on standard error.

    While standard output is for the JSON object, a terminal on standard error shows the Rounds.

    Args:
        json_target: The value of ``--json``.
        quiet: Whether standard error has no progress.
        has_seeds: Whether several simulations run, each with its seed.
    """

    def __init__(self, *, json_target: str, quiet: bool, has_seeds: bool) -> None:
        self._is_quiet = not prints_text(json_target) and (quiet or not sys.stderr.isatty())
        self._out = sys.stdout if prints_text(json_target) else sys.stderr
        self._has_seeds = has_seeds
        self.failures = FirstFailures(self._failure)

    def row(self, row: "RoundRow") -> None:
        """Print a Round, and the seed before the first Round of each of several simulations."""
        heading = f"seed {row.seed}\n" if self._has_seeds and row.round == 0 else ""
        self._print(f"{heading}{line_of(row)}\n")

    def event(self, event: "SimulationEvent") -> None:
        """Print the evaluation of a Version by the clients of a Flower app."""
        if event.event == EVALUATED:
            self._print(f"{line_of_evaluation(event)}\n")

    def result(self, result: "Result") -> None:
        """Print the quality for each client and the baseline of each seed, and the number of failed trainings."""
        for each in result.repeats or (result,):
            seed = f"seed {each.rounds[0].seed}: " if self._has_seeds else ""
            if each.per_client:
                self._print(f"{seed}{line_of_clients(each.per_client_summary)}\n")
            if each.baseline:
                self._print(f"{seed}baseline: {line_of_baseline(each.baseline[-1])}\n")
            if each.baseline_end:
                sys.stderr.write(f"fanin simulate: {seed}the baseline ended early: {each.baseline_end}\n")
        if self.failures.num:
            failed = counted(self.failures.num, "training")
            sys.stderr.write(f"fanin simulate: {failed} failed; --json FILE lists the errors\n")

    def _failure(self, failure: "ClientFailure") -> None:
        seed = f"seed {failure.seed}: " if self._has_seeds else ""
        sys.stderr.write(f"fanin simulate: {seed}{failure}\n{failure.traceback}")
        sys.stderr.flush()

    def _print(self, text: str) -> None:
        if not self._is_quiet:
            self._out.write(text)
            self._out.flush()
