"""What the demo shows while it runs: one line a step with its seconds, and one line a Round, on standard error."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fanin.commands.display.screen import Screen
from fanin.commands.display.view import EventView
from fanin.protos.texts import lasted

AREA_COLUMNS = 12


class DemoScreen:
    """Shows the steps of the demo.

    Args:
        verbose: Whether each event of the Run has a line with everything that it has.
    """

    def __init__(self, *, verbose: bool) -> None:
        self._screen = Screen(sys.stderr)
        self._verbose = verbose

    def done(self, area: str, text: str) -> None:
        """Show a step without a duration."""
        self._screen.spans((f"{area:{AREA_COLUMNS}}", "bold cyan"), (text, ""))

    @contextmanager
    def doing(self, area: str, text: str) -> Iterator[None]:
        """Show a step: on a terminal while it runs, and with its seconds when it has ended."""
        began_s = time.monotonic()
        with self._screen.busy(f"{area:{AREA_COLUMNS}}{text}"):
            yield
        duration = lasted(time.monotonic() - began_s)
        self._screen.spans((f"{area:{AREA_COLUMNS}}", "bold cyan"), (text, ""), (f"  {duration}", "dim"))

    def run(self) -> EventView:
        """Return the view of a Run."""
        return EventView(self._screen, verbose=self._verbose)
