"""The words of the device protocol as frozen values; ``fleet.proto`` says when each is sent.

Variants are unions consumed by ``match``. Values check themselves when they are made; what a peer sent
raises InvalidInput there, so a value that exists is well-formed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from fanin.protos.chunks import Artifact
from fanin.protos.errors import InvalidInput
from fanin.protos.names import MAX_NAME_CHARS, check_key, check_name, check_signature

PROTOCOL: Final = 1
"""The number of the device protocol; it rises when an old peer could misunderstand a new one."""
OLDEST_PROTOCOL: Final = 1
UPDATE_FORMAT: Final = 1
MAX_COUNTS: Final = 64
MAX_CAPABILITIES: Final = 16
"""Most codecs, runtimes or graph formats of a device: they are kept for as long as it waits."""
MIN_GRID_EXPONENT: Final = -1000
MAX_GRID_EXPONENT: Final = 1000
"""A step of 2^exponent is then a normal float64 number; a Round's own grid is chosen far within."""
MAX_CODEC_SHIFT: Final = 62
"""More bits would not leave an int64 sum room for anything."""
MAX_EPOCHS: Final = 10_000
"""A device that was asked for more would be at work for weeks: somebody's mistake or malice."""

EXAMPLES: Final = "examples"
TRAIN_LOSS: Final = "train_loss_q16"
ROUNDED: Final = "rounded"
SATURATED: Final = "saturated"
EVAL_EXAMPLES: Final = "eval_examples"
EVAL_LOSS: Final = "eval_loss_q16"
EVAL_PREDICTIONS: Final = "eval_predictions"
"""How many labels were asked for: one an example, or one a place in a sequence."""
EVAL_CORRECT_FLOAT: Final = "eval_correct_float"
EVAL_CORRECT_INT8: Final = "eval_correct_int8"
EVAL_AGREE: Final = "eval_agree"
LOSS_UNIT: Final = 1 << 16
"""Losses are counted in 2^-16 nats, so that their sum is an integer like every other statistic."""
MAX_COUNT: Final = 1 << 40
"""Largest magnitude of one count; a million of them still add up within int64."""


