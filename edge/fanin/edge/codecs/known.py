"""The names of the stages and codecs that are installed here, which a device sends with every check-in.

``importlib.metadata`` costs a device 3 MB. So it is only loaded if a file of another distribution names the entry point
group.
"""

import logging
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from fanin.edge.codecs import codec, stages
from fanin.edge.codecs.stages import STAGES
from fanin.protos.messages import MAX_CAPABILITIES, MAX_KNOWN_STAGES
from fanin.protos.names import is_name
from fanin.protos.plans.named import installed, passed_names

LOG: Final = logging.getLogger("fanin.edge")


def known_stages() -> tuple[str, ...]:
    """Return the names of the stages: those that were installed when this process first called, as ``announced`` has
    them, and those that a simulation passed.
    """
    return (*_installed_stages(), *passed_names(stages.GROUP))


def known_codecs() -> tuple[str, ...]:
    """Return the names of the codecs. See ``known_stages``."""
    return (*_installed_codecs(), *passed_names(codec.GROUP))


@cache
def _installed_stages() -> tuple[str, ...]:
    return announced("stages", sorted(STAGES), installed_names(stages.GROUP), MAX_KNOWN_STAGES)


@cache
def _installed_codecs() -> tuple[str, ...]:
    return announced("codecs", sorted(codec.FACTORIES), installed_names(codec.GROUP), MAX_CAPABILITIES)


def announced(kind: str, ours: Sequence[str], theirs: Iterable[str], max_names: int) -> tuple[str, ...]:
    """Return the names that a device sends: all of fanin, then others in alphabetical order.

    A warning is logged if more are installed than a check-in may name.

    Args:
        kind: The kind of parts, such as "stages".
        ours: The names of fanin's own.
        theirs: The names of those in other distributions.
        max_names: The number of names that a check-in may have.
    """
    names = (*ours, *sorted(name for name in theirs if is_name(name) and name not in ours))
    announced_names, left_out = names[:max_names], names[max_names:]
    if left_out:
        LOG.warning(
            "%s: got %d installed %s, expected at most %d; %d are not announced to the coordinator, from %r on; "
            "uninstall %s that no run needs",
            kind,
            len(names),
            kind,
            max_names,
            len(left_out),
            left_out[0],
            kind,
        )
    return announced_names


def installed_names(group: str) -> Iterable[str]:
    """Return the names of the entry points of a group that are installed here."""
    return installed(group) if any(_may_have(group, Path(folder)) for folder in sys.path) else ()


def _may_have(group: str, folder: Path) -> bool:
    """Return whether a distribution in a folder of ``sys.path`` may have entry points of a group."""
    if folder.is_file():
        # An archive, which only importlib.metadata can read.
        return True
    files = (each / "entry_points.txt" for each in folder.glob("*-info"))
    return any(f"[{group}]" in file.read_text(errors="replace", encoding="utf-8") for file in files if file.is_file())
