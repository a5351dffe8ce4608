"""The messages of the operator's protocol as frozen dataclasses; ``control.proto`` specifies when each is sent.

Modules in reading order:

    principals who made a call
    evaluations of Versions, by the coordinator
    runs       Runs, Rounds, and how they are described
    commands   pause, resume, stop, adopt
    events     the event log of a Run

``fanin.protos.convert_control`` translates them to the wire and back.
"""

from fanin.protos.control.commands import Adopt, Command, Pause, Resume, Stop
from fanin.protos.control.evaluations import MAX_PAGE_EVALUATIONS, VersionEvaluation
from fanin.protos.control.events import (
    MAX_LISTED_DEVICES,
    DevicesGone,
    DeviceSpread,
    Evaluation,
    LoggedEvent,
    RoundClosed,
    RoundFailed,
    RoundOpened,
    RunEvent,
    RunRested,
    RunResumed,
    VersionPublished,
    devices_gone,
    round_closed,
)
from fanin.protos.control.principals import Principal, PrincipalKind
from fanin.protos.control.runs import (
    MAX_DESCRIBED_ROUNDS,
    MAX_PAGE_DEVICES,
    MAX_PAGE_RUNS,
    MAX_PAGE_RUNS_BYTES,
    MAX_SATURATED_DEVICES,
    MAX_WARNINGS,
    AcceptedDevices,
    ListedRuns,
    Reclaim,
    RoundInfo,
    RoundPhase,
    RunDescription,
    RunInfo,
    RunState,
    RunWarned,
    SaturatedDevices,
    StartRun,
    VersionWithBundle,
    saturated_devices,
)
from fanin.protos.names import MAX_NUMBER

__all__ = [
    "MAX_DESCRIBED_ROUNDS",
    "MAX_LISTED_DEVICES",
    "MAX_NUMBER",
    "MAX_PAGE_DEVICES",
    "MAX_PAGE_EVALUATIONS",
    "MAX_PAGE_RUNS",
    "MAX_PAGE_RUNS_BYTES",
    "MAX_SATURATED_DEVICES",
    "MAX_WARNINGS",
    "AcceptedDevices",
    "Adopt",
    "Command",
    "DeviceSpread",
    "DevicesGone",
    "Evaluation",
    "ListedRuns",
    "LoggedEvent",
    "Pause",
    "Principal",
    "PrincipalKind",
    "Reclaim",
    "Resume",
    "RoundClosed",
    "RoundFailed",
    "RoundInfo",
    "RoundOpened",
    "RoundPhase",
    "RunDescription",
    "RunEvent",
    "RunInfo",
    "RunRested",
    "RunResumed",
    "RunState",
    "RunWarned",
    "SaturatedDevices",
    "StartRun",
    "Stop",
    "VersionEvaluation",
    "VersionPublished",
    "VersionWithBundle",
    "devices_gone",
    "round_closed",
    "saturated_devices",
]
