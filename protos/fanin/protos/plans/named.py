"""What a Plan names: ours by name, or those of other distributions by entry point."""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from fanin.protos.errors import InvalidPlan

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


def named(key: str, name: str, ours: Mapping[str, T], group: str) -> T:
    """Return what a Plan names: one of ours, or the entry point of this name.

    Args:
        key: The key of the Plan, for errors.
        name: The name.
        ours: Ours, by name.
        group: The entry point group of the others.

    Raises:
        InvalidPlan: Nothing has this name, or its package cannot be imported.
    """
    if name in ours:
        return ours[name]
    entries = installed(group)
    if name in entries:
        try:
            theirs: T = entries[name].load()
        except Exception as exc:  # Of any kind: the code is another package's.
            raise InvalidPlan(
                f"plan: {key}: {name!r} cannot be imported from {entries[name].value} ({type(exc).__name__}: {exc}); "
                "repair that package"
            ) from exc
        return theirs
    known = sorted({*ours, *entries})
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InvalidPlan(f"plan: {key}: got {name!r}, expected one of {known}, which are installed here{hint}")


def installed(group: str) -> "Mapping[str, EntryPoint]":
    """Return the entry points of a group that are installed here, by name."""
    # Imported late: it loads the email parser, which costs 3 MB on a device.
    from importlib.metadata import entry_points

    return MappingProxyType({entry.name: entry for entry in entry_points(group=group)})
