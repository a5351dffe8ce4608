"""A Run and its Rounds as the operator's protocol shows them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from fanin.protos.errors import InvalidInput
from fanin.protos.messages.audit import SpentPrivacy
from fanin.protos.messages.commands import check_rounds, check_version_number
from fanin.protos.messages.evaluations import VersionEvaluation
from fanin.protos.messages.principals import Principal
from fanin.protos.messages.reports import TrainingProgress
from fanin.protos.messages.versions import BundleRef, Delegation, Version
from fanin.protos.names import check_name
from fanin.protos.plans import Plan

if TYPE_CHECKING:
    from fanin.v1 import control_pb2 as pb

MAX_DESCRIBED_ROUNDS: Final = 1000
"""Most Rounds in one description. They travel in one message."""
MAX_PAGE_RUNS: Final = 100
"""Runs on one page of the list of Runs. Each takes a few queries."""
MAX_PAGE_BYTES: Final = 2 << 20
"""Size of a page with several Runs, devices or audit entries. A Plan may have a megabyte, and a message 4."""
MAX_WARNINGS: Final = 50
"""Most warnings of a Run. Devices cause some of them, and one message holds all of them."""
MAX_PAGE_DEVICES: Final = 10_000
"""Devices on one page of a Round's accepted devices."""
MAX_LIVE_DEVICES: Final = 100
"""Devices at work that a message names: enough to look for one. A cohort of a million would not fit."""
MAX_FAILURES: Final = 20
"""Reasons of devices in one message. A device chooses its code."""
MAX_SATURATED_DEVICES: Final = 50
"""Devices with many saturated values that an event names."""


