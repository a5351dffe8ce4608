"""Downloads of Chunks and uploads of Updates. Both resume at an offset after a broken connection."""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Final

from fanin.protos.chunks import MAX_MORE_CHUNKS, Artifact, check_num_chunks
from fanin.protos.errors import InvalidInput
from fanin.protos.fields import Mark, OneOf
from fanin.protos.messages.reports import RangeCounts, Statistics, Telemetry, check_num_counts
from fanin.protos.names import check_name
from fanin.protos.plans import MAX_TIMES

if TYPE_CHECKING:
    from fanin.v1 import fleet_pb2 as pb

UPDATE_FORMAT: Final = 1
MAX_MESSAGE_BYTES: Final = 1 << 20
"""Largest message of a phase, in each direction: the shares of 1,024 devices for 4,096 others fit in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A request for Chunks of a Bundle or a Version.

    Attributes:
        assignment_id: The Assignment's id, or the ``download_id`` of a Publication.
        sha256: The first Chunk.
        offset: Bytes of the first Chunk that the device already has.
        more_sha256: Chunks that follow in the same stream, each from its beginning.
    """

    assignment_id: str
    sha256: str
    offset: int
    more_sha256: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.more_sha256) > MAX_MORE_CHUNKS:
            raise InvalidInput(
                f"download: got {len(self.more_sha256)} more chunks, expected at most {MAX_MORE_CHUNKS}", code="FN-0120"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateHeader:
    """Everything in an Update except the bytes of its payload; the first message of an upload.

    Attributes:
        format: ``UPDATE_FORMAT`` of the device that wrote it.
        assignment_id: The Assignment that it answers.
        run_id: The Run.
        round: The Round's number.
        version_sha256: Digest of the parameters from which the device trained.
        codec: Name of the codec of the payload.
        shifts: For each block, the number of bits by which it is coarser than the grid (num_blocks,).
        payload: Digests and sizes of the encoded values.
        statistics: Sums over the device's examples.
        telemetry: Facts about the work.
        ranges: The ranges of the activations of its Version on some of the device's examples.
    """

    format: int
    assignment_id: str
    run_id: str
    round: int
    version_sha256: str
    codec: str
    shifts: tuple[int, ...]
    payload: Artifact
    statistics: Statistics
    telemetry: Telemetry
    ranges: Annotated[RangeCounts, Mark.SPARSE] = field(default_factory=RangeCounts)

    def __post_init__(self) -> None:
        check_name("update: assignment", self.assignment_id)

    @staticmethod
    def check_message(message: "pb.UpdateHeader") -> None:
        """Raise InvalidInput for too many entries, before a loop over all that a device has sent."""
        check_num_counts(len(message.statistics.counts))
        check_num_chunks(len(message.payload.chunks), message.payload.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive bytes of an Update's payload, which begin at ``offset``."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadRequest:
    """A message of an upload."""

    part: Annotated[UpdateHeader | Piece, OneOf(unknown="upload: got part {}, expected a header or a piece")]


class RoundState(Enum):
    """State of a Round as far as an uploading device needs it."""

    OPEN = "open"
    CLOSED = "closed"


class UpdateState(Enum):
    """State of an Update at the coordinator."""

    RECEIVING = "receiving"
    RECEIVED = "received"
    ACCEPTED = "accepted"
    DISCARDED = "discarded"


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadReply:
    """Progress of an upload. The device sends or resumes the payload from byte ``received_bytes`` on.

    The reply to a Report lacks this number.
    """

    round_state: RoundState
    update_state: UpdateState
    received_bytes: Annotated[int, Mark.LOCAL] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRequest:
    """A device's message of a phase.

    Attributes:
        assignment_id: The Assignment.
        phase: The name of the phase.
        payload: The message; empty in a phase in which devices only wait for the coordinator's message.
        wait_s: Seconds that the device waits for the coordinator's message.
    """

    assignment_id: str
    phase: str
    payload: bytes = b""
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        check_name("exchange: phase", self.phase)
        if len(self.payload) > MAX_MESSAGE_BYTES:
            raise InvalidInput(
                f"exchange: got a message of {len(self.payload)} bytes, expected at most {MAX_MESSAGE_BYTES}",
                code="FN-1603",
            )
        if not 0.0 <= self.wait_s <= MAX_TIMES:
            raise InvalidInput(f"exchange: got wait_s {self.wait_s}, expected 0 to {MAX_TIMES} seconds", code="FN-0145")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeAnswer:
    """The coordinator's message for this device. The same request gets the same one, also after a restart."""

    message: bytes = b""

    def __post_init__(self) -> None:
        if len(self.message) > MAX_MESSAGE_BYTES:
            raise InvalidInput(
                f"exchange: got an answer of {len(self.message)} bytes, expected at most {MAX_MESSAGE_BYTES}",
                code="FN-1603",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePause:
    """The phase has not ended. The device's message is durable; it repeats the call within this window, in seconds."""

    retry_min_s: float
    retry_max_s: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.retry_min_s <= self.retry_max_s <= MAX_TIMES:
            raise InvalidInput(
                f"exchange: got a pause from {self.retry_min_s} to {self.retry_max_s} s, expected a window of at most "
                f"{MAX_TIMES} s",
                code="FN-0145",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeEnd:
    """The Round is over for this device: it has ended, or goes on without it. ``reason`` is for people."""

    reason: str = ""


ExchangeOutcome = ExchangeAnswer | ExchangePause | ExchangeEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeReply:
    """The message with the reply to a device's message of a phase."""

    outcome: Annotated[ExchangeOutcome, OneOf(unknown="exchange reply: got outcome {}, expected answer, pause or end")]
