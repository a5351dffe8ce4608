"""Python's garbage collector during a simulation.

A simulation creates millions of short-lived objects, and almost none of them are in reference cycles. By default the
collector still traverses them after every 700 new ones, and again and again the objects of torch and of all clients.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

NUM_NEW: Final = 50_000
"""New objects after which the collector looks for cycles among them, instead of 700."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the collector run rarely in this context, and not on the objects that exist before it.

    Objects that the caller has frozen stay frozen. Otherwise its next collection would visit them all.
    """
    youngest, *older = gc.get_threshold()
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.freeze()
    if youngest:
        # 0 means that the caller has switched it off.
        gc.set_threshold(max(youngest, NUM_NEW), *older)
    try:
        yield
    finally:
        gc.set_threshold(youngest, *older)
        if freezes:
            gc.unfreeze()
