"""The options of secure aggregation in a Plan, and the terms of an attempt that follow from them.

Coordinator and devices compute the terms from the same facts, so the terms are never sent. A number of a Round is used
once, and a failed Round is never tried again, so each attempt is the first one of its Round.
"""

from dataclasses import dataclass
from typing import Annotated, Final

from fanin.edge.basis import RoundBasis
from fanin.edge.masking.agreement import digest
from fanin.edge.masking.parameters import MILLION, Assumptions, Threat
from fanin.edge.masking.terms import LEAST_HONEST, LEAST_SURVIVORS, MAX_DEVICES, MaskTerms
from fanin.edge.noise.clipping import largest_of
from fanin.edge.noise.shares import NoiseShare, share_of
from fanin.edge.rings import RingVector, smallest_ring
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.protos.names import check_key
from fanin.protos.plans.keys import Key

MEANING_LABEL: Final = "fanin secagg meaning v1"
LEAST_BITS: Final = 40
"""Security bits that each device demands, whatever its floor."""
MAX_BITS: Final = 128


def _is_key(text: str) -> bool:
    try:
        check_key("authority", text)
    except InvalidInput:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSettings:
    """The options of ``round.protocol = "secagg"``."""

    threat: Annotated[
        str, Key(text="What the coordinator may do.", choices=tuple(threat.title for threat in Threat))
    ] = Threat.CURIOUS.title
    min_survivors: Annotated[
        int, Key(text="The fewest devices of a sum.", at_least=LEAST_SURVIVORS, at_most=MAX_DEVICES)
    ] = LEAST_SURVIVORS
    adversarial_fraction: Annotated[
        float, Key(text="Devices that share all they know with the coordinator.", at_least=0, below=1)
    ] = 0.1
    dropout_fraction: Annotated[float, Key(text="Devices that may drop out of a Round.", at_least=0, below=1)] = 0.1
    security_bits: Annotated[
        int,
        Key(
            text="A Round shows an Update with a probability of at most 2^-bits.", at_least=LEAST_BITS, at_most=MAX_BITS
        ),
    ] = LEAST_BITS
    correctness_bits: Annotated[
        int,
        Key(
            text="A Round within the dropouts fails with a probability of at most 2^-bits.",
            at_least=1,
            at_most=MAX_BITS,
        ),
    ] = 20
    authority: Annotated[
        str,
        Key(
            text="The public key that certifies devices, for the threat `active`.",
            form="64 hexadecimal digits",
            is_valid=lambda text: not text or _is_key(text),
        ),
    ] = ""
    deadline_s: Annotated[
        float, Key(text="Seconds of each phase with messages. 0: as `cohort.deadline_s`.", unit="s", at_least=0)
    ] = 0.0

    def __post_init__(self) -> None:
        is_active = self.is_active
        if is_active != bool(self.authority):
            raise InvalidPlan(
                f"plan: round.options: got the threat {self.threat!r} with the authority {self.authority!r}, expected "
                f"{'the public key of one' if is_active else 'none'}; {'add' if is_active else 'remove'} authority",
                code="FN-1643",
            )

    @property
    def model(self) -> Threat:
        """The threat model."""
        return next(threat for threat in Threat if threat.title == self.threat)

    @property
    def is_active(self) -> bool:
        """Whether devices confirm the survivors, and have certificates."""
        return self.model is Threat.ACTIVE

    @property
    def assumptions(self) -> Assumptions:
        """What the parameters of the graph are computed from."""
        return Assumptions(
            threat=self.model,
            adversarial_ppm=round(self.adversarial_fraction * MILLION),
            dropout_ppm=round(self.dropout_fraction * MILLION),
            security_bits=self.security_bits,
            correctness_bits=self.correctness_bits,
        )

    def num_honest(self, max_devices: int) -> int:
        """Return the least number of honest survivors of a Round, for whom noise is scaled.

        Raises:
            InvalidPlan: There may be fewer than two.
        """
        adversarial = self.assumptions.num_adversarial(max_devices)
        if self.min_survivors < adversarial + LEAST_HONEST:
            raise InvalidPlan(
                f"plan: round.options: got min_survivors {self.min_survivors} with adversarial_fraction "
                f"{self.adversarial_fraction:g} of {max_devices} devices and noise on devices, expected at least "
                f"{adversarial + LEAST_HONEST}: the noise of {adversarial} adversarial devices does not count; raise "
                "min_survivors, up to cohort.quorum",
                code="FN-1686",
            )
        return self.min_survivors - adversarial

    def share(self, basis: RoundBasis) -> NoiseShare | None:
        """Return the noise that each device adds before the mask; None for none. Raises InvalidPlan."""
        if basis.privacy is None:
            return None
        return share_of(basis.privacy, basis.num_values, self.num_honest(basis.max_devices))

    def terms(self, basis: RoundBasis) -> MaskTerms:
        """Return the terms of the attempt of a Round.

        Raises:
            ValueError: No ring holds the sum of so many devices.
            InvalidInput: A number is out of range.
            InvalidPlan: Devices cannot add the noise of the Round.
        """
        share = self.share(basis)
        if share is None:
            ring = smallest_ring(basis.codec.bits, basis.max_devices * basis.statistics[0].bound)
        else:
            ring = share.ring(basis.max_devices, largest_of(basis.codec.bits))
        return MaskTerms(
            run_id=basis.run_id,
            lineage=basis.lineage,
            round=basis.round,
            attempt=1,
            max_devices=basis.max_devices,
            min_survivors=self.min_survivors,
            assumptions=self.assumptions,
            layout=RingVector(ring=ring, num_values=basis.num_values, num_tail=len(basis.statistics)),
            version_sha256=bytes.fromhex(basis.version_sha256),
            meaning_sha256=meaning_of(basis, share),
        )


def meaning_of(basis: RoundBasis, share: NoiseShare | None) -> bytes:
    """Return the digest of what the integers of a Round mean: work, codec, grid, statistics with bounds, and noise."""
    lines = [
        f"work {basis.work_sha256}",
        f"codec {basis.codec.name} {basis.codec.bits}",
        " ".join(["grid", *map(str, basis.grid)]),
        *(f"{statistic.name} {statistic.bound}" for statistic in basis.statistics),
        *(() if share is None else (f"noise {share.mechanism} {share.squared_sensitivity} {share.variance}",)),
    ]
    return digest(MEANING_LABEL, "".join(f"{line}\n" for line in lines).encode())
