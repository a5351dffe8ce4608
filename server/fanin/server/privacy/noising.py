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
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fanin.edge.noise.clipping import ClipGrid, Signed, squared_norm
from fanin.edge.noise.distributions import DiscreteGaussian, draw, reach
from fanin.edge.noise.shares import WRAP_BITS, NoiseShare, share_of
from fanin.edge.noise.streams import SEED_BYTES
from fanin.edge.rings import Adjustment, Ring, RingVector
from fanin.edge.tensors import Int64s
from fanin.protos.errors import InvalidUpdate
from fanin.protos.messages import PrivacyTerms, Telemetry
from fanin.protos.plans import Plan
from fanin.server.privacy.releases import NoisedSum, PlainRelease, SampledRelease
from fanin.server.protocols.machine import RoundProtocol

VECTOR: Final = b"fanin round noise v1 parameters"
"""The vector of a Round that its noise is for. Another vector of the Round would have another name."""
NOISED_SUM: Final = "noised_sum"
"""The name of the stored sum, beside the tensors of the outer state."""
SLICE_VALUES: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralNoise:
    """The central noise of a Run.

    Attributes:
        plan: The Plan of the Run, with a mechanism.
        grid: The public grid of its Updates.
    """

    plan: Plan
    grid: ClipGrid

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
        return NoisedSum(
            squared_sensitivity=squared, parameter=Fraction(self.plan.privacy.noise_multiplier) ** 2 * squared
        )

    @property
    def release(self) -> PlainRelease | SampledRelease:
        """What one Round releases, for the ledger."""
        if rate := self.plan.privacy.sampling_rate:
            return SampledRelease(sums=(self.noised_sum,), sampling_rate=rate)
        return PlainRelease(loss=self.noised_sum.loss)

    @property
    def denominator(self) -> int:
        """The number by which the mean of a Round divides, whoever took part: with coins the expected cohort."""
        privacy = self.plan.privacy
        return math.ceil(privacy.sampling_rate * privacy.population_size) or self.plan.cohort.buffer

    @property
    def terms(self) -> PrivacyTerms:
        """The terms of each Assignment."""
        return _terms(self.plan, self.grid)

    def check_update(self, telemetry: Telemetry, pieces: Iterable[Signed]) -> None:
        """Check the integers of an Update against the sensitivity.

        Args:
            telemetry: The telemetry of its header.
            pieces: The encoded values, in consecutive pieces.

        Raises:
            InvalidUpdate: The device did not clip, or reports something about its data.
        """
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

    def adjustment(self, seed: bytes) -> Adjustment:
        """Return what the fold of a Round adds to its sum, and the number by which it divides.

        Args:
            seed: The recorded seed of the Round, 32 bytes.
        """
        key = HKDF(SHA256(), SEED_BYTES, salt=None, info=VECTOR).derive(seed)
        distribution = DiscreteGaussian(self.noised_sum.parameter)

        def correction(first: int, last: int) -> Int64s:
            return draw(key, distribution, first, last - first)

        return Adjustment(ring=self.vector.ring, correction=correction, denominator=self.denominator)

    def encoded(self, sums: Callable[[int, int], Int64s]) -> Iterator[bytes]:
        """Yield the bytes of a noised sum in slices. ``sums`` returns its values between two positions."""
        size, ring = self.grid.num_values, self.vector.ring
        return (ring.encode(sums(first, min(first + SLICE_VALUES, size))) for first in range(0, size, SLICE_VALUES))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedNoise:
    """The noise that the devices of a Run add under masks. The coordinator has no seed, and no sum without noise.

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
        clip_norm=privacy.clip_norm,
        noise_multiplier=privacy.noise_multiplier,
        squared_sensitivity=grid.squared_sensitivity,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        population=privacy.population,
        population_size=privacy.population_size,
        sampling_rate=privacy.sampling_rate,
    )


def noise_of(plan: Plan, num_values: int, num_honest: int = 0) -> CentralNoise | SharedNoise | None:
    """Return the noise of a Run; None without a mechanism.

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


def with_noise(protocol: RoundProtocol, plan: Plan, num_values: int) -> RoundProtocol:
    """Return the protocol of a Run, whose ring holds the noise of devices, too. Raises as ``noise_of``."""
    noise = noise_of(plan, num_values, protocol.num_honest)
    return replace(protocol, ring=noise.ring) if isinstance(noise, SharedNoise) else protocol
