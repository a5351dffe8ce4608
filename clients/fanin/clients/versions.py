"""Versions of a Run as an operator downloads them: each with its Bundle, both verified."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fanin.edge.bundles.arrays import ArrayLayout, read_layout
from fanin.edge.bundles.bundle import Bundle, SignedManifest
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.versions import check_version, sign_version
from fanin.edge.ranges import RANGES, grids_of, ranges_table
from fanin.edge.tensors import Float32s, decode_parameters, encode_parameters
from fanin.protos.chunks import artifact_of, assemble
from fanin.protos.errors import InvalidVersion
from fanin.protos.messages import (
    UNSEEN,
    Version,
)

if TYPE_CHECKING:
    # It imports grpc, for which the help of a command would pay.
    from fanin.clients.operator import Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedVersion:
    """A verified Version with its canonical bytes and its Bundle, and the layout of a Bundle without graphs.

    ``ranges_data`` has the canonical bytes of the ranges of its activations; empty for those of the Bundle.
    """

    version: Version
    data: bytes
    bundle: Bundle
    layout: ArrayLayout | None
    ranges_data: bytes = b""

    @property
    def parameters(self) -> Float32s:
        """The parameters that travel (num_values,)."""
        return decode_parameters(self.data)[1]

    @property
    def ranges(self) -> Float32s | None:
        """The ranges of the activations (2 * activations,); None for those of the Bundle."""
        return decode_parameters(self.ranges_data)[1] if self.ranges_data else None


def fetch_version(operator: "Operator", run_id: str, number: int | None, publisher: str) -> FetchedVersion:
    """Download a Version with its Bundle and verify both.

    Args:
        operator: The connection.
        run_id: The Run.
        number: The Version's number; None for the newest.
        publisher: The public key (hex) that must have signed the Bundle; empty to accept any signer.

    Raises:
        InvalidBundle: The Bundle does not verify.
        InvalidVersion: The Version does not verify, or has another number.
        NotFound: The coordinator has no such Run or Version.
    """
    published = operator.version(run_id, number)
    ref = published.bundle
    data = assemble("manifest", ref.manifest, operator.chunk)
    signed = SignedManifest(data=data, public_key=ref.public_key, signature=ref.signature)
    bundle = Bundle.open(signed, trusted=(publisher or signed.public_key,), read=operator.chunk)
    version = published.version
    check_version(version, run_id=run_id, bundle_sha256=bundle.sha256, publisher=signed.public_key, seen=UNSEEN)
    what = f"version {version.number} of run {run_id}"
    if number is not None and version.number != number:
        raise InvalidVersion(f"{what}: got number {version.number}, expected number {number}", code="FN-0828")
    parameters = operator.parameter_bytes(version)
    if decode_parameters(parameters)[0] != bundle.manifest.table:
        raise InvalidVersion(f"{what}: names or shapes differ from its bundle's", code="FN-0828")
    has_layout = not bundle.manifest.signatures and bundle.manifest.query is None
    layout = read_layout(bundle) if has_layout else None
    ranges = b""
    if RANGES in version.auxiliary:
        ranges = assemble(f"{what}: ranges", version.auxiliary[RANGES], operator.chunk)
        table, flat = decode_parameters(ranges)
        if table != ranges_table(bundle.manifest.activations):
            raise InvalidVersion(f"{what}: its ranges are not those of its bundle's activations", code="FN-0361")
        grids_of(bundle.manifest.activations, flat)
    return FetchedVersion(version=version, data=parameters, bundle=bundle, layout=layout, ranges_data=ranges)


def next_version(parent: Version, flat: Float32s, bundle: Bundle, publisher: SigningKey) -> tuple[Version, bytes]:
    """Sign the Version after ``parent``.

    Args:
        parent: The Version before it.
        flat: Its parameters (num_values,).
        bundle: The Run's Bundle.
        publisher: The key that signs it.

    Returns:
        The Version and its canonical bytes.
    """
    data = encode_parameters(bundle.manifest.table, flat)
    version = sign_version(
        publisher,
        parent=parent,
        run_id=parent.run_id,
        bundle_sha256=bundle.sha256,
        parameters=artifact_of(data),
    )
    return version, data
