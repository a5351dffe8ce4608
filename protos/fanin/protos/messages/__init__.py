"""The messages of the device protocol as frozen dataclasses; ``fleet.proto`` specifies when each is sent.

Modules in reading order:

    checkins      enrollment, capabilities, check-in and its answers
    assignments   the Assignment: training, codec and grid of one device in one Round; its training, codec,
                  stages and statistics are sections of the Plan (``fanin.protos.plans``)
    versions      references to Bundles, Versions, delegations, publications
    transfers     downloads and uploads
    reports       telemetry, statistics, giving an Assignment up

Constructors raise InvalidInput for values that are malformed or out of range. The code that uses them checks two kinds
of fields later: lookup keys (``Download.sha256``) and values whose range depends on the Bundle or the Round. Variants
are unions that are consumed by ``match``. ``fanin.protos.convert`` translates messages to the wire and back.
"""

from fanin.protos.messages.assignments import (
    MAX_GRID_EXPONENT,
    MIN_GRID_EXPONENT,
    Assignment,
    StageState,
)
from fanin.protos.messages.checkins import (
    MAX_CAPABILITIES,
    MAX_KNOWN_STAGES,
    OLDEST_PROTOCOL,
    PROTOCOL,
    Assigned,
    Capabilities,
    CheckIn,
    CheckInAnswer,
    Enrollment,
    Rejected,
    RejectReason,
    Wait,
)
from fanin.protos.messages.reports import (
    EVAL_AGREE,
    EVAL_CORRECT_FLOAT,
    EVAL_CORRECT_INT8,
    EVAL_EXAMPLES,
    EVAL_LOSS,
    EVAL_PREDICTIONS,
    EXAMPLES,
    LOSS_UNIT,
    MAX_COUNTS,
    MAX_FAILURE_CHARS,
    MAX_LOSS,
    MAX_SATURATED_SHARE,
    ROUNDED,
    SATURATED,
    TRAIN_LOSS,
    TRAINED,
    Report,
    Statistics,
    Telemetry,
    TrainingProgress,
    check_num_counts,
)
from fanin.protos.messages.transfers import (
    UPDATE_FORMAT,
    Download,
    Piece,
    RoundState,
    UpdateHeader,
    UpdateState,
    UploadReply,
)
from fanin.protos.messages.versions import (
    FIRST_EPOCH,
    UNSEEN,
    BundleRef,
    Delegation,
    Order,
    Publication,
    ServedVersion,
    Version,
)
from fanin.protos.plans import MAX_COUNT, MAX_SUM, CodecSpec, StageSpec, Statistic, Training

__all__ = [
    "EVAL_AGREE",
    "EVAL_CORRECT_FLOAT",
    "EVAL_CORRECT_INT8",
    "EVAL_EXAMPLES",
    "EVAL_LOSS",
    "EVAL_PREDICTIONS",
    "EXAMPLES",
    "FIRST_EPOCH",
    "LOSS_UNIT",
    "MAX_CAPABILITIES",
    "MAX_COUNT",
    "MAX_COUNTS",
    "MAX_FAILURE_CHARS",
    "MAX_GRID_EXPONENT",
    "MAX_KNOWN_STAGES",
    "MAX_LOSS",
    "MAX_SATURATED_SHARE",
    "MAX_SUM",
    "MIN_GRID_EXPONENT",
    "OLDEST_PROTOCOL",
    "PROTOCOL",
    "ROUNDED",
    "SATURATED",
    "TRAINED",
    "TRAIN_LOSS",
    "UNSEEN",
    "UPDATE_FORMAT",
    "Assigned",
    "Assignment",
    "BundleRef",
    "Capabilities",
    "CheckIn",
    "CheckInAnswer",
    "CodecSpec",
    "Delegation",
    "Download",
    "Enrollment",
    "Order",
    "Piece",
    "Publication",
    "RejectReason",
    "Rejected",
    "Report",
    "RoundState",
    "ServedVersion",
    "StageSpec",
    "StageState",
    "Statistic",
    "Statistics",
    "Telemetry",
    "Training",
    "TrainingProgress",
    "UpdateHeader",
    "UpdateState",
    "UploadReply",
    "Version",
    "Wait",
    "check_num_counts",
]
