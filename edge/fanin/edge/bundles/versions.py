"""Signing and verifying Versions.

The signed bytes are one JSON line of what a Version is: run, number, parent, bundle and parameter digest. The
signer is the Bundle's publisher, or a run key that the publisher delegated for just this Run and Bundle.

``check_version`` is the device's checklist; nothing of a Version is used before it has passed:

1. it is for the Bundle that was verified, and for the Run that was assigned;
2. the signer is the publisher, or holds the publisher's delegation for this Run and Bundle;
3. the signature covers exactly this number, parent and digest;
4. its number is not lower than the highest that this device has seen in the Run.

The digest of the parameters themselves is checked where their Chunks are put together.
"""

import json
from dataclasses import replace

from fanin.edge.bundles.keys import DELEGATION_CONTEXT, VERSION_CONTEXT, SigningKey, is_signed
from fanin.protos.chunks import Artifact, short
from fanin.protos.errors import InvalidVersion
from fanin.protos.messages import Delegation, Version


def sign_delegation(key: SigningKey, *, run_id: str, bundle_sha256: str, run_public_key: str) -> Delegation:
    """The publisher's leave for a run key."""
    unsigned = Delegation(
        run_id=run_id, bundle_sha256=bundle_sha256, run_public_key=run_public_key, signature=bytes(64)
    )
    return replace(unsigned, signature=key.sign(DELEGATION_CONTEXT, _delegation_bytes(unsigned)))


def sign_version(
    key: SigningKey, *, parent: "Version | None", run_id: str, bundle_sha256: str, parameters: Artifact
) -> Version:
    """The Version after ``parent`` (None: number 0), signed, without a delegation."""
    unsigned = Version(
        run_id=run_id,
        number=0 if parent is None else parent.number + 1,
        parent=0 if parent is None else parent.number,
        bundle_sha256=bundle_sha256,
        parameters=parameters,
        public_key=key.public,
        signature=bytes(64),
    )
    return replace(unsigned, signature=key.sign(VERSION_CONTEXT, _version_bytes(unsigned)))


def check_delegation(delegation: Delegation, publisher: str) -> None:
    """Raise InvalidVersion unless ``publisher`` (public key, hex) signed this delegation."""
    if not is_signed(publisher, delegation.signature, DELEGATION_CONTEXT, _delegation_bytes(delegation)):
        raise InvalidVersion(
            f"run {delegation.run_id}: the delegation to run key {short(delegation.run_public_key)} is not signed "
            f"by the publisher {short(publisher)}"
        )


def check_version(version: Version, *, run_id: str, bundle_sha256: str, publisher: str, seen: int) -> None:
    """Raise InvalidVersion unless the Version verifies (the module's checklist).

    ``publisher`` is the key (hex) that signed the Bundle; ``seen`` the highest number seen in the Run, or -1.
    """
    what = f"version {version.number} of run {version.run_id}"
    # (1)
    if version.run_id != run_id or version.bundle_sha256 != bundle_sha256:
        raise InvalidVersion(
            f"{what}: made for bundle {short(version.bundle_sha256)}, "
            f"expected run {run_id} and bundle {short(bundle_sha256)}"
        )
    # (2)
    if version.public_key != publisher:
        delegation = version.delegation
        if (
            delegation is None
            or delegation.run_id != run_id
            or delegation.bundle_sha256 != bundle_sha256
            or delegation.run_public_key != version.public_key
        ):
            raise InvalidVersion(
                f"{what}: signed by {short(version.public_key)}, expected the publisher {short(publisher)} "
                "or a run key that it delegated for this run and bundle"
            )
        check_delegation(delegation, publisher)
    # (3)
    if not is_signed(version.public_key, version.signature, VERSION_CONTEXT, _version_bytes(version)):
        raise InvalidVersion(f"{what}: the signature does not match; it was changed after it was signed")
    # (4)
    if version.number < seen:
        raise InvalidVersion(f"{what}: older than version {seen}, which this device has seen; refused")


def _version_bytes(version: Version) -> bytes:
    row = [version.run_id, version.number, version.parent, version.bundle_sha256, version.parameters.sha256]
    return json.dumps(row, separators=(",", ":")).encode()


def _delegation_bytes(delegation: Delegation) -> bytes:
    row = [delegation.run_id, delegation.bundle_sha256, delegation.run_public_key]
    return json.dumps(row, separators=(",", ":")).encode()
