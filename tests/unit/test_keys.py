"""Signatures with a context, and keys in files."""

import errno
import stat
from pathlib import Path

import pytest
from support.errors import raises
from support.full_disk import full_disk, in_child
from support.values import PUBLISHER, STRANGER

from fanin.edge.bundles import keys
from fanin.edge.bundles.keys import SigningKey, is_signed, load_or_create_key
from fanin.edge.files import DISK_PROBLEMS
from fanin.protos.errors import InvalidInput, StorageFull

CONTEXTS = (keys.BUNDLE_CONTEXT, keys.VERSION_CONTEXT, keys.DELEGATION_CONTEXT, keys.CALL_CONTEXT)


def test_a_signature_is_good_for_its_key_context_and_bytes_only() -> None:
    signature = PUBLISHER.sign(keys.BUNDLE_CONTEXT, b"data")
    assert len(signature) == keys.SIGNATURE_BYTES
    assert is_signed(PUBLISHER.public, signature, keys.BUNDLE_CONTEXT, b"data")
    assert not is_signed(STRANGER.public, signature, keys.BUNDLE_CONTEXT, b"data")
    assert not is_signed(PUBLISHER.public, signature, keys.BUNDLE_CONTEXT, b"date")
    assert not is_signed(PUBLISHER.public, signature[:-1], keys.BUNDLE_CONTEXT, b"data")
    for context in CONTEXTS[1:]:
        assert not is_signed(PUBLISHER.public, signature, context, b"data")


def test_contexts_differ_and_none_begins_another() -> None:
    framed = [context + "\n" for context in CONTEXTS]
    assert all(not left.startswith(right) for left in framed for right in framed if left is not right)


@pytest.mark.parametrize("public", ["", "ab", "zz" * 32, "00" * 31, PUBLISHER.public + "00"])
def test_an_invalid_key_verifies_no_signature(public: str) -> None:
    assert not is_signed(public, PUBLISHER.sign("c", b"d"), "c", b"d")


def test_a_key_is_its_32_bytes() -> None:
    assert SigningKey(PUBLISHER.private_bytes()).public == PUBLISHER.public
    assert SigningKey.generate().public != SigningKey.generate().public


def test_the_first_vector_of_rfc_8032() -> None:
    key = SigningKey(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
    assert key.public == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"


def test_a_key_file_is_created_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "device.key"
    key = load_or_create_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create_key(path).public == key.public
    assert [file.name for file in path.parent.iterdir()] == ["device.key"]


def test_a_file_without_a_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "device.key"
    path.write_text("abc\n")
    text = (
        f"{path}: got 3 characters, expected a key of 64 hexadecimal ones; restore it from a backup, or remove it: a "
        "new key is created, which is a new identity"
    )
    with raises(InvalidInput, text):
        load_or_create_key(path)


def test_concurrent_creations_of_a_key_file_have_one_key(tmp_path: Path) -> None:
    path = tmp_path / "device.key"
    first = load_or_create_key(path)
    # A second process, which saw no file a moment ago, does this.
    assert keys._create_key(path).public == first.public
    assert [file.name for file in tmp_path.iterdir()] == ["device.key"]


def test_a_full_disk_leaves_no_half_of_a_key(tmp_path: Path) -> None:
    path = tmp_path / "device.key"

    def work() -> None:
        with full_disk(10), raises(StorageFull, f"{path}: cannot be written: {DISK_PROBLEMS[errno.EFBIG]}"):
            load_or_create_key(path)
        assert list(tmp_path.iterdir()) == []
        assert load_or_create_key(path).public == load_or_create_key(path).public

    in_child(work)
