"""The names of the stages that are installed here, which a device sends with every check-in.

``importlib.metadata`` costs a device 3 MB. So it is only loaded if a file of another distribution names the entry point
group.
"""

import sys
from functools import cache
from pathlib import Path

from fanin.edge.codecs.stages import GROUP, STAGES
from fanin.protos.names import is_name
from fanin.protos.plans.named import installed


@cache
def known_stages() -> tuple[str, ...]:
    """Return the names of all stages that were installed when this process first asked, ours first."""
    theirs = installed(GROUP) if any(_may_have_stages(Path(folder)) for folder in sys.path) else ()
    return (*sorted(STAGES), *sorted(name for name in theirs if is_name(name) and name not in STAGES))


def _may_have_stages(folder: Path) -> bool:
    """Return whether a distribution in a folder of ``sys.path`` may have stages."""
    if folder.is_file():
        # An archive, which only importlib.metadata can read.
        return True
    files = (each / "entry_points.txt" for each in folder.glob("*-info"))
    return any(f"[{GROUP}]" in file.read_text(errors="replace") for file in files if file.is_file())
