"""Updates for the fold, in the form in which the coordinator passes them."""

from collections.abc import Iterable

from fanin.edge.codecs.fixed import Integers
from fanin.protos.messages import CodecSpec
from fanin.protos.plans import CODEC_BITS
from fanin.server.aggregation.fold import Contribution


def fresh(weight: int, shifts: tuple[int, ...], codec: CodecSpec, pieces: Iterable[Integers]) -> Contribution:
    """Return an Update that is for the Round in which it is folded."""
    return Contribution(
        weights=(weight,) * len(shifts),
        fresh_weights=(weight,) * len(shifts),
        shifts=shifts,
        bits=CODEC_BITS[codec.name],
        max_shift=codec.max_shift,
        counts={},
        pieces=pieces,
    )
