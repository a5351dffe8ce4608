"""The basis of a Round: the facts on which both sides of a round protocol agree before its first message."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fanin.protos.messages import Assignment, CodecSpec, PrivacyTerms, Statistic
from fanin.protos.wire import to_proto
from fanin.v1 import fleet_pb2

OWN_FIELDS: Final = ("assignment_id", "version", "deadline_s", "relay", "state", "progress_s")
"""Fields of an Assignment that differ between the devices of a Round, or do not change what they compute. The basis
has the digest of the Version's parameters and the lineage of the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundBasis:
    """The basis of a Round. The coordinator reads it from its record, a device from its Assignment.

    Attributes:
        run_id: The Run.
        lineage: Number of the Version that no Round published and from which all later ones were computed.
        round: The number of the Round.
        version_sha256: The digest of the parameters of the Version that devices train from (hex).
        max_devices: The most devices of the Round.
        grid: One exponent for each block of the vector.
        codec: How Updates are encoded.
        statistics: The statistics that an Update may have, with their bounds. The first one is ``examples``.
        num_values: Number of values of an Update.
        work_sha256: The digest of what the Assignments of a Round have in common (``OWN_FIELDS``), hex: the same for
            all devices only if they train the same Bundle in the same way.
        privacy: The differential privacy of the Round; None without one.
    """

    run_id: str
    lineage: int
    round: int
    version_sha256: str
    max_devices: int
    grid: tuple[int, ...]
    codec: CodecSpec
    statistics: Sequence[Statistic]
    num_values: int
    work_sha256: str
    privacy: PrivacyTerms | None = None


def basis_of(assignment: Assignment, num_values: int) -> RoundBasis:
    """Return the basis of the Round of an Assignment.

    Args:
        assignment: The Assignment of any device of the Round.
        num_values: Number of values of an Update.
    """
    common = to_proto(assignment, fleet_pb2.Assignment)
    for name in OWN_FIELDS:
        common.ClearField(name)
    return RoundBasis(
        run_id=assignment.run_id,
        lineage=assignment.state.lineage,
        round=assignment.round,
        version_sha256=assignment.version.sha256,
        max_devices=assignment.max_devices,
        grid=assignment.grid,
        codec=assignment.codec,
        statistics=assignment.statistics,
        num_values=num_values,
        work_sha256=hashlib.sha256(common.SerializeToString(deterministic=True)).hexdigest(),
        privacy=assignment.privacy,
    )
