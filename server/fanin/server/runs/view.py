"""The Run as any replica reads it: one moment of its record.

Only the holder of a Run's lease changes the Run (``course``, ``driver``). A ``RunView`` cannot be changed. It answers
the list, describe, watch and download calls of operators, and check-ins of devices without an Assignment. So a
coordinator answers these for every Run of the record, also for one that another coordinator drives or that cannot be
continued.
"""

import re
from dataclasses import dataclass, field
from typing import Final

from fanin.edge.floors.floor import POLICY_CODES
from fanin.protos.messages import MAX_FAILURES, FailureCount, LiveRound, RunState, Version
from fanin.server.storage.protocols.runs import RunRecords
from fanin.server.storage.records import RunRecord

MAX_SHOWN: Final = 200
"""Characters of a device's reason that are shown to operators."""
_CODE: Final = re.compile(r" \[FN-\d{4}\]\Z", re.ASCII)
"""The code at the end of a device's reason (``protos.errors.coded``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A Run at one moment.

    Attributes:
        record: The Run's record.
        newest: Its newest Version.
    """

    record: RunRecord
    newest: Version

    @property
    def run_id(self) -> str:
        """The Run's id."""
        return self.record.start.run_id

    @property
    def state(self) -> RunState:
        """The Run's state."""
        return self.record.state

    @property
    def bundle_sha256(self) -> str:
        """The digest of the Run's Bundle."""
        return self.record.start.version.bundle_sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """The facts of a Run that only its driver knows. The defaults are those of a Run without a driver in this process.

    Attributes:
        trouble: The obstacle to the Run's progress, other than missing Updates; empty without one.
        round: The Round under way.
    """

    trouble: str = ""
    round: LiveRound = field(default_factory=LiveRound)


def policy_code(reason: str) -> str:
    """Return the code of a device's reason if the device refuses the Run by its policy; empty otherwise.

    A device chooses its reason. With this one it harms only itself: it is selected last.
    """
    code = _code_of(reason)
    return code if code in POLICY_CODES else ""


def _code_of(reason: str) -> str:
    match = _CODE.search(reason)
    return "" if match is None else match.group().strip(" []")


class Failures:
    """Why devices gave up or were refused in a Round, by the text of the reason.

    A device chooses its text. So a text is cut, and texts beyond ``MAX_FAILURES`` are counted with one of the same code
    if there is one, and without a code otherwise.
    """

    def __init__(self) -> None:
        # The newest one is the last one.
        self._counts: dict[str, FailureCount] = {}

    @property
    def newest(self) -> str:
        """The newest reason; empty without one."""
        return next((each.newest for each in reversed(self._counts.values())), "")

    def note(self, text: str) -> None:
        """Count a reason."""
        code = _code_of(text)
        end = f" [{code}]" if code else ""
        newest = text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - len(end)]}{end}"
        key = newest
        if key not in self._counts and len(self._counts) >= MAX_FAILURES - 1:
            # The last place is that of all other reasons.
            key = next((known for known, each in self._counts.items() if each.code == code), "")
            code = code if key else ""
        before = self._counts.pop(key, None)
        self._counts[key] = FailureCount(
            code=code,
            num_times=1 if before is None else before.num_times + 1,
            newest=newest,
            is_mixed=before is not None and (before.is_mixed or before.newest != newest),
        )

    @property
    def num_by_policy(self) -> int:
        """Number of times that a device refused the Run by its policy."""
        return sum(each.num_times for each in self._counts.values() if each.code in POLICY_CODES)

    def counts(self) -> tuple[FailureCount, ...]:
        """Return all reasons, the newest one last."""
        return tuple(self._counts.values())


async def read_view(run_id: str, runs: RunRecords) -> RunView | None:
    """Return a Run in its recorded state, or None without such a Run."""
    record = await runs.run(run_id)
    return None if record is None else RunView(record=record, newest=await runs.newest_version(run_id))
