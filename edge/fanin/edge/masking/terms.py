"""The terms of an attempt: what all its devices agree on, and the least that a device accepts.

Every message has the digest of the terms, and every key derives from it. So a message of another Run, lineage, Round or
attempt is refused, and so is one of the same attempt with another layout.

    bytes   content
    1       format: 1
    1       threat: 1 curious, 2 semi-malicious, 3 active
    1       bits of the ring of tensors
    1       security bits
    1       correctness bits
    1       L: length of the id of the Run
    L       id of the Run, ASCII
    8       lineage
    4       Round
    4       attempt, from 1 on
    4       most devices of the roster
    4       least number of survivors
    4       adversarial fraction, in millionths
    4       dropout fraction, in millionths
    8       number of tensor values
    4       number of tail words
    32      SHA-256 of the Version's parameters
    32      SHA-256 of what the integers mean: codec, grid, largest weight, names of the statistics
"""

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from fanin.edge.masking.agreement import DIGEST_BYTES, TERMS_LABEL, Sign, digest
from fanin.edge.masking.parameters import Assumptions, Threat
from fanin.edge.rings import Ring, RingVector
from fanin.protos.errors import Conflict, InvalidInput, InvalidPlan
from fanin.protos.names import check_run_id

FORMAT: Final = 1
LEAST_SURVIVORS: Final = 3
"""A sum over two devices hides neither from the other."""
LEAST_HONEST: Final = 2
"""Honest devices of a sum. The Update of a single one would be the sum less the Updates of the adversarial ones."""
MAX_DEVICES: Final = 1_000_000
_HEAD: Final = struct.Struct("<BBBBBB")
_REST: Final = struct.Struct("<QIIIIIIQI32s32s")


@dataclass(frozen=True, kw_only=True)
class MaskTerms:
    """The terms of an attempt.

    Attributes:
        run_id: Id of the Run.
        lineage: Number of the Version that no Round published and from which all later ones were computed.
        round: Number of the Round.
        attempt: Number of the attempt in the Round, from 1 on.
        max_devices: Most devices of the roster.
        min_survivors: Fewest devices of a sum; see ``least_survivors``.
        assumptions: Threat model, fractions and bits.
        layout: The masked payload.
        version_sha256: Digest of the Version's parameters, 32 bytes.
        meaning_sha256: Digest of what the integers mean, 32 bytes.
    """

    run_id: str
    lineage: int
    round: int
    attempt: int
    max_devices: int
    min_survivors: int
    assumptions: Assumptions
    layout: RingVector
    version_sha256: bytes
    meaning_sha256: bytes

    def __post_init__(self) -> None:
        check_run_id(self.run_id)
        if not LEAST_SURVIVORS <= self.min_survivors <= self.max_devices <= MAX_DEVICES:
            raise InvalidPlan(
                f"secure aggregation: got {self.min_survivors} survivors of at most {self.max_devices} devices, "
                f"expected {LEAST_SURVIVORS} survivors or more, and at most {MAX_DEVICES} devices",
                code="FN-1627",
            )
        if self.attempt < 1 or {len(self.version_sha256), len(self.meaning_sha256)} != {DIGEST_BYTES}:
            raise InvalidInput(
                f"terms: got the attempt {self.attempt}, expected 1 or more, and digests of 32 bytes", code="FN-1625"
            )

    @cached_property
    def encoded(self) -> bytes:
        """The bytes of the terms."""
        own, layout, run_id = self.assumptions, self.layout, self.run_id.encode("ascii")
        bits = (layout.ring.bits, own.security_bits, own.correctness_bits)
        return b"".join(
            (
                _HEAD.pack(FORMAT, own.threat, *bits, len(run_id)),
                run_id,
                _REST.pack(
                    self.lineage,
                    self.round,
                    self.attempt,
                    self.max_devices,
                    self.min_survivors,
                    own.adversarial_ppm,
                    own.dropout_ppm,
                    layout.num_values,
                    layout.num_tail,
                    self.version_sha256,
                    self.meaning_sha256,
                ),
            )
        )

    @cached_property
    def digest(self) -> bytes:
        """T, the digest of the terms, 32 bytes."""
        return digest(TERMS_LABEL, self.encoded)

    def least_survivors(self, num_devices: int) -> int:
        """Return the fewest devices of a sum over a roster of n: two of them are honest, whoever drops out."""
        return max(self.min_survivors, self.assumptions.num_adversarial(num_devices) + LEAST_HONEST)

    @property
    def is_active(self) -> bool:
        """Whether devices confirm the survivors, and have certificates."""
        return self.assumptions.threat is Threat.ACTIVE


