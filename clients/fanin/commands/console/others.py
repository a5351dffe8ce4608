"""Subcommands of other packages: functions ``(argv) -> exit status``, by the entry point group ``fanin.commands``.

Each error of such a package becomes one line that names the package. The search for entry points costs a device 3 MB,
so it runs only when it is needed.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Final

from fanin.commands.console.usage import WrongUsage
from fanin.protos.errors import FaninError, InvalidInput, foreign_text

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "fanin.commands"
MAX_STATUS: Final = 255
"""The largest exit status of a process."""


def other_commands() -> "Mapping[str, EntryPoint]":
    """Return the subcommands of other packages by name."""
    from fanin.protos.plans.named import installed

    return installed(GROUP)


def load_other(entry: "EntryPoint") -> Callable[[Sequence[str]], int]:
    """Return the function of a subcommand. It raises WrongUsage, FaninError and OSError.

    Raises:
        InvalidInput: Two packages have the subcommand, or it cannot be imported, or it is no function.
    """
    from fanin.protos.plans.keys import shown
    from fanin.protos.plans.named import check_single

    check_single("subcommand", entry.name, GROUP)
    package = entry.dist.name if entry.dist else entry.value
    try:
        function = entry.load()
    except Exception as exc:  # Any error: the code comes from another package.
        raise InvalidInput(
            f"{entry.value} cannot be imported from the package {package} ({foreign_text(exc)}); repair that package",
            code="FN-1040",
        ) from exc
    if not callable(function):
        raise InvalidInput(
            f"{entry.value} of the package {package} is {type(function).__name__}, expected a function "
            "(argv) -> exit status; correct that package",
            code="FN-1040",
        )

    def run(argv: Sequence[str]) -> int:
        try:
            status = function(argv)
        except (WrongUsage, FaninError, OSError):
            raise
        except Exception as exc:  # Any error: the code comes from another package.
            frame = extract_tb(exc.__traceback__)[-1]
            raise InvalidInput(
                f"the package {package} raised {foreign_text(exc)} ({Path(frame.filename).name}, line {frame.lineno}); "
                "correct that package",
                code="FN-1040",
            ) from exc
        if not isinstance(status, int) or not 0 <= status <= MAX_STATUS:
            raise InvalidInput(
                f"the package {package} returned {shown(status)}, expected an exit status "
                f"from 0 to {MAX_STATUS}; correct that package",
                code="FN-1040",
            )
        return status

    return run
