"""Opening a Bundle: verification comes first, and the error names the part that fails."""

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from support.errors import raises
from support.manifests import ARTIFACTS, INITIAL, TABLE, manifest
from support.values import PUBLISHER, STRANGER

from fanin.edge.bundles.bundle import (
    Bundle,
    SignedManifest,
    folder_reader,
    open_folder,
    read_signed_manifest,
    write_bundle,
)
from fanin.edge.bundles.keys import BUNDLE_CONTEXT, VERSION_CONTEXT
from fanin.edge.bundles.manifest_json import dump_manifest
from fanin.edge.tensors import TensorTable, encode_parameters
from fanin.protos.chunks import artifact_of, short
from fanin.protos.errors import InvalidBundle

TRUSTED = (PUBLISHER.public,)
DATA = dump_manifest(manifest())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a valid Bundle."""
    write_bundle(tmp_path, DATA, ARTIFACTS, PUBLISHER)
    return tmp_path


def test_a_valid_bundle_opens(folder: Path) -> None:
    bundle = open_folder(folder, trusted=TRUSTED)
    assert bundle.manifest == manifest()
    assert bundle.sha256 == artifact_of(DATA).sha256
    assert {name: bundle.artifact(name) for name in ARTIFACTS} == ARTIFACTS
    assert bundle.graph("infer", "onnx") == ARTIFACTS["infer.onnx"]
    assert bundle.initial_parameters().tolist() == (np.arange(TABLE.num_values) / 8).tolist()


def test_every_byte_of_the_manifest_is_under_the_signature(folder: Path) -> None:
    signed = read_signed_manifest(folder)
    for index in range(0, len(DATA), 97):
        changed = replace(signed, data=DATA[:index] + bytes([DATA[index] ^ 1]) + DATA[index + 1 :])
        text = (
            f"bundle {short(changed.sha256)}: the signature does not match the manifest; "
            "it was changed after it was signed; download it again from its publisher"
        )
        with raises(InvalidBundle, text):
            Bundle.open(changed, trusted=TRUSTED, read=folder_reader(folder))


def test_a_signature_with_another_context_is_refused(folder: Path) -> None:
    signed = replace(read_signed_manifest(folder), signature=PUBLISHER.sign(VERSION_CONTEXT, DATA))
    with pytest.raises(InvalidBundle, match="FN-0302"):
        Bundle.open(signed, trusted=TRUSTED, read=folder_reader(folder))


@pytest.mark.parametrize("trusted", [(), (STRANGER.public,)])
def test_a_publisher_that_is_not_trusted_is_refused(folder: Path, trusted: tuple[str, ...]) -> None:
    text = (
        f"bundle: signed by key {short(PUBLISHER.public)}, expected one of {[short(key) for key in trusted]}; "
        "pass that publisher's public key (--publisher) if you trust it"
    )
    with raises(InvalidBundle, f"{folder}: {text}"):
        open_folder(folder, trusted=trusted)


def test_a_trusted_name_over_a_strangers_signature_is_refused(folder: Path) -> None:
    signed = replace(read_signed_manifest(folder), signature=STRANGER.sign(BUNDLE_CONTEXT, DATA))
    with pytest.raises(InvalidBundle, match="FN-0302"):
        Bundle.open(signed, trusted=TRUSTED, read=folder_reader(folder))


def test_an_unsigned_manifest_is_never_parsed() -> None:
    """If the manifest were parsed first, the error would be about invalid JSON."""
    with pytest.raises(InvalidBundle, match="FN-0302"):
        signed = read_signed_manifest_of(b"not JSON", STRANGER.sign(BUNDLE_CONTEXT, b"not JSON"))
        Bundle.open(signed, trusted=TRUSTED, read=ARTIFACTS.__getitem__)


def read_signed_manifest_of(data: bytes, signature: bytes) -> SignedManifest:
    return SignedManifest(data=data, public_key=PUBLISHER.public, signature=signature)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"format": 4},
            "manifest: got format 4, expected 3; install a fanin that knows this format, or export the Bundle again",
        ),
        (
            json.loads(DATA) | {"hook": "rm -rf /"},
            f"manifest: got unknown ['hook'], expected {sorted(json.loads(DATA))}",
        ),
    ],
    ids=["newer format", "unknown key"],
)
def test_a_well_signed_manifest_that_is_not_understood_is_refused(
    tmp_path: Path, row: dict[str, object], text: str
) -> None:
    write_bundle(tmp_path, json.dumps(row).encode(), {}, PUBLISHER)
    with raises(InvalidBundle, f"{tmp_path}: {text}"):
        open_folder(tmp_path, trusted=TRUSTED)


def chunk_of(folder: Path, name: str) -> Path:
    return folder / "chunks" / manifest().artifacts[name].chunks[0].sha256


def test_a_changed_artifact_is_refused(folder: Path) -> None:
    path = chunk_of(folder, "infer.onnx")
    path.write_bytes(b"an inter graph")
    bundle = open_folder(folder, trusted=TRUSTED)
    digest, expected_digest = artifact_of(b"an inter graph").sha256, manifest().artifacts["infer.onnx"].sha256
    text = (
        f"bundle {short(bundle.sha256)}: artifact infer.onnx: chunk 0: digest mismatch "
        f"(got {short(digest)}, expected {short(expected_digest)})"
    )
    with raises(InvalidBundle, text):
        bundle.graph("infer", "onnx")
    assert bundle.graph("train", "onnx") == b"train"


def test_a_missing_chunk_is_reported(folder: Path) -> None:
    path = chunk_of(folder, "infer.onnx")
    path.unlink()
    bundle = open_folder(folder, trusted=TRUSTED)
    with pytest.raises(InvalidBundle, match=f"chunk {short(path.name)} is missing; .*\nFN-0303"):
        bundle.artifact("infer.onnx")


def test_unknown_names_are_refused(folder: Path) -> None:
    bundle = open_folder(folder, trusted=TRUSTED)
    with raises(InvalidBundle, f"bundle: got artifact name 'x', expected one of {sorted(ARTIFACTS)}"):
        bundle.artifact("x")
    with raises(InvalidBundle, "bundle: got signature 'x', expected one of ['evaluate', 'infer', 'train']"):
        bundle.graph("x", "onnx")
    with raises(InvalidBundle, "bundle: got graph format 'tflite', expected one of ['onnx'] for signature 'infer'"):
        bundle.graph("infer", "tflite")


@pytest.mark.parametrize(
    ("initial", "text"),
    [
        (
            encode_parameters(TensorTable.of({"a": ()}), np.zeros(1, np.float32)),
            "initial parameters have other names or shapes than in the manifest; export it again",
        ),
        (INITIAL[:-1], f"parameters: got {4 * TABLE.num_values - 1} bytes of values, expected {4 * TABLE.num_values}"),
    ],
    ids=["another table", "cut short"],
)
def test_initial_parameters_fit_the_manifest(tmp_path: Path, initial: bytes, text: str) -> None:
    artifacts = dict(ARTIFACTS) | {"initial": initial}
    artifact_records = MappingProxyType({name: artifact_of(data) for name, data in artifacts.items()})
    signed = write_bundle(
        tmp_path, dump_manifest(replace(manifest(), artifacts=artifact_records)), artifacts, PUBLISHER
    )
    with raises(InvalidBundle, f"bundle {short(signed.sha256)}: {text}"):
        open_folder(tmp_path, trusted=TRUSTED).initial_parameters()


def test_a_bundle_whose_writing_is_cut_has_no_signature(tmp_path: Path) -> None:
    """Each file is written after those that it vouches for. A folder in its place ends the writing there."""
    chunk = tmp_path / "chunks" / artifact_of(ARTIFACTS["initial"]).chunks[0].sha256
    for obstacle, missing in ((chunk, ["bundle.json", "bundle.sig"]), (tmp_path / "bundle.json", ["bundle.sig"])):
        obstacle.mkdir(parents=True)
        with pytest.raises(OSError, match="directory"):
            write_bundle(tmp_path, DATA, ARTIFACTS, PUBLISHER)
        assert [name for name in ("bundle.json", "bundle.sig") if not (tmp_path / name).exists()] == missing
        obstacle.rmdir()
    write_bundle(tmp_path, DATA, ARTIFACTS, PUBLISHER)
    assert open_folder(tmp_path, trusted=TRUSTED).manifest == manifest()


def test_a_fetched_folder_names_the_bundle_in_it(folder: Path) -> None:
    inner = folder / "bundle"
    inner.mkdir()
    (folder / "bundle.json").rename(inner / "bundle.json")
    with raises(
        InvalidBundle, f"{folder}: not a Bundle, {folder / 'bundle.json'} is missing; name the Bundle in it, {inner}"
    ):
        open_folder(folder, trusted=TRUSTED)


@pytest.mark.parametrize("name", ["bundle.json", "bundle.sig"])
def test_a_folder_that_is_no_bundle_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with raises(InvalidBundle, f"{folder}: not a Bundle, {folder / name} is missing"):
        open_folder(folder, trusted=TRUSTED)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"public_key": "a", "signature": "x"}', '{"public_key": "a", "signature": 1}']
)
def test_a_file_that_is_no_signature_is_refused(folder: Path, text: str) -> None:
    path = folder / "bundle.sig"
    path.write_text(text)
    with pytest.raises(InvalidBundle, match="FN-0303"):
        open_folder(folder, trusted=TRUSTED)


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with raises(InvalidBundle, f"{tmp_path / 'none'}: does not exist, expected the folder of a Bundle"):
        open_folder(tmp_path / "none", trusted=[])
