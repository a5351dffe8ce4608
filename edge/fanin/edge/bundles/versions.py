"""Signing and verifying Versions.

The signed bytes are one line of JSON: run, epoch, number, parent, bundle, digest of the parameters, and digests of the
auxiliary tensors, if any. The signer is the Bundle's publisher, or a run key to which the publisher delegated for this
Run, this epoch and this Bundle.

Versions are ordered by (epoch, number). Only the publisher can begin an epoch. So it can take a Run back from the owner
of a stolen run key, whatever numbers that key has signed: a device that has verified one Version of the new epoch
refuses everything of the earlier ones.

``check_version`` is the checklist of a device. A device uses no part of a Version before all checks pass:

1. the Version is for the verified Bundle and the assigned Run;
2. the signer is the publisher, or has the publisher's delegation for this Run, epoch and Bundle;
3. the signature covers this epoch, this number, this parent and these digests;
4. (epoch, number) is not lower than the highest pair that the device has verified in the Run.

The parameters' digest is checked later, when their Chunks are assembled (``fanin.protos.chunks.assemble``).
"""

import json
from collections.abc import Mapping
from dataclasses import replace

from fanin.edge.bundles.keys import DELEGATION_CONTEXT, VERSION_CONTEXT, SigningKey, is_signed
from fanin.protos.chunks import Artifact, short
from fanin.protos.errors import InvalidVersion
from fanin.protos.messages import FIRST_EPOCH, Delegation, Order, Version


def sign_delegation(
    key: SigningKey, *, run_id: str, bundle_sha256: str, run_public_key: str, epoch: int = FIRST_EPOCH
) -> Delegation:
    """Return the publisher's signed permission for a run key to sign the Versions of one epoch of one Run."""
    unsigned = Delegation(
        run_id=run_id,
        epoch=epoch,
        bundle_sha256=bundle_sha256,
        run_public_key=run_public_key,
        signature=bytes(64),
    )
    return replace(unsigned, signature=key.sign(DELEGATION_CONTEXT, _delegation_bytes(unsigned)))


def sign_version(
    key: SigningKey,
    *,
    parent: "Version | None",
    run_id: str,
    bundle_sha256: str,
    parameters: Artifact,
) -> Version:
    """Create and sign the next Version of a Run in the epoch of its parent, without a delegation.

    Args:
        key: The publisher's key, or a run key.
        parent: The Version from which it was computed; None to create number 0.
        run_id: The Run.
        bundle_sha256: The Run's Bundle.
        parameters: The canonical parameter bytes as an Artifact.
    """
    unsigned = Version(
        run_id=run_id,
        epoch=FIRST_EPOCH if parent is None else parent.epoch,
        number=0 if parent is None else parent.number + 1,
        parent=0 if parent is None else parent.number,
        bundle_sha256=bundle_sha256,
        parameters=parameters,
        public_key=key.public,
        signature=bytes(64),
    )
    return replace(unsigned, signature=key.sign(VERSION_CONTEXT, _version_bytes(unsigned)))


def add_auxiliary(key: SigningKey, version: Version, auxiliary: Mapping[str, Artifact]) -> Version:
    """Return a Version with auxiliary tensors (by name, in name order), signed again by the key that signed it."""
    unsigned = replace(version, auxiliary=auxiliary)
    return replace(unsigned, signature=key.sign(VERSION_CONTEXT, _version_bytes(unsigned)))


def begin_epoch(key: SigningKey, version: Version) -> Version:
    """Return a Version that begins the next epoch, signed again by the publisher's key."""
    unsigned = replace(version, epoch=version.epoch + 1)
    return replace(unsigned, signature=key.sign(VERSION_CONTEXT, _version_bytes(unsigned)))


def check_delegation(delegation: Delegation, publisher: str) -> None:
    """Raise InvalidVersion unless ``publisher`` (public key, hex) signed the delegation."""
    if not is_signed(publisher, delegation.signature, DELEGATION_CONTEXT, _delegation_bytes(delegation)):
        raise InvalidVersion(
            f"run {delegation.run_id}: the delegation of epoch {delegation.epoch} to run key "
            f"{short(delegation.run_public_key)} is not signed by the publisher {short(publisher)}",
            code="FN-0370",
        )


def check_version(version: Version, *, run_id: str, bundle_sha256: str, publisher: str, seen: Order) -> None:
    """Verify a Version by the checklist at the top of this module.

    Args:
        version: The Version.
        run_id: The assigned Run.
        bundle_sha256: The verified Bundle.
        publisher: Public key (hex) that signed the Bundle.
        seen: Highest (epoch, number) that the device has verified in this Run; ``UNSEEN`` for none.

    Raises:
        InvalidVersion: A check failed.
    """
    what = f"version {version.number} of run {version.run_id}"
    # (1)
    if version.run_id != run_id or version.bundle_sha256 != bundle_sha256:
        raise InvalidVersion(
            f"{what}: is of bundle {short(version.bundle_sha256)}, "
            f"expected run {run_id} and bundle {short(bundle_sha256)}",
            code="FN-0371",
        )
    # (2)
    if version.public_key != publisher:
        delegation = version.delegation
        if (
            delegation is None
            or (delegation.run_id, delegation.epoch) != (run_id, version.epoch)
            or delegation.bundle_sha256 != bundle_sha256
            or delegation.run_public_key != version.public_key
        ):
            raise InvalidVersion(
                f"{what}: signed by {short(version.public_key)}, expected the publisher {short(publisher)} "
                f"or a run key that it delegated for epoch {version.epoch} of this run and for this bundle",
                code="FN-0370",
            )
        check_delegation(delegation, publisher)
    # (3)
    if not is_signed(version.public_key, version.signature, VERSION_CONTEXT, _version_bytes(version)):
        raise InvalidVersion(
            f"{what}: the signature does not match; it was changed after it was signed", code="FN-0373"
        )
    # (4)
    if version.order < seen:
        epoch, number = seen
        earlier = "" if epoch == version.epoch else f" of epoch {epoch}, not {version.epoch}"
        raise InvalidVersion(
            f"{what}: older than version {number}{earlier}, which this device has verified; rejected", code="FN-0374"
        )


def _version_bytes(version: Version) -> bytes:
    row: list[object] = [version.run_id, version.epoch, version.number, version.parent, version.bundle_sha256]
    row.append(version.sha256)
    if version.auxiliary:
        row.append({name: tensor.sha256 for name, tensor in version.auxiliary.items()})
    return json.dumps(row, separators=(",", ":")).encode()


def _delegation_bytes(delegation: Delegation) -> bytes:
    row = [delegation.run_id, delegation.epoch, delegation.bundle_sha256, delegation.run_public_key]
    return json.dumps(row, separators=(",", ":")).encode()
