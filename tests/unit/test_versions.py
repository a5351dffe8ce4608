"""The checklist of ``check_version``: each item has a Version that only this item refuses."""

from dataclasses import replace

import pytest
from support.errors import raises
from support.values import BUNDLE, DELEGATION, PUBLISHER, RUN, RUN_KEY, STRANGER, version

from fanin.edge.bundles.versions import (
    begin_epoch,
    check_delegation,
    check_version,
    sign_delegation,
    sign_version,
)
from fanin.protos.chunks import artifact_of, short
from fanin.protos.errors import InvalidVersion
from fanin.protos.messages import UNSEEN, Delegation, Order, Version

SHA256 = BUNDLE.manifest.sha256
FIRST = version()
SECOND = version(parent=FIRST)


def check(candidate: Version, *, seen: Order = UNSEEN) -> None:
    check_version(candidate, run_id=RUN, bundle_sha256=SHA256, publisher=PUBLISHER.public, seen=seen)


def delegate(
    run_id: str = RUN, bundle_sha256: str = SHA256, run_public_key: str = RUN_KEY.public, epoch: int = 1
) -> Delegation:
    return sign_delegation(
        PUBLISHER, run_id=run_id, epoch=epoch, bundle_sha256=bundle_sha256, run_public_key=run_public_key
    )


def test_versions_of_the_publisher_and_of_its_run_key_verify() -> None:
    check(FIRST)
    check(SECOND, seen=(1, 0))
    check(SECOND, seen=(1, 1))
    check(replace(version(PUBLISHER), delegation=None))


def test_numbers_rise_from_zero_by_one() -> None:
    assert (FIRST.number, FIRST.parent) == (0, 0)
    assert (SECOND.number, SECOND.parent) == (1, 0)
    third = version(parent=SECOND)
    assert (third.number, third.parent) == (2, 1)


# (1)
@pytest.mark.parametrize(("run_id", "sha256"), [("other", SHA256), (RUN, "0" * 64)])
def test_a_version_for_another_run_or_bundle_is_refused(run_id: str, sha256: str) -> None:
    """All signatures are valid: the run key signs, with a delegation for that other Run and Bundle."""
    signed_version = sign_version(
        RUN_KEY, parent=None, run_id=run_id, bundle_sha256=sha256, parameters=FIRST.parameters
    )
    other = replace(signed_version, delegation=delegate(run_id, sha256))
    text = f"version 0 of run {run_id}: is of bundle {short(sha256)}, expected run run and bundle {short(SHA256)}"
    with raises(InvalidVersion, text):
        check(other)


# (2)
@pytest.mark.parametrize(
    "delegation",
    [
        None,
        delegate(run_id="other"),
        delegate(bundle_sha256="0" * 64),
        delegate(run_public_key=STRANGER.public),
        delegate(epoch=2),
    ],
    ids=["none", "another run's", "another bundle's", "another key's", "another epoch's"],
)
def test_a_signer_that_was_not_delegated_for_this_is_refused(delegation: Delegation | None) -> None:
    text = (
        f"version 0 of run run: signed by {short(RUN_KEY.public)}, expected the publisher {short(PUBLISHER.public)} "
        "or a run key that it delegated for epoch 1 of this run and for this bundle"
    )
    with raises(InvalidVersion, text):
        check(replace(FIRST, delegation=delegation))


def test_a_strangers_key_with_the_run_keys_delegation_is_refused() -> None:
    with pytest.raises(InvalidVersion, match=f"signed by {short(STRANGER.public)}, expected the publisher"):
        check(version(STRANGER))


def test_a_delegation_that_the_publisher_did_not_sign_is_refused() -> None:
    delegation = sign_delegation(STRANGER, run_id=RUN, bundle_sha256=SHA256, run_public_key=STRANGER.public)
    text = (
        f"run run: the delegation of epoch 1 to run key {short(STRANGER.public)} is not signed by the publisher "
        f"{short(PUBLISHER.public)}"
    )
    with raises(InvalidVersion, text):
        check(replace(version(STRANGER), delegation=delegation))


@pytest.mark.parametrize(
    "delegation",
    [
        replace(DELEGATION, run_id="other"),
        replace(DELEGATION, epoch=2),
        replace(DELEGATION, bundle_sha256="0" * 64),
        replace(DELEGATION, run_public_key=STRANGER.public),
        replace(DELEGATION, signature=bytes(64)),
    ],
    ids=["run", "epoch", "bundle", "key", "signature"],
)
def test_each_part_of_a_delegation_is_under_its_signature(delegation: Delegation) -> None:
    check_delegation(DELEGATION, PUBLISHER.public)
    with pytest.raises(InvalidVersion, match="FN-0370"):
        check_delegation(delegation, PUBLISHER.public)


# (3)
@pytest.mark.parametrize(
    "candidate",
    [
        replace(SECOND, number=2),
        replace(SECOND, epoch=2, delegation=delegate(epoch=2)),
        replace(replace(SECOND, number=3), parent=2),
        replace(version(parent=SECOND), parent=0),
        replace(SECOND, parameters=artifact_of(b"other")),
        replace(SECOND, signature=bytes(64)),
        replace(SECOND, signature=FIRST.signature),
    ],
    ids=["number", "epoch", "number and parent", "parent", "digest", "signature", "another version's signature"],
)
def test_a_version_that_was_changed_after_it_was_signed_is_refused(candidate: Version) -> None:
    what = f"version {candidate.number} of run run"
    with raises(InvalidVersion, f"{what}: the signature does not match; it was changed after it was signed"):
        check(candidate)


# (4)
def test_a_version_that_is_older_than_the_newest_on_this_device_is_refused() -> None:
    text = "version 1 of run run: older than version 2, which this device has verified; rejected"
    with raises(InvalidVersion, text):
        check(SECOND, seen=(1, 2))


def test_only_the_publisher_begins_an_epoch_and_every_number_of_it_is_newer() -> None:
    """A stolen run key signs any number of its own epoch, and none of the next one."""
    stolen = replace(
        sign_version(
            RUN_KEY,
            parent=replace(FIRST, number=2**63 - 4),
            run_id=RUN,
            bundle_sha256=SHA256,
            parameters=FIRST.parameters,
        ),
        delegation=DELEGATION,
    )
    check(stolen, seen=(1, 8))
    following = sign_version(PUBLISHER, parent=SECOND, run_id=RUN, bundle_sha256=SHA256, parameters=FIRST.parameters)
    reclaimed = begin_epoch(PUBLISHER, following)
    assert (reclaimed.order, stolen.number) == ((2, 2), 2**63 - 3)
    check(reclaimed, seen=stolen.order)
    text = f"version {stolen.number} of run run: older than version 2 of epoch 2, not 1, which this device has verified"
    with raises(InvalidVersion, f"{text}; rejected"):
        check(stolen, seen=reclaimed.order)
    forged = begin_epoch(RUN_KEY, stolen)
    with pytest.raises(InvalidVersion, match="FN-0370"):
        check(forged)
    forged_delegation = sign_delegation(
        RUN_KEY, run_id=RUN, epoch=2, bundle_sha256=SHA256, run_public_key=RUN_KEY.public
    )
    with pytest.raises(InvalidVersion, match="FN-0370"):
        check(replace(forged, delegation=forged_delegation))
