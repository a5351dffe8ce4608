"""The noise of a Run: the terms of its devices, the check of an Update, and what the fold adds to the sum of a Round.

    device        clips, rounds to the public grid               integers q, q_1^2 + ... + q_d^2 <= S^2
    coordinator   checks the same sum of squares                 before the Update is committed
    fold          sum of q over the closed set + noise           noise: discrete Gaussian, sigma^2 = z^2 S^2
    outer step    divides by a fixed number of the Plan          post-processing from here on

The noise is a pure function of (seed, position): every restart and every slice of the fold gives the same bits. A seed
of a Round is 32 bytes of a CSPRNG, recorded before a byte that derives from it leaves the driver.

With noise on devices (``SharedNoise``), the coordinator draws nothing: the unmasked sum has the noise.

The sum with central noise is one of integers modulo 2^b, for the smallest whole number of bytes that holds the sum of
the Updates and the noise, which is larger with a probability below 2^-128. It is stored with the Version: what follows
is a function of it, so a Version can be verified after its seed and its Updates were erased.

With an adaptive clip norm (``edge.noise.adaptive``), each Round has a norm of its own, a function of its base Version:
that of the Plan, or the one in the record of the Version.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fanin.edge.codecs.fixed import AnyCodec, decoded_pieces
from fanin.edge.noise.adaptive import BIT_SENSITIVITY, bits_parameter, next_norm, squared_multiplier
from fanin.edge.noise.clipping import ClipGrid, Signed, squared_norm
from fanin.edge.noise.distributions import DiscreteGaussian, draw, reach
from fanin.edge.noise.loss import total
from fanin.edge.noise.shares import WRAP_BITS, NoiseShare, share_of
from fanin.edge.noise.streams import SEED_BYTES
from fanin.edge.rings import Adjustment, Ring, RingVector
from fanin.edge.tensors import Int64s
from fanin.protos.chunks import Artifact
from fanin.protos.errors import Corrupted, InvalidUpdate
from fanin.protos.messages import CLIP_BITS, EXAMPLES, PrivacyTerms, UpdateHeader
from fanin.protos.plans import Plan
from fanin.server.privacy.releases import NoisedSum, PlainRelease, SampledRelease
from fanin.server.protocols.machine import RoundProtocol
from fanin.server.storage.records import OuterState

VECTOR: Final = b"fanin round noise v1 parameters"
"""The vector of a Round that its noise is for. Another vector of the Round would have another name."""
NOISED_SUM: Final = "noised_sum"
"""The name of the stored sum, beside the tensors of the outer state."""
BITS: Final = b"fanin round noise v1 clip bits"
"""The sum of the clip bits of a Round, as ``VECTOR``."""
TAIL: Final = (EXAMPLES, CLIP_BITS)
"""The integers after the values of an Update with a clip bit."""
CLIPPING: Final = "clipping"
"""The name of the record of an adaptive clip norm, beside the tensors of the outer state. So a rollback restores it,
and ``fanin verify`` recomputes it."""
CLIPPING_FORM: Final = struct.Struct("<qd")
"""The noised sum of the clip bits of the Round, and the clip norm of a Round on its Version."""
SLICE_VALUES: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralNoise:
    """The central noise of a Round.

    Attributes:
        plan: The Plan of the Run, with a mechanism.
        grid: The public grid of its Updates, with the clip norm of the Round.
    """

    plan: Plan
    grid: ClipGrid

    def at(self, clip_norm: float) -> "CentralNoise":
        """Return the noise of a Round with this clip norm."""
        return replace(self, grid=replace(self.grid, clip_norm=clip_norm))

    @property
    def bits_noise(self) -> float:
        """Standard deviation of the noise in the number of devices within the clip norm; 0 without clip bits."""
        return self.plan.privacy.noise_of_bits(self.plan.cohort)

    @property
    def payload(self) -> RingVector | None:
        """The layout of an Update with a clip bit after its values: a tail of its statistics; None without one."""
        if not self.bits_noise:
            return None
        ring = Ring(bits=self.plan.codec.bits)
        return RingVector(ring=ring, num_values=self.grid.num_values, num_tail=len(TAIL))

    @property
    def vector(self) -> RingVector:
        """The layout of the stored sum."""
        num_values = self.grid.num_values
        noise = reach(DiscreteGaussian(self.noised_sum.parameter), WRAP_BITS + num_values.bit_length())
        bits = (self.plan.cohort.buffer * (self.grid.largest + 1) + noise).bit_length() + 1
        return RingVector(ring=Ring(bits=-(-bits // 8) * 8), num_values=num_values, num_tail=0)

    def grid_of(self, num_blocks: int) -> tuple[int, ...]:
        """Return the grid of each Round: the same exponent for each block."""
        return (self.grid.exponent,) * num_blocks

    @property
    def noised_sum(self) -> NoisedSum:
        """The sensitivity and the noise of the sum of a Round."""
        squared = self.grid.squared_sensitivity
        multiplier = squared_multiplier(self.plan.privacy.noise_multiplier, self.bits_noise)
        return NoisedSum(squared_sensitivity=squared, parameter=multiplier * squared)

    @property
    def noised_bits(self) -> NoisedSum:
        """The sensitivity and the noise of the sum of the clip bits."""
        return NoisedSum(squared_sensitivity=BIT_SENSITIVITY, parameter=bits_parameter(self.bits_noise))

    @property
    def release(self) -> PlainRelease | SampledRelease:
        """What one Round releases, for the ledger: with clip bits, no more than without them."""
        sums = (self.noised_sum, self.noised_bits) if self.bits_noise else (self.noised_sum,)
        if rate := self.plan.privacy.sampling_rate:
            return SampledRelease(sums=sums, sampling_rate=rate)
        return PlainRelease(loss=total(each.loss for each in sums))

    @property
    def denominator(self) -> int:
        """The number by which the mean of a Round divides, whoever took part: with coins the expected cohort."""
        return self.plan.privacy.denominator(self.plan.cohort)

    @property
    def terms(self) -> PrivacyTerms:
        """The terms of each Assignment."""
        return replace(_terms(self.plan, self.grid), bits_noise=self.bits_noise)

    def check_update(self, header: UpdateHeader, payload: Iterable[bytes | memoryview], codec: AnyCodec) -> None:
        """Check the integers of an Update against the sensitivity.

        Args:
            header: Its header.
            payload: Its payload, in consecutive pieces.
            codec: The codec of the Run.

        Raises:
            InvalidUpdate: The device did not clip, reports something about its data, or sends another clip bit than 1
                or -1.
        """
        telemetry, counts = header.telemetry, header.statistics.counts
        tail = np.zeros(len(TAIL), np.int64)
        if self.payload is None:
            pieces: Iterable[Signed] = decoded_pieces(codec, payload, self.grid.num_values)
        else:
            pieces = self.payload.decode(payload, tail)
        if CLIP_BITS in counts:
            raise InvalidUpdate(
                f"update: got {CLIP_BITS} = {counts[CLIP_BITS]} in the header, expected it after the values of the "
                "payload alone, which is erased after the publication; correct the client",
                code="FN-1712",
            )
        if telemetry.train_s or telemetry.num_steps:
            raise InvalidUpdate(
                f"update: got telemetry with train_s {telemetry.train_s:g} and num_steps {telemetry.num_steps}, "
                "expected 0 in a run with privacy: both depend on data; correct the client",
                code="FN-1683",
            )
        squared, bound = squared_norm(pieces), self.grid.squared_sensitivity
        if squared > bound:
            raise InvalidUpdate(
                f"update: got values whose squares add up to {squared}, expected at most {bound}: the device did not "
                "clip its change to PrivacyTerms.squared_sensitivity; correct the client",
                code="FN-1683",
            )
        if self.payload is not None and (tail[0] != 1 or abs(int(tail[1])) != BIT_SENSITIVITY):
            raise InvalidUpdate(
                f"update: got {tail.tolist()} after the values of the payload, expected 1, and a clip bit of 1 or -1; "
                "correct the client",
                code="FN-1712",
            )

    def adjustment(self, seed: bytes) -> Adjustment:
        """Return what the fold of a Round adds to its sum, and the number by which it divides.

        Args:
            seed: The recorded seed of the Round, 32 bytes.
        """
        key = HKDF(SHA256(), SEED_BYTES, salt=None, info=VECTOR).derive(seed)
        distribution, size = DiscreteGaussian(self.noised_sum.parameter), self.grid.num_values

        def correction(first: int, last: int) -> Int64s:
            return self._tail_noise(seed) if first == size else draw(key, distribution, first, last - first)

        tail = TAIL if self.bits_noise else ()
        return Adjustment(ring=self.vector.ring, correction=correction, tail=tail, denominator=self.denominator)

    def _tail_noise(self, seed: bytes) -> Int64s:
        """Return the noise of the tail: none for the weight, which is 1 for all, and that of the clip bit."""
        key = HKDF(SHA256(), SEED_BYTES, salt=None, info=BITS).derive(seed)
        noise = draw(key, DiscreteGaussian(self.noised_bits.parameter), 0, 1)
        return np.concatenate([np.zeros(len(TAIL) - 1, np.int64), noise])

    def next_norm(self, counts: Mapping[str, int]) -> float:
        """Return the clip norm of the next Round, by the counts of this one, of which that of the bits has noise."""
        privacy = self.plan.privacy
        return next_norm(
            self.grid.clip_norm,
            counts[CLIP_BITS],
            self.denominator,
            privacy.target_quantile,
            privacy.clip_learning_rate,
        )

    def encoded_clipping(self, counts: Mapping[str, int]) -> bytes:
        """Return the record of a Round for the next one: the noised sum of the clip bits, and the next clip norm."""
        return CLIPPING_FORM.pack(counts[CLIP_BITS], self.next_norm(counts))

    def encoded(self, sums: Callable[[int, int], Int64s]) -> Iterator[bytes]:
        """Yield the bytes of a noised sum in slices. ``sums`` returns its values between two positions."""
        size, ring = self.grid.num_values, self.vector.ring
        return (ring.encode(sums(first, min(first + SLICE_VALUES, size))) for first in range(0, size, SLICE_VALUES))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedNoise:
    """The noise that the devices of a Run add under masks. The coordinator has no seed, and no sum without noise.

    The clip norm is the same for all Rounds.

    Attributes:
        plan: The Plan of the Run, with a mechanism of devices.
        grid: The public grid of its Updates.
        share: The noise of one device.
    """

    plan: Plan
    grid: ClipGrid
    share: NoiseShare

    def grid_of(self, num_blocks: int) -> tuple[int, ...]:
        """Return the grid of each Round: the same exponent for each block."""
        return (self.grid.exponent,) * num_blocks

    @property
    def ring(self) -> Ring:
        """The ring of the sum, which holds the noise of all devices."""
        return self.share.ring(self.plan.cohort.concurrency, self.grid.largest)

    @property
    def release(self) -> PlainRelease:
        """What one Round releases, for the ledger."""
        return PlainRelease(loss=self.share.loss)

    @property
    def denominator(self) -> int:
        """The number by which the mean of a Round divides, whoever took part."""
        return self.plan.cohort.buffer

    @property
    def terms(self) -> PrivacyTerms:
        """The terms of each Assignment."""
        return _terms(self.plan, self.grid)


def _terms(plan: Plan, grid: ClipGrid) -> PrivacyTerms:
    privacy = plan.privacy
    return PrivacyTerms(
        mechanism=privacy.mechanism,
        clip_norm=grid.clip_norm,
        noise_multiplier=privacy.noise_multiplier,
        squared_sensitivity=grid.squared_sensitivity,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        population=privacy.population,
        population_size=privacy.population_size,
        sampling_rate=privacy.sampling_rate,
    )


def noise_of(plan: Plan, num_values: int, num_honest: int = 0) -> CentralNoise | SharedNoise | None:
    """Return the noise of the first Round of a Run; None without a mechanism.

    Args:
        plan: The Plan of the Run.
        num_values: Number of values of its Updates.
        num_honest: The least number of honest survivors that its protocol promises; 0 without masks.

    Raises:
        InvalidPlan: Devices cannot draw their shares.
    """
    if not plan.privacy:
        return None
    grid = ClipGrid.of(plan.privacy.clip_norm, plan.codec.bits, num_values)
    if not plan.privacy.is_shared:
        return CentralNoise(plan=plan, grid=grid)
    return SharedNoise(plan=plan, grid=grid, share=share_of(_terms(plan, grid), num_values, num_honest))


def recorded_clipping(state: OuterState, read: Callable[[str, Artifact], bytes]) -> tuple[int, float] | None:
    """Return the recorded noised sum of the clip bits and the next clip norm; None without a record.

    Args:
        state: The outer state of the Version.
        read: Returns the verified bytes of a blob.

    Raises:
        NotFound: The record is missing.
        Corrupted: It is damaged.
    """
    artifact = state.get(CLIPPING)
    if artifact is None:
        return None
    data = read("the clip norm", artifact)
    if len(data) != CLIPPING_FORM.size:
        raise Corrupted(
            f"the clip norm: got {len(data)} bytes, expected {CLIPPING_FORM.size}; restore a backup of the folder",
            code="FN-0523",
        )
    bits, norm = CLIPPING_FORM.unpack(data)
    return int(bits), float(norm)


def with_noise(protocol: RoundProtocol, plan: Plan, num_values: int) -> RoundProtocol:
    """Return the protocol of a Run, whose ring holds the noise of devices, too. Raises as ``noise_of``."""
    noise = noise_of(plan, num_values, protocol.num_honest)
    return replace(protocol, ring=noise.ring) if isinstance(noise, SharedNoise) else protocol
