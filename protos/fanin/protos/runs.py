"""The words of the operator's protocol: Runs and what happens in them; ``control.proto`` says when."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from fanin.protos.messages import BundleRef, Delegation, Version
from fanin.protos.plans import Plan


class RunState(Enum):
    """Whether a Run opens Rounds; FINISHED and FAILED rest until a Version is published to them."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Where a Run stands. ``num_rounds`` counts the Rounds that ended in a Version."""

    run_id: str
    state: RunState
    plan: Plan
    bundle_sha256: str
    version: int
    version_sha256: str
    num_rounds: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRun:
    """A Run to start, under an id that the caller chose, from its Version 0."""

    run_id: str
    plan: Plan
    version: Version
    delegation: Delegation


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionWithBundle:
    """A Version and the Bundle that it fills."""

    version: Version
    bundle: BundleRef


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOpened:
    """Devices can be assigned."""

    round: int
    base_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundClosed:
    """The set of Updates is named; ``accepted`` has the devices in the order of acceptance."""

    round: int
    accepted: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFailed:
    """The Round ended without a Version."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A Version on the devices' validation parts: loss in nats, the rest as shares of the examples."""

    num_examples: int
    loss: float
    accuracy_float: float
    accuracy_int8: float
    int8_agreement: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPublished:
    """A new Version. ``round`` 0: made outside. ``evaluation`` is of the parent, None if nobody validated;
    ``runtimes`` counts the Updates by the runtime that they were made with."""

    number: int
    version_sha256: str
    parent: int
    round: int = 0
    round_s: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    num_saturated: int = 0
    num_rounded: int = 0
    train_loss: float = 0.0
    total_examples: int = 0
    evaluation: Evaluation | None = None
    runtimes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRested:
    """No more Rounds until a Version is published to the Run."""

    state: RunState
    reason: str


RunEvent = RoundOpened | RoundClosed | RoundFailed | VersionPublished | RunRested


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """An event with its place in the Run's record; ``time_s`` since the Unix epoch."""

    sequence: int
    time_s: float
    event: RunEvent
