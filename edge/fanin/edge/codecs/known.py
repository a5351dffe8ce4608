"""The names of the stages that are installed here, which a device sends with every check-in.

``importlib.metadata`` costs a device 3 MB. So it is only loaded if a file of another distribution names the entry point
group.
"""

import logging
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

from fanin.edge.codecs.stages import GROUP, STAGES
from fanin.protos.messages import MAX_KNOWN_STAGES
from fanin.protos.names import is_name
from fanin.protos.plans.named import installed

LOG: Final = logging.getLogger("fanin.edge")


@cache
def known_stages() -> tuple[str, ...]:
    """Return the names of the stages that were installed when this process first called, as ``announced`` has them."""
    return announced(installed(GROUP) if any(_may_have_stages(Path(folder)) for folder in sys.path) else ())


def announced(installed_names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that a device sends: all stages of fanin, then others in alphabetical order.

    A check-in names at most ``MAX_KNOWN_STAGES``. A warning is logged if more are installed.

    Args:
        installed_names: The names of the stages in other distributions.
    """
    names = (*sorted(STAGES), *sorted(name for name in installed_names if is_name(name) and name not in STAGES))
    announced_names, left_out = names[:MAX_KNOWN_STAGES], names[MAX_KNOWN_STAGES:]
    if left_out:
        LOG.warning(
            "stages: got %d installed stages, expected at most %d; %d are not announced to the coordinator, from %r "
            "on; uninstall stages that no run needs",
            len(names),
            MAX_KNOWN_STAGES,
            len(left_out),
            left_out[0],
        )
    return announced_names


def _may_have_stages(folder: Path) -> bool:
    """Return whether a distribution in a folder of ``sys.path`` may have stages."""
    if folder.is_file():
        # An archive, which only importlib.metadata can read.
        return True
    files = (each / "entry_points.txt" for each in folder.glob("*-info"))
    return any(f"[{GROUP}]" in file.read_text(errors="replace") for file in files if file.is_file())
