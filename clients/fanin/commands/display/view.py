"""The events of a Run on a screen: one line a Round. With ``verbose``, one line an event with all that it has."""

import time
from contextlib import ExitStack
from typing import Self

from fanin.commands.console.show import event_text, int8_lags, saturated_text
from fanin.commands.display.rounds import COLUMNS, RoundLine, row_text
from fanin.commands.display.screen import Screen, elapsed
from fanin.protos.messages import (
    DevicesGone,
    RoundClosed,
    RoundFailed,
    RoundOpened,
    RunEvent,
    RunRested,
    RunWarned,
    VersionPublished,
)


class EventView:
    """Shows the events of a Run as they arrive.

    While it is entered, the last line of a terminal is the open Round.

    Args:
        screen: Where.
        verbose: Whether each event has a line with everything that it has.
    """

    def __init__(self, screen: Screen, *, verbose: bool = False) -> None:
        self._screen = screen
        self._verbose = verbose
        self._num_accepted: dict[int, int] = {}
        self._notes: set[str] = set()
        self._has_header = False
        self._open: tuple[int, float] | None = None
        self._status = ""
        self._live = ExitStack()

    def __enter__(self) -> Self:
        self._live.enter_context(self._screen.live(self._live_line))
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.__exit__(None, None, None)

    def event(self, event: RunEvent) -> None:
        """Show an event."""
        self._status = ""
        match event:
            case RoundOpened():
                self._open = (event.round, time.monotonic())
            case RoundClosed():
                self._num_accepted[event.round] = event.num_accepted
            case RoundFailed() | VersionPublished() | RunRested():
                self._open = None
            case _:
                pass
        if self._verbose:
            self._screen.line(event_text(event))
        elif isinstance(event, VersionPublished) and event.round:
            self._round(event)
        elif not isinstance(event, RoundOpened | RoundClosed):
            is_bad = isinstance(event, RoundFailed | RunWarned | DevicesGone)
            self._screen.line(event_text(event), "yellow" if is_bad else "")

    def waits(self, text: str) -> None:
        """Show the devices of the open Round: in the last line of a terminal, elsewhere as a line."""
        if self._screen.is_terminal:
            self._status = text
        elif text:
            self._screen.line(text)

    def _round(self, event: VersionPublished) -> None:
        line = RoundLine(version=event, num_devices=self._num_accepted.pop(event.round, None))
        if not self._screen.is_terminal:
            self._screen.line(line.text())
        else:
            if not self._has_header:
                self._has_header = True
                header = row_text(tuple(name for name, _ in COLUMNS), self._screen.columns)
                self._screen.spans(*((text, "dim") for text, _ in header), wraps=False)
            self._screen.spans(*row_text(line.cells(), self._screen.columns), wraps=False)
        if event.saturated.num_devices:
            self._note("saturated", saturated_text(event.saturated))
        if event.evaluation is not None and (text := int8_lags(event.evaluation)):
            self._note("int8", text)

    def _note(self, kind: str, text: str) -> None:
        """Show a note, the first one of its kind."""
        if kind not in self._notes:
            self._notes.add(kind)
            self._screen.line(f"note: {text}", "yellow")

    def _live_line(self) -> str:
        if self._open is None:
            return ""
        number, began_s = self._open
        return (
            f" {self._status}  {elapsed(began_s)}" if self._status else f" round {number} is open  {elapsed(began_s)}"
        )