def decoded_terms(data: bytes) -> MaskTerms:
    """Return the terms of their bytes. Raises InvalidInput unless these are valid terms."""
    try:
        version, threat, ring_bits, security, correctness, length = _HEAD.unpack_from(data)
        run_id = data[_HEAD.size : _HEAD.size + length].decode("ascii")
        rest = _REST.unpack(data[_HEAD.size + length :])
        if version != FORMAT:
            raise ValueError(f"format {version}, expected {FORMAT}")
        kind = Threat(threat)
    except (struct.error, ValueError) as exc:
        raise InvalidInput(f"terms: got {len(data)} bytes that are no terms ({exc})", code="FN-1625") from exc
    return MaskTerms(
        run_id=run_id,
        lineage=rest[0],
        round=rest[1],
        attempt=rest[2],
        max_devices=rest[3],
        min_survivors=rest[4],
        assumptions=Assumptions(
            threat=kind,
            adversarial_ppm=rest[5],
            dropout_ppm=rest[6],
            security_bits=security,
            correctness_bits=correctness,
        ),
        layout=RingVector(ring=Ring(bits=ring_bits), num_values=rest[7], num_tail=rest[8]),
        version_sha256=rest[9],
        meaning_sha256=rest[10],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskFloor:
    """The least that a device accepts: the part of its privacy floor (``fanin.edge.floors``) that is about masks.

    Attributes:
        threat: The weakest threat model.
        min_survivors: The fewest devices of a sum.
        adversarial_ppm: The smallest adversarial fraction that parameters must withstand, in millionths.
        security_bits: The fewest security bits.
        authority: Public Ed25519 key, hexadecimal, that certifies devices under the threat ``active``; empty: none.
    """

    threat: Threat = Threat.CURIOUS
    min_survivors: int = LEAST_SURVIVORS
    adversarial_ppm: int = 0
    security_bits: int = 40
    authority: str = ""

    def faults(self, promise: Assumptions, min_survivors: int) -> tuple[str, ...]:
        """Return what assumptions and a least number of survivors promise less than this; empty if nothing."""
        faults = [
            f"{what} {received}, expected at least {expected}"
            for what, received, expected, is_less in (
                ("threat model", promise.threat.title, self.threat.title, promise.threat < self.threat),
                ("survivors", min_survivors, self.min_survivors, min_survivors < self.min_survivors),
                (
                    "adversarial millionths",
                    promise.adversarial_ppm,
                    self.adversarial_ppm,
                    promise.adversarial_ppm < self.adversarial_ppm,
                ),
                (
                    "security bits",
                    promise.security_bits,
                    self.security_bits,
                    promise.security_bits < self.security_bits,
                ),
            )
            if is_less
        ]
        if promise.threat is Threat.ACTIVE and not self.authority:
            faults.append("threat model active without an authority; install the key of one on this device")
        return tuple(faults)

    def check(self, terms: MaskTerms) -> None:
        """Raise InvalidPlan unless the terms promise at least this."""
        if faults := self.faults(terms.assumptions, terms.min_survivors):
            raise InvalidPlan(f"privacy floor of this device: got {'; '.join(faults)}", code="FN-1628")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskIdentity:
    """Who a device is.

    Attributes:
        public: Its Ed25519 key, 32 bytes.
        sign: Returns its signature over a context line and bytes.
        floor: The least that it accepts.
        certificate: By the authority of the floor over the public key; empty: none.
    """

    public: bytes
    sign: Sign
    floor: MaskFloor
    certificate: bytes = b""


def check_later(terms: MaskTerms, before: MaskTerms, gave_shares: bool) -> None:
    """Raise Conflict unless the terms are of a later attempt, and of a Round in which the device gave no shares."""
    if (terms.run_id, terms.lineage) != (before.run_id, before.lineage):
        return
    attempts = (terms.round, terms.attempt), (before.round, before.attempt)
    if attempts[0] <= attempts[1] or (gave_shares and terms.round == before.round):
        reason = "gave shares in this Round" if gave_shares else "took part in that attempt or a later one"
        raise Conflict(
            f"secure aggregation: got Round {terms.round}, attempt {terms.attempt}, and this device {reason}; expected "
            "a later one",
            code="FN-1641",
        )
