"""The Run as any replica reads it: one moment of its record.

Only the holder of a Run's lease changes the Run (``course``, ``driver``). A ``RunView`` cannot be changed. It answers
the list, describe, watch and download calls of operators, and check-ins of devices without an Assignment. So a
coordinator answers these for every Run of the record, also for one that another coordinator drives or that cannot be
continued.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fanin.protos.messages import RoundPhase, RunState, TrainingProgress, Version
from fanin.server.storage.protocols.runs import RunRecords
from fanin.server.storage.records import RunRecord


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
        phase: The phase of the Round under way, None without one.
        at_work: The devices at work in the open Round, sorted.
        num_gave_up: Devices that gave up in the open Round.
        num_refused: Devices whose Update was refused in the open Round.
        num_waiting: Devices whose check-in waits for work.
        last_failure: The reason of the last device that gave up or was refused in the open Round.
        progress: Returns the last report of progress of a device, None without one.
        left_s: Seconds to the deadline of the open Round, 0.0 if its clock does not run.
    """

    trouble: str = ""
    phase: RoundPhase | None = None
    at_work: tuple[str, ...] = ()
    num_gave_up: int = 0
    num_refused: int = 0
    num_waiting: int = 0
    last_failure: str = ""
    progress: Callable[[str], TrainingProgress | None] = lambda _device: None
    left_s: float = 0.0


async def read_view(run_id: str, runs: RunRecords) -> RunView | None:
    """Return a Run in its recorded state, or None without such a Run."""
    record = await runs.run(run_id)
    return None if record is None else RunView(record=record, newest=await runs.newest_version(run_id))