def _check_entries(what: str, entries: tuple[str, ...]) -> None:
    """Raise InvalidInput unless these are a few short, printable names; a runtime's has a space before its version."""
    if len(entries) > MAX_CAPABILITIES:
        raise InvalidInput(f"capabilities: got {len(entries)} {what}, expected at most {MAX_CAPABILITIES}")
    for entry in entries:
        if not 0 < len(entry) <= MAX_NAME_CHARS or not entry.isprintable():
            raise InvalidInput(
                f"capabilities: got {entry[:MAX_NAME_CHARS]!r} among {what}, "
                f"expected 1 to {MAX_NAME_CHARS} printable characters"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a device can do. ``max_download_bytes`` 0 means no limit."""

    codecs: tuple[str, ...]
    runtimes: tuple[str, ...]
    graph_formats: tuple[str, ...]
    max_download_bytes: int = 0

    def __post_init__(self) -> None:
        _check_entries("codecs", self.codecs)
        _check_entries("runtimes", self.runtimes)
        _check_entries("graph_formats", self.graph_formats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrollment:
    """A device's wish to become known."""

    protocol: int
    token: str
    public_key: str

    def __post_init__(self) -> None:
        check_key("enroll", self.public_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion:
    """The Version that a device serves, or a newer one that it refused; ``run_id`` "" before there is one."""

    run_id: str = ""
    number: int = 0

    def __post_init__(self) -> None:
        if self.run_id:
            check_name("served version: run", self.run_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckIn:
    """A device's question for work. With ``served`` the device wants to hear of newer Versions."""

    protocol: int
    capabilities: Capabilities
    wait_s: float
    served: ServedVersion | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.wait_s < float("inf"):
            raise InvalidInput(f"check-in: got wait_s {self.wait_s}, expected a finite number of at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleRef:
    """A Bundle by its manifest; ``manifest.sha256`` is its name."""

    manifest: Artifact
    public_key: str
    signature: bytes

    def __post_init__(self) -> None:
        check_key("bundle", self.public_key)
        check_signature("bundle", self.signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delegation:
    """A publisher's leave for a run key to sign the Versions of one Run."""

    run_id: str
    bundle_sha256: str
    run_public_key: str
    signature: bytes

    def __post_init__(self) -> None:
        check_name("delegation: run", self.run_id)
        check_key("delegation", self.run_public_key)
        check_signature("delegation", self.signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One immutable set of global parameters."""

    run_id: str
    number: int
    parent: int
    bundle_sha256: str
    parameters: Artifact
    public_key: str
    signature: bytes
    delegation: Delegation | None = None

    def __post_init__(self) -> None:
        check_name("version: run", self.run_id)
        check_key("version", self.public_key)
        check_signature("version", self.signature)
        if self.parent >= max(self.number, 1):
            raise InvalidInput(f"version {self.number}: got parent {self.parent}, expected a lower number (0: itself)")

    @property
    def sha256(self) -> str:
        """``version_sha256``: the digest of the canonical parameter bytes."""
        return self.parameters.sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A Version with its Bundle; ``download_id`` lets one device download both."""

    download_id: str
    run_id: str
    bundle: BundleRef
    version: Version

    def __post_init__(self) -> None:
        check_name("publication", self.download_id)
        check_name("publication: run", self.run_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """The codec of a Round's Updates; ``max_shift`` is W, the bits by which a block may be coarser."""

    name: str
    max_shift: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a device does with its data. Seeds come from (seed, partition, round).

    ``proximal_weight`` is FedProx's mu; above 0.0 it needs a Bundle whose train graph has that input. ``batch_size`` is
    what a Plan was written for, and its Bundle must have; 0: whatever that has.
    """

    epochs: int
    learning_rate: float
    seed: int
    proximal_weight: float = 0.0
    batch_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What one device is to do in one Round. ``deadline_s`` is what is left of the Round; 0: no deadline.

    ``grid`` holds one exponent a block: its step is 2^exponent. Blocks are the tensors in name order.
    """

    assignment_id: str
    run_id: str
    round: int
    bundle: BundleRef
    version: Version
    grid: tuple[int, ...]
    codec: CodecSpec
    training: Training
    deadline_s: float = 0.0
    relay: str = ""

    @property
    def publication(self) -> Publication:
        """What the device downloads."""
        return Publication(download_id=self.assignment_id, run_id=self.run_id, bundle=self.bundle, version=self.version)

    def __post_init__(self) -> None:
        check_name("assignment", self.assignment_id)
        check_name("assignment: run", self.run_id)
        for exponent in self.grid:
            if not MIN_GRID_EXPONENT <= exponent <= MAX_GRID_EXPONENT:
                raise InvalidInput(
                    f"assignment: got grid exponent {exponent}, expected {MIN_GRID_EXPONENT} to {MAX_GRID_EXPONENT}"
                )
        if not 0 <= self.codec.max_shift <= MAX_CODEC_SHIFT:
            raise InvalidInput(f"assignment: got max_shift {self.codec.max_shift}, expected 0 to {MAX_CODEC_SHIFT}")
        if not 1 <= self.training.epochs <= MAX_EPOCHS:
            raise InvalidInput(f"assignment: got epochs {self.training.epochs}, expected 1 to {MAX_EPOCHS}")
        if not 0 < self.training.learning_rate < math.inf:
            raise InvalidInput(
                f"assignment: got learning_rate {self.training.learning_rate}, expected a finite number above 0"
            )
        if not 0 <= self.training.proximal_weight < math.inf:
            raise InvalidInput(
                f"assignment: got proximal_weight {self.training.proximal_weight}, expected 0.0 or a positive number"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """There is work."""

    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """There is none; come back within the window, counted from now."""

    retry_min_s: float
    retry_max_s: float
    newest: Publication | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.retry_min_s <= self.retry_max_s < float("inf"):
            raise InvalidInput(
                f"wait: got a window of {self.retry_min_s} to {self.retry_max_s} s, expected it to rise from 0"
            )


class RejectReason(Enum):
    """Why a device cannot take part at all."""

    UPGRADE = "upgrade"
    UNSUITABLE = "unsuitable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """This device cannot take part as it is."""

    reason: RejectReason
    text: str
    newest: Publication | None = None


CheckInAnswer = Assigned | Wait | Rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A Chunk from an offset on, and ``more`` that follow whole, for an Assignment."""

    assignment_id: str
    sha256: str
    offset: int
    more: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Facts about the work, in the clear. They are recorded and added up, so they are bounded like counts."""

    runtime: str = ""
    train_s: float = 0.0
    num_steps: int = 0
    bytes_downloaded: int = 0
    bytes_resumed: int = 0
    fanin_version: str = ""

    def __post_init__(self) -> None:
        longest = max(len(self.runtime), len(self.fanin_version))
        if longest > MAX_NAME_CHARS:
            raise InvalidInput(f"telemetry: got a name of {longest} characters, expected at most {MAX_NAME_CHARS}")
        if not 0 <= self.train_s < float("inf"):
            raise InvalidInput(f"telemetry: got train_s {self.train_s}, expected a finite number of at least 0")
        for name in ("bytes_downloaded", "bytes_resumed"):
            count = getattr(self, name)
            if not 0 <= count <= MAX_COUNT:
                raise InvalidInput(f"telemetry: got {name} {count}, expected at least 0 and at most {MAX_COUNT}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Facts about the data: integer sums that fold like the tensors. Losses are in 2^-16 nats."""

    counts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if len(self.counts) > MAX_COUNTS:
            raise InvalidInput(f"statistics: got {len(self.counts)} counts, expected at most {MAX_COUNTS}")
        for name, count in self.counts.items():
            check_name("statistics", name)
            if abs(count) > MAX_COUNT:
                raise InvalidInput(f"statistics: got {name} = {count}, expected at most {MAX_COUNT} in magnitude")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateHeader:
    """What an Update says of itself before its bytes. ``shifts`` has one entry a block."""

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

    def __post_init__(self) -> None:
        check_name("update: assignment", self.assignment_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes of an Update's payload at an offset."""

    offset: int
    data: bytes


class RoundState(Enum):
    """What a device has to know of its Round."""

    OPEN = "open"
    CLOSED = "closed"


class UpdateState(Enum):
    """What has become of an Update."""

    RECEIVING = "receiving"
    RECEIVED = "received"
    ACCEPTED = "accepted"
    DISCARDED = "discarded"


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadReply:
    """Where an upload stands; ``received_bytes`` is where to go on."""

    round_state: RoundState
    update_state: UpdateState
    received_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An Assignment given up (``failure`` says why), or, with no failure, the question what became of it."""

    assignment_id: str
    failure: str = ""
    telemetry: Telemetry = field(default_factory=Telemetry)