class RunState(Enum):
    """State of a Run. Only a RUNNING one opens Rounds.

    A PAUSED Run keeps its open Round. A Run in one of the other states rests until an operator resumes it or publishes
    a Version.
    """

    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_live(self) -> bool:
        """Whether the Run can have an open Round."""
        return self in (RunState.RUNNING, RunState.PAUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Summary of a Run.

    Attributes:
        run_id: The Run.
        state: Its state.
        plan: Its Plan. None if the record of the Run is damaged; ``reason`` says so, and the rest is empty.
        bundle_sha256: Its Bundle.
        version: Number of the newest Version.
        epoch: Its epoch.
        version_sha256: Digest of the newest Version's parameters.
        num_rounds: Rounds that ended in a Version.
        max_rounds: Value of ``num_rounds`` at which the Run finishes. A command for more Rounds raises it.
        reason: Reason why the Run rests, or the condition that it waits for other than devices.
        started_by: The principal that started the Run. None for a Run from before this was recorded.
        newest_evaluation: The evaluation of the newest Version that was evaluated on held-out data, None without one.
        best_evaluation: The best of these evaluations by the Plan's ``evaluation.best``, None without one.
        waits_for_publisher: Whether it was restored from a backup and its publisher did not reclaim it since.
        privacy: What all Runs of its population have spent, None without a mechanism of privacy.
    """

    run_id: str
    state: RunState
    plan: Plan | None = None
    bundle_sha256: str = ""
    version: int = 0
    epoch: int = 0
    version_sha256: str = ""
    num_rounds: int = 0
    max_rounds: int = 0
    reason: str = ""
    started_by: Principal | None = None
    newest_evaluation: VersionEvaluation | None = None
    best_evaluation: VersionEvaluation | None = None
    waits_for_publisher: bool = False
    privacy: SpentPrivacy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunQuery:
    """A selection of Runs.

    Attributes:
        after: The Run after which the page begins, "" for the first page.
        states: Only Runs in these states; empty: in any.
        newest_first: Whether the newest Run is first instead of the oldest.
        limit: At most so many Runs; 0: as many as a page has.
    """

    after: str = ""
    states: tuple[RunState, ...] = ()
    newest_first: bool = False
    limit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRuns:
    """One page of the Runs of a query. ``num_runs`` counts those from this page on, whatever its limit."""

    num_runs: int
    runs: tuple[RunInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundInfo:
    """Summary of one Round.

    Attributes:
        round: The Round's number.
        base_version: Number of the Version from which it started.
        phase: The name of its phase (``fanin.server.protocols.phases``). Other protocols have others.
        num_updates: Updates that are committed to it.
        opened_at: Seconds since the Unix epoch.
        version: Number of the Version that it published; 0 if there is none (yet).
    """

    round: int
    base_version: int
    phase: str
    num_updates: int
    opened_at: float
    version: int = 0

    def __post_init__(self) -> None:
        check_name("round: phase", self.phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWarned:
    """Something that an operator should look at. The Run continues.

    Attributes:
        code: The kind, for programs.
        subject: What it is about, such as two device ids; "" for the Run. A Run records each code and subject once.
        text: The text for operators.
        is_over: Whether the cause has ended. The warning then is no longer among those of the Run.
    """

    code: str
    subject: str = ""
    text: str
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturatedDevices:
    """Devices whose Updates lost more than ``MAX_SATURATED_SHARE`` of their values at the ends of the grid's range.

    Attributes:
        num_devices: Number of these devices.
        num_values: The number of such values by device: those of the ``MAX_SATURATED_DEVICES`` with the most.
    """

    num_devices: int = 0
    num_values: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @staticmethod
    def of_message(*, num_devices: int, num_values: Mapping[str, int]) -> "SaturatedDevices":
        """Return the record of a message, whose map has no order."""
        return replace(saturated_devices(num_values), num_devices=num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How much of the population a Round covers. It counts devices: only the sum of their examples is known.

    Attributes:
        num_devices: Devices whose Updates count.
        num_enrolled: Devices that were enrolled.
        required: For each entry of the Plan's ``participants.required``, the devices of the Round that it names.
    """

    num_devices: int = 0
    num_enrolled: int = 0
    required: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


def check_described_rounds(rounds: int) -> None:
    """Raise InvalidInput for more Rounds than one description has."""
    if rounds > MAX_DESCRIBED_ROUNDS:
        raise InvalidInput(f"describe: got {rounds} rounds, expected at most {MAX_DESCRIBED_ROUNDS}", code="FN-0150")


def saturated_devices(num_values: Mapping[str, int]) -> SaturatedDevices:
    """Return the record of these devices. ``num_values`` is the number of saturated values of each."""
    most = sorted(num_values.items(), key=lambda item: (-item[1], item[0]))[:MAX_SATURATED_DEVICES]
    return SaturatedDevices(num_devices=len(num_values), num_values=MappingProxyType(dict(most)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCount:
    """The devices that gave up or were refused for one reason.

    Attributes:
        code: The code of the reason. Empty for reasons without one, and for those beyond ``MAX_FAILURES``.
        num_times: How often it was the reason.
        newest: The text, with its code; of several reasons the newest one.
        is_mixed: Whether other texts are counted with it, because there are more than ``MAX_FAILURES``.
    """

    code: str
    num_times: int
    newest: str
    is_mixed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadProgress:
    """How far an upload is."""

    received_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRound:
    """The Round under way and the devices that work for it: what changes without an event.

    Attributes:
        round: Its number; 0 if no Round is under way, and the other fields have their defaults.
        phase: The name of its phase; empty without a Round.
        num_at_work: Devices with an Assignment in it.
        at_work: Ids of ``MAX_LIVE_DEVICES`` of them, sorted.
        deadline_s: Seconds left until its deadline; 0 if its clock does not run.
        num_waiting: Devices whose check-in waits for work at this coordinator.
        num_gave_up: Devices that gave up an Assignment of it.
        num_refused: Devices whose Update for it was refused.
        failures: Why they did, by the code of the reason. The newest reason is the last one.
        progress: The last report of each device in ``at_work`` that reports progress.
        uploads: The uploads under way, of at most ``MAX_LIVE_DEVICES`` devices.
        trouble: The obstacle to its progress, other than missing Updates; empty without one.
    """

    round: int = 0
    phase: str = ""
    num_at_work: int = 0
    at_work: tuple[str, ...] = ()
    deadline_s: float = 0.0
    num_waiting: int = 0
    num_gave_up: int = 0
    num_refused: int = 0
    failures: tuple[FailureCount, ...] = ()
    progress: Mapping[str, TrainingProgress] = field(default_factory=lambda: MappingProxyType({}))
    uploads: Mapping[str, UploadProgress] = field(default_factory=lambda: MappingProxyType({}))
    trouble: str = ""

    @property
    def last_failure(self) -> str:
        """The reason of the last device that gave up or was refused; empty without one."""
        return self.failures[-1].newest if self.failures else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReport:
    """The disk of a coordinator's folder.

    Attributes:
        free_bytes: Bytes that the coordinator may still write.
        used_bytes: Bytes of the files in the folder.
        bytes_per_day: Growth of the folder over the last days; None before two hours have passed.
        days_left: Days until the disk is full at this growth; None if the folder does not grow.
    """

    free_bytes: int
    used_bytes: int
    bytes_per_day: float | None = None
    days_left: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    """A Run with its latest Rounds and some of the devices that work in it.

    Attributes:
        run: Summary of the Run.
        rounds: The latest Rounds, newest first.
        grid: Grid of the newest Round (num_blocks,).
        live: The Round under way.
        num_devices: Devices that are enrolled at this coordinator.
        warnings: The warnings of the Run, oldest first.
        saturated: Devices with many saturated values in the Round that published the newest Version.
        num_digest_only: Versions that cannot be recomputed, because retention removed Updates.
        num_without_parameters: Versions whose parameters retention removed.
        coverage: The coverage of that Round; None if no Round published it.
        disk: The disk of the coordinator; None before it is measured.
    """

    run: RunInfo
    rounds: tuple[RoundInfo, ...]
    grid: tuple[int, ...]
    num_devices: int
    live: LiveRound = field(default_factory=LiveRound)
    warnings: tuple[RunWarned, ...] = ()
    saturated: SaturatedDevices = field(default_factory=SaturatedDevices)
    num_digest_only: int = 0
    num_without_parameters: int = 0
    coverage: Coverage | None = None
    disk: DiskReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRun:
    """A request to start a Run from its Version 0, under an id that the caller chose."""

    run_id: str
    plan: Plan
    version: Version
    delegation: Delegation


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """A request of a Run's publisher to begin the next epoch of the Run with a new run key.

    Attributes:
        delegation: The publisher's permission for the new run key.
        version: The Version with which the epoch begins, signed by the publisher itself.
        adopted_number: The Version of the Run that has the same parameters.
        rounds: Rounds to run from it; 0 for those that were left.
    """

    delegation: Delegation
    version: Version
    adopted_number: int
    rounds: int = 0

    def __post_init__(self) -> None:
        check_rounds(self.rounds)
        if self.version.delegation is not None:
            raise InvalidInput(
                "reclaim: got a version of a run key, expected one that the publisher signed itself", code="FN-0607"
            )
        if (self.version.run_id, self.version.epoch) != (self.delegation.run_id, self.delegation.epoch):
            raise InvalidInput(
                f"reclaim: got a version of run {self.version.run_id}, epoch {self.version.epoch}, expected run "
                f"{self.delegation.run_id}, epoch {self.delegation.epoch}, of the delegation",
                code="FN-0607",
            )

    @staticmethod
    def check_message(message: "pb.ReclaimRunRequest") -> None:
        """Raise NotFound for a Version that no Run can have."""
        check_version_number(message.version.run_id, message.adopted_number)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionWithBundle:
    """A Version and the Bundle whose graphs it fills."""

    version: Version
    bundle: BundleRef


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedDevices:
    """One page of the devices whose Updates a Round accepted, in the order of acceptance.

    ``num_accepted`` counts all accepted Updates of the Round.
    """

    num_accepted: int
    device_ids: tuple[str, ...]
