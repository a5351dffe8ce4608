"""The loop of ``fanin watch``: the events of a Run, past and future, until it ends."""

import json
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

from fanin.commands.console.show import event_row, finite, waits_row, waits_text
from fanin.commands.display.screen import Screen
from fanin.commands.display.view import EventView
from fanin.protos.errors import FaninError
from fanin.protos.messages import LiveRound, LoggedEvent, RunRested, RunState

Message = LoggedEvent | LiveRound


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
    messages: Iterable[Message],
    watched: Watched = Watched(),
    before: Mapping[str, object] | None = None,
) -> RunState:
    """Print the events of a Run as they arrive, and the devices of a Round that waits for them.

    Args:
        messages: The events, and the Round under way after each change. Another thread reads them.
        watched: How they are shown.
        before: A first JSON line.

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
        entries, live, shown, due_s = _arrivals(messages), LiveRound(), "", time.monotonic() + pauses.first_s
        while True:
            try:
                entry = entries.get(timeout=max(due_s - time.monotonic(), 0.0))
            except Empty:
                due_s = time.monotonic() + pauses.next_s
                # The devices are shown again only if they have changed.
                text = waits_text(live)
                if text != shown and view is not None:
                    view.waits(text)
                if text not in ("", shown):
                    write(waits_row(live))
                shown = text
                continue
            if entry is None:
                return outcome
            if isinstance(entry, FaninError):
                raise entry
            if isinstance(entry, LiveRound):
                live = entry
                continue
            write(event_row(entry))
            if view is not None:
                view.event(entry.event)
            shown, due_s = "", time.monotonic() + pauses.first_s
            if isinstance(entry.event, RunRested):
                outcome = entry.event.state


def _arrivals(messages: Iterable[Message]) -> "SimpleQueue[Message | FaninError | None]":
    """Return a queue of the messages: another thread reads them. Their error, or None, is the last entry."""
    entries: SimpleQueue[Message | FaninError | None] = SimpleQueue()

    def read() -> None:
        try:
            for entry in messages:
                entries.put(entry)
        except FaninError as exc:
            entries.put(exc)
        finally:
            entries.put(None)

    # A daemon: Ctrl-C ends the process while the thread waits for an event.
    threading.Thread(target=read, name="events of a run", daemon=True).start()
    return entries
