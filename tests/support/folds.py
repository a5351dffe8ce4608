"""Updates for the fold, as the coordinator hands them over."""

from collections.abc import Iterable

from fanin.edge.codecs.fixed import Integers
from fanin.protos.messages import CodecSpec
from fanin.protos.plans import CODEC_BITS
from fanin.server.aggregation.fold import Contribution


def fresh(weight: int, shifts: tuple[int, ...], codec: CodecSpec, pieces: Iterable[Integers]) -> Contribution:
    """One that was made for the Round it is folded in."""
    return Contribution(
        weights=(weight,) * len(shifts),
        fresh_weights=(weight,) * len(shifts),
        shifts=shifts,
        bits=CODEC_BITS[codec.name],
        max_shift=codec.max_shift,
        counts={},
        pieces=pieces,
    )
