"""A check of ``fanin doctor`` and its result, and the limit on its duration."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from subprocess import SubprocessError
from typing import Final, TypeVar

from fanin.protos.errors import FaninError

LONGEST_S: Final = 5.0
"""Seconds that one check may take."""
T = TypeVar("T")


class Level(Enum):
    """The outcome of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of a check.

    Attributes:
        check: Name of the check, such as ``port``.
        level: Its outcome. ``SKIP``: it could not be made, because an earlier one failed or an option is missing.
        text: What was seen, and what is wrong.
        fix: The command or the step that corrects it; "" for none. Texts of our errors contain theirs.
        code: The code of the error; "" for none.
    """

    check: str
    level: Level
    text: str
    fix: str = ""
    code: str = ""


def ok(check: str, text: str) -> CheckResult:
    """Return the finding of a check that passed."""
    return CheckResult(check=check, level=Level.OK, text=text)


def warn(check: str, text: str, fix: str = "") -> CheckResult:
    """Return the finding of a check that may be a problem."""
    return CheckResult(check=check, level=Level.WARN, text=text, fix=fix)


def fail(check: str, text: str, fix: str = "", code: str = "") -> CheckResult:
    """Return the finding of a check that failed."""
    return CheckResult(check=check, level=Level.FAIL, text=text, fix=fix, code=code)


def skip(check: str, text: str) -> CheckResult:
    """Return the finding of a check that could not be made."""
    return CheckResult(check=check, level=Level.SKIP, text=text)


def failed(check: str, error: FaninError) -> CheckResult:
    """Return the finding of a check that failed with one of our errors, whose text names the fix."""
    return CheckResult(
        check=check, level=Level.FAIL, text=str(error), fix=f"fanin explain {error.code}", code=error.code
    )


def within(function: Callable[[], T], late: T, seconds: float = LONGEST_S) -> T:
    """Return the result of a function; ``late`` if it does not end in time. It then ends in the background.

    A look-up of a name cannot be interrupted, and may take half a minute.
    """
    results: list[T] = []
    errors: list[OSError | FaninError | SubprocessError] = []

    def run() -> None:
        try:
            results.append(function())
        except (OSError, FaninError, SubprocessError) as exc:
            errors.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return results[0] if results else late
