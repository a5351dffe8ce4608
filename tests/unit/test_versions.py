"""The checklist of ``check_version``: each item has a Version that only this item refuses."""

from dataclasses import replace

import pytest
from support.errors import raises
from support.values import BUNDLE, DELEGATION, PUBLISHER, RUN, RUN_KEY, STRANGER, version

from fanin.edge.bundles.versions import check_delegation, check_version, sign_delegation, sign_version
from fanin.protos.chunks import artifact_of, short
from fanin.protos.errors import InvalidVersion
from fanin.protos.messages import Delegation, Version

SHA256 = BUNDLE.manifest.sha256
FIRST = version()
SECOND = version(parent=FIRST)


def check(candidate: Version, *, seen: int = -1) -> None:
    check_version(candidate, run_id=RUN, bundle_sha256=SHA256, publisher=PUBLISHER.public, seen=seen)


def delegate(run_id: str = RUN, bundle_sha256: str = SHA256, run_public_key: str = RUN_KEY.public) -> Delegation:
    return sign_delegation(PUBLISHER, run_id=run_id, bundle_sha256=bundle_sha256, run_public_key=run_public_key)


def test_versions_of_the_publisher_and_of_its_run_key_verify() -> None:
    check(FIRST)
    check(SECOND, seen=0)
    check(SECOND, seen=1)
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
    ],
    ids=["none", "another run's", "another bundle's", "another key's"],
)
def test_a_signer_that_was_not_delegated_for_this_is_refused(delegation: Delegation | None) -> None:
    text = (
        f"version 0 of run run: signed by {short(RUN_KEY.public)}, expected the publisher {short(PUBLISHER.public)} "
        "or a run key that it delegated for this run and bundle"
    )
    with raises(InvalidVersion, text):
        check(replace(FIRST, delegation=delegation))


def test_a_strangers_key_with_the_run_keys_delegation_is_refused() -> None:
    with pytest.raises(InvalidVersion, match=f"signed by {short(STRANGER.public)}, expected the publisher"):
        check(version(STRANGER))


def test_a_delegation_that_the_publisher_did_not_sign_is_refused() -> None:
    delegation = sign_delegation(STRANGER, run_id=RUN, bundle_sha256=SHA256, run_public_key=STRANGER.public)
    text = (
        f"run run: the delegation to run key {short(STRANGER.public)} is not signed by the publisher "
        f"{short(PUBLISHER.public)}"
    )
    with raises(InvalidVersion, text):
        check(replace(version(STRANGER), delegation=delegation))


@pytest.mark.parametrize(
    "delegation",
    [
        replace(DELEGATION, run_id="other"),
        replace(DELEGATION, bundle_sha256="0" * 64),
        replace(DELEGATION, run_public_key=STRANGER.public),
        replace(DELEGATION, signature=bytes(64)),
    ],
    ids=["run", "bundle", "key", "signature"],
)
def test_each_part_of_a_delegation_is_under_its_signature(delegation: Delegation) -> None:
    check_delegation(DELEGATION, PUBLISHER.public)
    with pytest.raises(InvalidVersion, match="is not signed by the publisher"):
        check_delegation(delegation, PUBLISHER.public)


# (3)
@pytest.mark.parametrize(
    "candidate",
    [
        replace(SECOND, number=2),
        replace(replace(SECOND, number=3), parent=2),
        replace(version(parent=SECOND), parent=0),
        replace(SECOND, parameters=artifact_of(b"other")),
        replace(SECOND, signature=bytes(64)),
        replace(SECOND, signature=FIRST.signature),
    ],
    ids=["number", "number and parent", "parent", "digest", "signature", "another version's signature"],
)
def test_a_version_that_was_changed_after_it_was_signed_is_refused(candidate: Version) -> None:
    what = f"version {candidate.number} of run run"
    with raises(InvalidVersion, f"{what}: the signature does not match; it was changed after it was signed"):
        check(candidate)


# (4)
def test_a_version_that_is_older_than_the_newest_on_this_device_is_refused() -> None:
    text = "version 1 of run run: older than version 2, which this device has verified; rejected"
    with raises(InvalidVersion, text):
        check(SECOND, seen=2)
