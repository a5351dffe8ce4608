"""The basis of a Round: the facts on which both sides of a round protocol agree before its first message."""

from collections.abc import Sequence
from dataclasses import dataclass

from fanin.protos.messages import CodecSpec, PrivacyTerms, Statistic


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
    privacy: PrivacyTerms | None = None
