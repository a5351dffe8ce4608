"""Terms, Updates and entropy of secure aggregations for tests. The attempts themselves are those of the benchmark."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from fanin.commands.bench.harness.masked import MaskedAttempt, PlainUpdate, masked_attempt
from fanin.edge.masking.coordinator import Confirming
from fanin.edge.masking.keystream import keystream
from fanin.edge.masking.parameters import MILLION, Assumptions, Threat
from fanin.edge.masking.sharing import Entropy
from fanin.edge.masking.terms import MaskTerms
from fanin.edge.rings import RingVector, smallest_ring

NUM_VALUES: Final = 97
CLIP: Final = 127
"""The clip edge of int8."""


@dataclass(slots=True)
class FixedEntropy:
    """Random bytes that follow from a number. Only tests have such a source: ``serve`` and ``join`` accept none."""

    number: int
    _offset: int = field(default=0)

    def __call__(self, size: int) -> bytes:
        self._offset += size
        return keystream(self.number.to_bytes(32, "little"), self._offset - size, size)


def terms_of(
    num_devices: int,
    threat: Threat = Threat.CURIOUS,
    *,
    adversarial: float = 0.0,
    dropout: float = 0.0,
    max_weight: int = 1,
) -> MaskTerms:
    """Return terms for int8 Updates of ``NUM_VALUES`` values with a tail of two words."""
    return MaskTerms(
        run_id="run",
        lineage=3,
        round=7,
        attempt=1,
        max_devices=num_devices,
        min_survivors=3,
        assumptions=Assumptions(
            threat=threat, adversarial_ppm=round(adversarial * MILLION), dropout_ppm=round(dropout * MILLION)
        ),
        layout=RingVector(ring=smallest_ring(8, num_devices * max_weight), num_values=NUM_VALUES, num_tail=2),
        version_sha256=bytes(range(32)),
        meaning_sha256=bytes(range(32, 64)),
    )


def attempt_of(terms: MaskTerms, num_devices: int, entropy: Entropy | None = None) -> MaskedAttempt:
    """Return an attempt of new devices."""
    return masked_attempt(terms, num_devices, entropy or FixedEntropy(num_devices))


def update_of(index: int, weight: int = 1) -> PlainUpdate:
    """Return the Update of a device: values at both clip edges and between, in pieces of odd sizes."""
    values = np.random.default_rng(index).integers(-CLIP, CLIP + 1, NUM_VALUES, dtype=np.int8)
    values[:20], values[20:40] = (CLIP, -CLIP) if index % 7 else (-CLIP, CLIP)
    return PlainUpdate(pieces=(values[:13], values[13:14], values[14:]), weight=weight, tail=(weight, -index))


def plain_sum(updates: Sequence[PlainUpdate]) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Return the sums of tensors and tails, without masks."""
    values = sum(
        (np.concatenate(each.pieces).astype(np.int64) * each.weight for each in updates),
        np.zeros(NUM_VALUES, np.int64),
    )
    return values, [sum(column) for column in zip(*(each.tail for each in updates), strict=True)]


def check_sum(attempt: MaskedAttempt, updates: Sequence[PlainUpdate]) -> None:
    """Assert that the unmasked sum is the plain one, bit for bit."""
    values, tail = plain_sum(updates)
    assert np.array_equal(attempt.terms.layout.ring.signed(attempt.total), values)
    assert attempt.tail.astype(np.int64).tolist() == tail


def completed(
    attempt: MaskedAttempt,
    make: Callable[[int], PlainUpdate] = update_of,
    *,
    absent: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> MaskedAttempt:
    """Run an attempt and check its sum. ``absent`` devices drop out in the phases 1, 2, 3 and the last one."""
    rng = np.random.default_rng(len(attempt.devices))
    attempt.advertise(_drawn(rng, range(len(attempt.devices)), absent[0]))
    members = attempt.share(_drawn(rng, range(len(attempt.devices)), absent[1])).sharers.members
    phase = attempt.mask(make, _drawn(rng, members, absent[2]))
    if isinstance(phase, Confirming):
        phase = attempt.confirm()
    attempt.unmask(_drawn(rng, phase.survivors.members, absent[3]))
    check_sum(attempt, [make(index) for index in phase.survivors.members])
    return attempt


def later(terms: MaskTerms, *, rounds: int = 0, attempts: int = 0) -> MaskTerms:
    """Return terms of a later Round or attempt."""
    return replace(terms, round=terms.round + rounds, attempt=terms.attempt + attempts)


def _drawn(rng: np.random.Generator, indexes: Sequence[int], count: int) -> set[int]:
    return set(rng.choice(indexes, count, replace=False).tolist())
