"""The loop of ``fanin watch``: the events of a Run, past and future, until it ends."""

import json
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

from fanin.commands.console.show import event_row, finite, waits_row, waits_text
from fanin.commands.display.screen import Screen
from fanin.commands.display.view import EventView
from fanin.protos.errors import FaninError, Unavailable
from fanin.protos.messages import LoggedEvent, RunDescription, RunRested, RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPauses:
    """Seconds without an event until the devices of an open Round are shown, and until they are shown again."""

    first_s: float = 10.0
    next_s: float = 60.0


ON_TERMINAL: Final = WatchPauses(first_s=1.0, next_s=2.0)
"""A line that updates in place may be shown often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """How a Run is shown.

    Attributes:
        json_target: A file for JSON lines next to the text, ``-`` for JSON lines instead of it, or empty.
        verbose: Whether the text has a line for each event, with everything that it has.
        pauses: When the devices of an open Round are shown; None for the pauses of the screen.
    """

    json_target: str = ""
    verbose: bool = False
    pauses: WatchPauses | None = None


def follow(
    events: Iterable[LoggedEvent],
    watched: Watched = Watched(),
    before: Mapping[str, object] | None = None,
    *,
    describe: Callable[[], RunDescription],
) -> RunState:
    """Print the events of a Run as they arrive, and the devices of a Round that waits for them.

    Args:
        events: The events. Another thread reads them.
        watched: How they are shown.
        before: A first JSON line.
        describe: Returns the Run with its newest Round.

    Returns:
        The state in which the Run ended.
    """
    target, outcome = watched.json_target, RunState.RUNNING
    with ExitStack() as stack:
        file = stack.enter_context(Path(target).open("w", encoding="utf-8")) if target not in ("", "-") else sys.stdout
        screen = Screen(sys.stdout)
        has_text = target != "-"
        view = stack.enter_context(EventView(screen, verbose=watched.verbose)) if has_text else None
        pauses = watched.pauses or (ON_TERMINAL if has_text and screen.is_terminal else WatchPauses())

        def write(row: Mapping[str, object]) -> None:
            if target:
                file.write(json.dumps(finite(row), allow_nan=False) + "\n")
                file.flush()

        if before is not None:
            write(before)
        entries, shown, pause_s = _arrivals(events), "", pauses.first_s
        while True:
            try:
                entry = entries.get(timeout=pause_s)
            except Empty:
                pause_s = pauses.next_s
                # A coordinator that restarts: the other thread connects again.
                with suppress(Unavailable):
                    description = describe()
                    # The devices are shown again only if they have changed.
                    text = waits_text(description)
                    if text != shown and view is not None:
                        view.waits(text)
                    if text not in ("", shown):
                        write(waits_row(description))
                    shown = text
                continue
            if entry is None:
                return outcome
            if isinstance(entry, FaninError):
                raise entry
            write(event_row(entry))
            if view is not None:
                view.event(entry.event)
            shown, pause_s = "", pauses.first_s
            if isinstance(entry.event, RunRested):
                outcome = entry.event.state


def _arrivals(events: Iterable[LoggedEvent]) -> "SimpleQueue[LoggedEvent | FaninError | None]":
    """Return a queue of the events: another thread reads them. Their error, or None, is the last entry."""
    entries: SimpleQueue[LoggedEvent | FaninError | None] = SimpleQueue()

    def read() -> None:
        try:
            for entry in events:
                entries.put(entry)
        except FaninError as exc:
            entries.put(exc)
        finally:
            entries.put(None)

    # A daemon: Ctrl-C ends the process while the thread waits for an event.
    threading.Thread(target=read, name="events of a run", daemon=True).start()
    return entries
