"""Bundles, Versions and the signatures over them, as a coordinator announces them to a device.

These values carry digests and signatures but verify none of them: ``fanin.edge.bundles`` does that before a device
uses anything. A value only guarantees that its keys and signatures have the right length and its names the right form.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final

from fanin.protos.chunks import Artifact, ChunkRef
from fanin.protos.errors import InvalidInput
from fanin.protos.fields import Mark
from fanin.protos.names import MAX_NUMBER, check_key, check_name, check_signature

if TYPE_CHECKING:
    from fanin.v1 import fleet_pb2 as pb

MAX_AUXILIARY: Final = 9
"""Auxiliary tensors of one Version: 8 of stages, and the ranges of activations."""
FIRST_EPOCH: Final = 1
"""The epoch in which a Run starts."""
Order = tuple[int, int]
"""(epoch, number) of a Version: a device never goes back in this order."""
UNSEEN: Final[Order] = (0, 0)
"""The order before every Version."""


def check_epoch(what: str, epoch: int) -> None:
    """Raise InvalidInput unless a Run can have this epoch."""
    if not FIRST_EPOCH <= epoch <= MAX_NUMBER:
        raise InvalidInput(f"{what}: got epoch {epoch}, expected {FIRST_EPOCH} to {MAX_NUMBER}", code="FN-0151")


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleRef:
    """Reference to a Bundle: its manifest and the publisher's signature over it.

    Attributes:
        manifest: The manifest as an Artifact. ``manifest.sha256`` is the name of the Bundle.
        public_key: The publisher's Ed25519 key, hexadecimal.
        signature: 64 bytes.
    """

    manifest: Artifact
    public_key: Annotated[str, Mark.HEXADECIMAL]
    signature: bytes

    def __post_init__(self) -> None:
        check_key("bundle", self.public_key)
        check_signature("bundle", self.signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delegation:
    """Permission of a Bundle's publisher for a run key to sign the Versions of one epoch of one Run."""

    run_id: str
    epoch: int
    bundle_sha256: str
    run_public_key: Annotated[str, Mark.HEXADECIMAL]
    signature: bytes

    def __post_init__(self) -> None:
        check_name("delegation: run", self.run_id)
        check_epoch("delegation", self.epoch)
        check_key("delegation", self.run_public_key)
        check_signature("delegation", self.signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One immutable, numbered, signed set of global parameters of a Run.

    Attributes:
        run_id: The Run.
        epoch: Increases when the publisher reclaims the Run, from ``FIRST_EPOCH``.
        number: Increases within the epoch.
        parent: Number of the Version from which this one was computed; 0 for number 0.
        bundle_sha256: The Bundle whose graphs these parameters fill.
        parameters: The canonical parameter bytes (``fanin.edge.tensors``) as an Artifact.
        public_key: Key of the signer: the publisher's, or a run key with a ``delegation``.
        signature: 64 bytes.
        delegation: The publisher's permission, if a run key signed.
        auxiliary: Tensors that the stages of the Run need in addition to the parameters, by name, in name order.
    """

    run_id: str
    epoch: int
    number: int
    parent: int
    bundle_sha256: str
    parameters: Artifact
    public_key: Annotated[str, Mark.HEXADECIMAL]
    signature: bytes
    delegation: Delegation | None = None
    auxiliary: Mapping[str, Artifact] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        check_name("version: run", self.run_id)
        check_epoch("version", self.epoch)
        check_key("version", self.public_key)
        check_signature("version", self.signature)
        if not 0 <= self.number <= MAX_NUMBER:
            raise InvalidInput(f"version: got number {self.number}, expected 0 to {MAX_NUMBER}", code="FN-0151")
        if self.parent >= max(self.number, 1):
            raise InvalidInput(
                f"version {self.number}: got parent {self.parent}, expected a lower number (0: itself)", code="FN-0151"
            )
        if len(self.auxiliary) > MAX_AUXILIARY or list(self.auxiliary) != sorted(self.auxiliary):
            raise InvalidInput(
                f"version {self.number}: got {len(self.auxiliary)} auxiliary tensors, expected at most {MAX_AUXILIARY} "
                "in the order of their names",
                code="FN-0151",
            )
        for name in self.auxiliary:
            check_name("version: auxiliary tensor", name)

    @staticmethod
    def check_message(message: "pb.Version") -> None:
        """Raise InvalidInput for two auxiliary tensors of one name."""
        if len({each.name for each in message.auxiliary}) < len(message.auxiliary):
            raise InvalidInput(
                f"version {message.number}: got two auxiliary tensors of one name, expected different names",
                code="FN-0151",
            )

    @property
    def order(self) -> Order:
        """The place of the Version among those of its Run."""
        return (self.epoch, self.number)

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """The parameters and the auxiliary tensors."""
        return (self.parameters, *self.auxiliary.values())

    @property
    def chunks(self) -> tuple[ChunkRef, ...]:
        """The Chunks of the parameters and of the auxiliary tensors."""
        return tuple(ref for artifact in self.artifacts for ref in artifact.chunks)

    @property
    def sha256(self) -> str:
        """``version_sha256``: the digest of the canonical parameter bytes."""
        return self.parameters.sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A Version with its Bundle. ``download_id`` permits one device to download both."""

    download_id: str
    run_id: str
    bundle: BundleRef
    version: Version

    def __post_init__(self) -> None:
        check_name("publication", self.download_id)
        check_name("publication: run", self.run_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion:
    """The Version that a device serves to its app, or a newer one that it refused.

    ``run_id`` is "" while the device has no Version.
    """

    run_id: str = ""
    epoch: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        if self.run_id:
            check_name("served version: run", self.run_id)

    @property
    def order(self) -> Order:
        """The place of the Version among those of its Run."""
        return (self.epoch, self.number)
