"""The records that pass through the stores: immutable values, the same for every implementation.

Times are seconds since the Unix epoch. Numbers of Rounds and Versions have up to 63 bits.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Final

from fanin.protos.calls import device_id_of
from fanin.protos.chunks import Artifact
from fanin.protos.messages import (
    COORDINATOR,
    Delegation,
    DeviceCondition,
    LoggedEvent,
    Principal,
    RunState,
    StartRun,
    UpdateHeader,
    Version,
    VersionPublished,
)
from fanin.protos.wire import to_proto
from fanin.v1 import fleet_pb2

OuterState = Mapping[str, Artifact]
"""The tensors of an outer optimizer's state by name, as blobs of little-endian float32."""


@dataclass(frozen=True, kw_only=True)
class EnrolledDevice:
    """An enrolled device: a public key. The id is derived from it."""

    public_key: str

    @cached_property
    def device_id(self) -> str:
        """The device's id."""
        return device_id_of(self.public_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What a coordinator noticed of a device since this was recorded last.

    Attributes:
        seen_at: The time of its last check-in; None: it did not check in.
        runtimes: What it reported in that check-in, as ``fanin_version`` and ``condition``.
        rejection: Why a check-in or an Update of it was refused last; "": none was.
        rejected_at: When.
    """

    seen_at: float | None = None
    runtimes: tuple[str, ...] = ()
    fanin_version: str = ""
    condition: DeviceCondition | None = None
    rejection: str = ""
    rejected_at: float | None = None


def by_name(by: Principal | None) -> str:
    """Return the form of a principal in the audit log. None is the coordinator itself."""
    return COORDINATOR if by is None else str(by)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFact:
    """What an entry records.

    Attributes:
        principal: Who called, in the form of a principal.
        call: The name of the call.
        subject: What it is about.
        outcome: ``done``, ``begun`` or ``refused`` with a code.
    """

    principal: str
    call: str
    subject: str
    outcome: str = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The record of a Run.

    Attributes:
        start: The command that started it.
        state: Its state.
        reason: Why it rests.
        max_rounds: Published Rounds after which it finishes; a command that sets it going adds to those published.
        started_by: The principal that started it, None if that was not recorded.
        reclaimed: The delegation with which its publisher reclaimed it last, None if it never did.
        restored_at_s: When it was restored from a backup, None unless it waits for its publisher since then.
        started_at_s: Wall time at which it started.
    """

    start: StartRun
    state: RunState
    reason: str
    max_rounds: int
    started_by: Principal | None = None
    reclaimed: Delegation | None = None
    restored_at_s: float | None = None
    started_at_s: float = 0.0

    @property
    def delegation(self) -> Delegation:
        """The publisher's permission for the key that signs the Versions now. It has the Run's epoch."""
        return self.reclaimed or self.start.delegation


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right of one driver to write the record of a Run.

    Attributes:
        run_id: The Run.
        epoch: The number of the lease, from 1. A higher epoch supersedes all lower ones.
        holder: The process that took the lease, for operators: host name and process id.
    """

    run_id: str
    epoch: int
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRanges:
    """The ranges of activations that the coordinator measured for the Version of a Round, on a data set.

    Another library or processor may compute other bits in float. So the result is recorded before the Version is, and
    is then a fact like the set of Updates.

    Attributes:
        data: The name of the data set in the Plan.
        data_sha256: The digest of its file. Empty if nothing was measured, or if there is no file.
        num_examples: The number of examples that were run.
        runtime: The inference libraries and their versions.
        values: Low and high of each activation as little-endian float32, NaN for an activation that was not measured.
            Empty if nothing was measured.
        problem: Why nothing was measured. Empty if something was.
    """

    data: str
    data_sha256: str = ""
    num_examples: int = 0
    runtime: str = ""
    values: bytes = b""
    problem: str = ""


class RoundMark(Enum):
    """The durable state of a Round. The phases of the round machine (``protocols.phases``) are finer."""

    OPEN = "open"
    CLOSED = "closed"
    PUBLISHED = "published"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether the Round has ended. Then its record never changes."""
        return self in (RoundMark.PUBLISHED, RoundMark.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What the event of a Round without a quorum says.

    Attributes:
        cause: The known obstacle to the devices' Updates; "" if unknown. The reason of the failure ends with it.
        others_wait: Whether enough other devices wait for a quorum.
    """

    cause: str = ""
    others_wait: bool = False


UNKNOWN_SHORTAGE: Final = Shortage()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgottenSet:
    """What is left of the set of a Round whose Updates retention removed.

    Attributes:
        num_updates: Its Updates.
        sha256: Its digest (``set_sha256``). A backup from before the removal has the set itself.
    """

    num_updates: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """The record of a Round.

    Attributes:
        run_id: The Run.
        round: The number of the Round.
        base_version: The number of the Version that devices train from.
        grid: An exponent for each block.
        mark: The durable state.
        opened_at_s: Wall time at which the Round was opened.
        deadline_at_s: Wall time of the deadline. None until a quorum of devices takes part, and while the Run is
            paused.
        left_s: Seconds to the deadline when the Run was paused.
        deadline_rosters: The number of rosters that were frozen before the phase of the deadline.
        accepted: The devices of the set, in the order of their commits.
        next_grid: The grid of the next Round.
        measured: The ranges of its Version on a data set of the coordinator. None before they are measured, and for a
            Plan that does not ask for them.
        forgotten: What is left of the set after retention removed its rows; then ``accepted`` is empty. None before.
    """

    run_id: str
    round: int
    base_version: int
    grid: tuple[int, ...]
    mark: RoundMark
    opened_at_s: float
    deadline_at_s: float | None = None
    left_s: float | None = None
    deadline_rosters: int = 0
    accepted: tuple[str, ...] = ()
    next_grid: tuple[int, ...] = ()
    measured: MeasuredRanges | None = None
    forgotten: ForgottenSet | None = None

    @property
    def num_accepted(self) -> int:
        """The number of Updates in the set."""
        return len(self.accepted) if self.forgotten is None else self.forgotten.num_updates


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMessage:
    """A device's message of a phase of a Round."""

    round: int
    phase: str
    device_id: str
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The devices whose messages of a phase count, in the order of their commits. It never changes."""

    phase: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedUpdate:
    """A committed Update.

    Attributes:
        device_id: The device that made it.
        round: The Round that folds it.
        header: Its header. ``header.round`` is the Round of its Assignment: the same, or an earlier one if the Plan
            allows staleness.
        header_proto: The form of the header in the record and, in size, on the wire (``recorded_header``).
    """

    device_id: str
    round: int
    header: UpdateHeader
    header_proto: bytes


def set_sha256(updates: Sequence[CommittedUpdate]) -> str:
    """Return the digest of the set of a Round, in the order of the commits.

    For each Update: the length of the device's id, the id, the length of the recorded header, the header. Lengths are
    four bytes, little-endian.
    """
    digest = hashlib.sha256()
    for each in updates:
        for part in (each.device_id.encode(), each.header_proto):
            digest.update(len(part).to_bytes(4, "little") + part)
    return digest.hexdigest()


def recorded_header(header: UpdateHeader) -> bytes:
    """Return the form of a header in the record: its canonical bytes as a message of the wire."""
    return to_proto(header, fleet_pb2.UpdateHeader).SerializeToString(deterministic=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSummary:
    """A Round, the number of its committed Updates, and the number of its Version, 0 without one."""

    record: RoundRecord
    num_updates: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedEntry:
    """An event among those of all Runs.

    Attributes:
        position: Increases with each event of the coordinator. It orders events and marks a place in a list. Another
            folder, and a restored one, has other positions.
        run_id: The Run.
        logged: The event.
    """

    position: int
    run_id: str
    logged: LoggedEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """A Version, the Round that published it (0 for one from outside), and the event of its publication.

    Version 0 has no event.
    """

    version: Version
    round: int
    published: VersionPublished | None
    time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributors:
    """The numbers of Updates and of their devices in the Versions of a Run."""

    num_updates: int
    num_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """A Version from outside that becomes the newest one. Its event has the number of Rounds to open from it."""

    version: Version
    event: VersionPublished
