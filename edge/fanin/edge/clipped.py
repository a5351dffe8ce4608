"""The codec of a Round with differential privacy: it clips the change, and writes the integers of another codec.

It is the last step before the bytes, or before the noise and the masks of a device: a step after it could break the
bound of the norm (``noise.clipping``), and there is none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.codecs.fixed import Encoded, Integers, RunCodec, TwosComplement
from fanin.edge.noise.clipping import ClipGrid, norm_of
from fanin.edge.rings import WIDE
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import CLIP_BITS, EXAMPLES, Assignment, CodecSpec, PrivacyTerms, Statistics, UpdateHeader
from fanin.protos.plans import CENTRAL, PrivacyPlan
from fanin.protos.roles import PARAMETER

NOTED_SLACK: Final = 1.05
"""Factor of the sensitivity from which on a person is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippingCodec:
    """The ``Codec`` of an Assignment with privacy: it clips the change, and writes the integers of another codec.

    Attributes:
        codec: The codec of the Run, whose bytes it writes.
        terms: The terms of the Assignment.
    """

    codec: TwosComplement
    terms: PrivacyTerms
    is_stochastic: bool = True

    @property
    def bits(self) -> int:
        """See ``Codec.bits``."""
        return self.codec.bits

    def encode(
        self, table: TensorTable, update: Float32s, grid: Sequence[int], max_shift: int, rng: np.random.Generator
    ) -> Encoded:
        """Clip an update to the terms, as one vector. All shifts are 0, and nothing is counted.

        A change that is not finite becomes zero: a device that gives up instead would report that its data diverge.

        Raises:
            InvalidInput: The grid or the sensitivity is not that of the terms, a shift is possible, or a tensor is no
                trained parameter.
        """
        clip = ClipGrid.of(self.terms.clip_norm, self.codec.bits, table.num_values)
        if others := [spec.name for spec in table.specs if spec.role != PARAMETER]:
            raise InvalidInput(
                f"assignment: privacy: got the tensor {others[0]!r}, which is no trained parameter without a range, "
                "expected parameters alone; the coordinator must not start such a run",
                code="FN-1684",
            )
        expected = ((clip.exponent,) * len(table.specs), 0, clip.squared_sensitivity)
        if (tuple(grid), max_shift, self.terms.squared_sensitivity) != expected:
            raise InvalidInput(
                f"assignment: privacy: got a sensitivity whose square is {self.terms.squared_sensitivity}, max_shift "
                f"{max_shift} and a grid with the exponents {sorted(set(grid))}, expected {clip.squared_sensitivity}, "
                f"0 and {clip.exponent}, which follow from the clip norm; the coordinator must be corrected",
                code="FN-1685",
            )
        change = update if np.isfinite(update).all() else np.zeros_like(update)
        payload = self.codec.packed(clip.clipped(change, rng))
        bit = 1 if norm_of(change) <= self.terms.clip_norm else -1
        return Encoded(payload=payload, shifts=(0,) * len(table.specs), num_rounded=0, num_saturated=0, clip_bit=bit)

    def decode(self, payload: memoryview) -> Integers:
        """See ``Codec.decode``."""
        return self.codec.decode(payload)


def has_clip_bit(assignment: Assignment) -> bool:
    """Return whether an Update has a clip bit, whose sum the coordinator releases with noise.

    Raises:
        InvalidInput: The bit would be released without noise, or another count with it.
    """
    terms, names = assignment.privacy, tuple(each.name for each in assignment.statistics)
    has_bit = terms is not None and terms.bits_noise > 0
    expected = (EXAMPLES, CLIP_BITS) if has_bit else None
    if (CLIP_BITS in names or has_bit) and (names != expected or terms is None or terms.mechanism != CENTRAL):
        mechanism, noise = ("none", 0.0) if terms is None else (terms.mechanism, terms.bits_noise)
        raise InvalidInput(
            f"assignment: privacy: got bits_noise {noise:g} with the mechanism {mechanism!r} and the counts "
            f"{', '.join(names)}, expected noise with {CENTRAL!r} and the counts {EXAMPLES}, {CLIP_BITS}, or neither "
            "noise nor clip bits; the coordinator must be corrected",
            code="FN-1685",
        )
    return has_bit


def with_clip_bit(assignment: Assignment, header: UpdateHeader, payload: bytes) -> tuple[UpdateHeader, bytes]:
    """Return an Update in the clear as it is sent: its clip bit moves from the counts to the end of the payload.

    Headers stay in the coordinator's record for ever, and payloads are erased after the publication. Without clip bits,
    nothing changes.
    """
    if not has_clip_bit(assignment):
        return header, payload
    counts = header.statistics.counts
    tail = np.array([counts[EXAMPLES], counts[CLIP_BITS]], np.int64)
    sent = payload + WIDE.encode(tail)
    statistics = Statistics(counts=MappingProxyType({EXAMPLES: counts[EXAMPLES]}))
    return replace(header, payload=artifact_of(sent), statistics=statistics), sent


def slack_notes(privacy: PrivacyPlan, codec: CodecSpec, num_values: int) -> tuple[str, ...]:
    """Return a note on what the rounding of a private Run costs, if it is much."""
    if not privacy:
        return ()
    grid = ClipGrid.of(privacy.clip_norm, codec.bits, num_values)
    if grid.slack < NOTED_SLACK:
        return ()
    share = grid.largest * 2.0**grid.exponent / grid.clip_norm
    note = (
        f"codec.name: the sensitivity, and with it the noise, grows by a factor of {grid.slack:.2f}, because "
        f"{codec.name} rounds {num_values} values to steps of 1/{round(grid.clip_norm * 2.0**-grid.exponent)} of the "
        f"clip norm, and cuts values above {min(share, 1.0):.2g} of it; fixed32 has finer steps "
        "(docs/howto/differential-privacy.md#the-codec)"
    )
    return (note,)


def clipping(codec: RunCodec, terms: PrivacyTerms | None) -> RunCodec:
    """Return the codec of an Assignment: one that clips, if it has privacy terms. Raises InvalidInput."""
    if terms is None:
        return codec
    if not isinstance(codec.codec, TwosComplement):
        raise InvalidInput(
            f"assignment: privacy: got the codec {type(codec.codec).__name__}, expected one of fanin, whose integers "
            "have a proven norm; the coordinator must be corrected",
            code="FN-1685",
        )
    return replace(codec, codec=ClippingCodec(codec=codec.codec, terms=terms))
