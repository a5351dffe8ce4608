"""Enrollment and check-ins: how a device registers and asks for work, and the coordinator's answers."""

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final

from fanin.protos.errors import InvalidInput
from fanin.protos.fields import Mark, OneOf, Otherwise
from fanin.protos.messages.assignments import Assignment
from fanin.protos.messages.devices import DeviceCondition
from fanin.protos.messages.versions import Publication, ServedVersion
from fanin.protos.names import MAX_NAME_CHARS, check_key, check_text_line
from fanin.protos.plans import Training

PROTOCOL: Final = 1
"""Number of the device protocol. It increases when an old peer could misunderstand a new one."""
OLDEST_PROTOCOL: Final = 1
MAX_CAPABILITIES: Final = 16
"""Most codecs, runtimes or graph formats of a device. The coordinator holds them in memory while the device waits."""
MAX_KNOWN_STAGES: Final = 64
"""Most stages of a device. There are more than of the others, because packages of other authors add stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities of a device: codecs, runtimes, graph formats, stages, whether it reports progress, and protocols.

    ``round_protocols`` are those besides the plain one.

    ``max_download_bytes`` 0 means no limit.
    """

    codecs: tuple[str, ...]
    runtimes: tuple[str, ...]
    graph_formats: tuple[str, ...]
    max_download_bytes: int = 0
    stages: tuple[str, ...] = ()
    reports_progress: bool = False
    round_protocols: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_entries("codecs", self.codecs, MAX_CAPABILITIES)
        _check_entries("runtimes", self.runtimes, MAX_CAPABILITIES)
        _check_entries("graph_formats", self.graph_formats, MAX_CAPABILITIES)
        _check_entries("stages", self.stages, MAX_KNOWN_STAGES)
        _check_entries("round_protocols", self.round_protocols, MAX_CAPABILITIES)


def _check_entries(what: str, entries: tuple[str, ...], max_entries: int) -> None:
    """Raise InvalidInput unless these are short, printable names, and not too many.

    Spaces are allowed: a runtime's name is followed by its version.
    """
    if len(entries) > max_entries:
        raise InvalidInput(f"capabilities: got {len(entries)} {what}, expected at most {max_entries}", code="FN-0140")
    for entry in entries:
        if not 0 < len(entry) <= MAX_NAME_CHARS or not entry.isprintable():
            raise InvalidInput(
                f"capabilities: got {entry[:MAX_NAME_CHARS]!r} among {what}, "
                f"expected 1 to {MAX_NAME_CHARS} printable characters",
                code="FN-0140",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrollment:
    """A device's request to be registered under its public key."""

    protocol: int
    token: str
    public_key: Annotated[str, Mark.HEXADECIMAL]

    def __post_init__(self) -> None:
        check_key("enroll", self.public_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckIn:
    """A device's request for work.

    Attributes:
        protocol: The device's protocol number.
        capabilities: What the device can run and encode.
        wait_s: Seconds that the device waits for an answer.
        served: The Version that the device serves. If it is set, the answer announces a newer one.
        condition: Battery and network, for the record; None if the device keeps them back.
        fanin_version: The version of fanin; "" for another program.
        awaits_end: Whether the device wants to know when the Run of the served Version has finished.
    """

    protocol: int
    capabilities: Capabilities
    wait_s: float
    served: ServedVersion | None = None
    condition: DeviceCondition | None = None
    fanin_version: str = ""
    awaits_end: bool = False

    def __post_init__(self) -> None:
        if self.fanin_version:
            check_text_line("check-in: fanin_version", self.fanin_version, MAX_NAME_CHARS)
        if not 0 <= self.wait_s < float("inf"):
            raise InvalidInput(
                f"check-in: got wait_s {self.wait_s}, expected a finite number of at least 0", code="FN-0145"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """Answer to a check-in: the device has work."""

    assignment: Annotated[Assignment, Mark.WHOLE]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Answer to a check-in: no work now. The device checks in again within the window, in seconds from now."""

    retry_min_s: float
    retry_max_s: float
    newest: Annotated[Publication | None, Mark.BESIDE] = None
    finished: Annotated[Training | None, Mark.BESIDE] = None

    def __post_init__(self) -> None:
        if not 0 <= self.retry_min_s <= self.retry_max_s < float("inf"):
            raise InvalidInput(
                f"wait: got a window of {self.retry_min_s} to {self.retry_max_s} s, "
                "expected 0 <= retry_min_s <= retry_max_s < infinity",
                code="FN-0145",
            )


class RejectReason(Enum):
    """Reason why a device cannot take part."""

    UPGRADE = "upgrade"
    UNSUITABLE = "unsuitable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Answer to a check-in: the device cannot take part with this protocol or these capabilities."""

    # A reason of a newer coordinator is still a rejection, and its text explains it.
    reason: Annotated[RejectReason, Otherwise(member=RejectReason.UNSUITABLE)]
    text: str
    newest: Annotated[Publication | None, Mark.BESIDE] = None
    finished: Annotated[Training | None, Mark.BESIDE] = None


CheckInAnswer = Assigned | Wait | Rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckInReply:
    """The message with the answer to a check-in."""

    answer: Annotated[
        CheckInAnswer, OneOf(unknown="check-in reply: got answer {}, expected assigned, wait or rejected")
    ]
