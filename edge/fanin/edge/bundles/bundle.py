"""The Bundle: everything that a device needs to run a model, as a signed manifest and content-addressed files.

``Bundle.open`` verifies a Bundle in this order, before it exposes anything:

1. the signature is by a key that the caller trusts, over the exact bytes of the manifest;
2. the format number is known;
3. the manifest parses into facts that agree with each other;
4. on each access, the SHA-256 of an artifact matches before its bytes are returned.

A Bundle reads its Chunks through a function from a digest to bytes. So it can be stored in a folder, in a device's
cache or in a coordinator's blob store. In a folder it is::

    bundle.json          the manifest, exactly the bytes that were signed
    bundle.sig           JSON {"public_key": hex, "signature": hex}
    chunks/<sha256>      the Chunks of all artifacts
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from fanin.edge.bundles.keys import BUNDLE_CONTEXT, SigningKey, is_signed
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.bundles.manifest_json import parse_manifest
from fanin.edge.tensors import Float32s, TensorTable, decode_parameters, sha256_hex
from fanin.protos.chunks import assemble, cut, short
from fanin.protos.errors import InvalidBundle, InvalidInput

MANIFEST_FILE: Final = "bundle.json"
SIGNATURE_FILE: Final = "bundle.sig"
CHUNKS_FOLDER: Final = "chunks"
FETCHED_FOLDER: Final = "bundle"
"""The Bundle in a folder that ``fanin fetch`` wrote."""
MAX_MANIFEST_BYTES: Final = 3 << 20
"""A manifest travels in one message. 3 MiB are enough to list the Chunks of about 25 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedManifest:
    """The exact bytes of a manifest, the signer's public key and the signature."""

    data: bytes
    public_key: str
    signature: bytes

    @property
    def sha256(self) -> str:
        """The name of the Bundle: SHA-256 of the manifest's bytes."""
        return sha256_hex(self.data)


class Bundle:
    """A verified Bundle: typed facts, and graphs by name."""

    def __init__(self, signed: SignedManifest, manifest: Manifest, read: Callable[[str], bytes]) -> None:
        self.signed = signed
        self.manifest = manifest
        self._read = read

    @classmethod
    def open(cls, signed: SignedManifest, *, trusted: Collection[str], read: Callable[[str], bytes]) -> "Bundle":
        """Verify a manifest and return its Bundle.

        Args:
            signed: The manifest and its signature.
            trusted: Public keys (hex) of the publishers that the caller trusts.
            read: Returns the bytes of a Chunk by digest.

        Raises:
            InvalidBundle: The signer is not trusted, the signature does not match, or the manifest is not valid.
        """
        # (1) The signature comes first: no byte of the manifest is parsed before.
        if signed.public_key not in trusted:
            raise InvalidBundle(
                f"bundle: signed by key {short(signed.public_key)}, expected one of "
                f"{sorted(short(key) for key in trusted)}; pass that publisher's public key (--publisher) if "
                "you trust it",
                code="FN-0301",
            )
        if not is_signed(signed.public_key, signed.signature, BUNDLE_CONTEXT, signed.data):
            raise InvalidBundle(
                f"bundle {short(signed.sha256)}: the signature does not match the manifest; "
                "it was changed after it was signed; download it again from its publisher",
                code="FN-0302",
            )
        # (2) and (3)
        return cls(signed, parse_manifest(signed.data), read)

    @cached_property
    def sha256(self) -> str:
        """The name of the Bundle: SHA-256 of the manifest's bytes."""
        return self.signed.sha256

    def at(self, size: int) -> "Bundle":
        """Return the Bundle with the graphs for one of its ``lengths`` alone."""
        return Bundle(self.signed, self.manifest.at(size), self._read)

    def at_batch(self, size: int) -> "Bundle":
        """Return the Bundle for training by batches of one of its sizes; 0 for its own. Raises InvalidInput."""
        manifest = self.manifest.at_batch(size)
        return self if manifest is self.manifest else Bundle(self.signed, manifest, self._read)

    def artifact(self, name: str) -> bytes:
        """Return the verified bytes of an artifact (4). Raises InvalidBundle."""
        artifact = self.manifest.artifacts.get(name)
        if artifact is None:
            raise InvalidBundle(
                f"bundle: got artifact name {name!r}, expected one of {sorted(self.manifest.artifacts)}", code="FN-0325"
            )
        try:
            return assemble(f"artifact {name}", artifact, self._read)
        except InvalidInput as exc:
            raise InvalidBundle(f"bundle {short(self.sha256)}: {exc}", code=exc.code) from exc

    def graph(self, signature: str, graph_format: str) -> bytes:
        """Return the verified graph file of a Signature in a format such as ``onnx``. Raises InvalidBundle."""
        entry = self.manifest.signatures.get(signature)
        if entry is None:
            raise InvalidBundle(
                f"bundle: got signature {signature!r}, expected one of {sorted(self.manifest.signatures)}",
                code="FN-0325",
            )
        name = entry.graphs.get(graph_format)
        if name is None:
            raise InvalidBundle(
                f"bundle: got graph format {graph_format!r}, expected one of {sorted(entry.graphs)} "
                f"for signature {signature!r}",
                code="FN-0325",
            )
        return self.artifact(name)

    def initial_parameters(self) -> Float32s:
        """Return the parameters of Version 0 (num_values,). Raises InvalidBundle."""
        return self._initial("initial parameters", self.manifest.initial, self.manifest.table)

    def initial_local(self) -> Float32s:
        """Return the personal parameters that every device starts from (num_local_values,); empty if there are none.

        Raises:
            InvalidBundle: The artifact is damaged or has other tensors.
        """
        local = self.manifest.local
        if local is None:
            return np.empty(0, np.float32)
        return self._initial("initial personal parameters", local.initial, local.table)

    def completed(self, parameters: Float32s) -> Float32s:
        """Return all parameters of the graphs (num_model_values,), with the initial values of the personal ones.

        Args:
            parameters: The parameters of a Version (num_values,). Without personal parameters they are the result.

        Raises:
            InvalidBundle: The artifact of the personal parameters is damaged.
            ValueError: ``parameters`` has another length.
        """
        return self.manifest.join(parameters, self.initial_local())

    def _initial(self, what: str, name: str, expected: TensorTable) -> Float32s:
        try:
            table, flat = decode_parameters(self.artifact(name))
            if table == expected:
                expected.check_values(flat)
        except InvalidInput as exc:
            raise InvalidBundle(f"bundle {short(self.sha256)}: {exc}", code=exc.code) from exc
        if table != expected:
            raise InvalidBundle(
                f"bundle {short(self.sha256)}: {what} have other names or shapes than in the manifest; export it again",
                code="FN-0357",
            )
        return flat


def write_bundle(folder: Path, manifest: bytes, artifacts: Mapping[str, bytes], key: SigningKey) -> SignedManifest:
    """Sign a manifest and write the Bundle into a folder."""
    signed = SignedManifest(data=manifest, public_key=key.public, signature=key.sign(BUNDLE_CONTEXT, manifest))
    save_bundle(folder, signed, artifacts)
    return signed


def save_bundle(folder: Path, signed: SignedManifest, artifacts: Mapping[str, bytes]) -> None:
    """Write a signed Bundle into a folder. The signature is written last, so an incomplete Bundle does not open."""
    chunks = folder / CHUNKS_FOLDER
    chunks.mkdir(parents=True, exist_ok=True)
    for data in artifacts.values():
        for ref, chunk in cut(data):
            (chunks / ref.sha256).write_bytes(chunk)
    (folder / MANIFEST_FILE).write_bytes(signed.data)
    text = json.dumps({"public_key": signed.public_key, "signature": signed.signature.hex()}, indent=1)
    (folder / SIGNATURE_FILE).write_text(text + "\n", encoding="utf-8")


def read_signed_manifest(folder: Path) -> SignedManifest:
    """Read the manifest and the signature of a Bundle folder without verifying them. Raises InvalidBundle."""
    if not folder.exists():
        raise InvalidBundle(f"{folder}: does not exist, expected the folder of a Bundle", code="FN-0303")
    try:
        data = (folder / MANIFEST_FILE).read_bytes()
        row = json.loads((folder / SIGNATURE_FILE).read_bytes())
        return SignedManifest(data=data, public_key=str(row["public_key"]), signature=bytes.fromhex(row["signature"]))
    except FileNotFoundError as exc:
        inner = folder / FETCHED_FOLDER
        advice = f"; name the Bundle in it, {inner}" if (inner / MANIFEST_FILE).is_file() else ""
        raise InvalidBundle(f"{folder}: not a Bundle, {exc.filename} is missing{advice}", code="FN-0303") from exc
    except (ValueError, TypeError, LookupError) as exc:
        raise InvalidBundle(f"{folder / SIGNATURE_FILE}: not a signature file ({exc})", code="FN-0303") from exc


def folder_reader(folder: Path) -> Callable[[str], bytes]:
    """Return a function that reads Chunks from a Bundle folder, for ``Bundle.open``."""

    def read(digest: str) -> bytes:
        try:
            return (folder / CHUNKS_FOLDER / digest).read_bytes()
        except FileNotFoundError as exc:
            raise InvalidBundle(
                f"{folder}: chunk {short(digest)} is missing; download or export the Bundle again", code="FN-0303"
            ) from exc

    return read


def open_folder(folder: Path, *, trusted: Collection[str]) -> Bundle:
    """Verify and open a Bundle folder; ``trusted`` has public keys (hex). Raises InvalidBundle."""
    signed = read_signed_manifest(folder)
    try:
        return Bundle.open(signed, trusted=trusted, read=folder_reader(folder))
    except InvalidBundle as exc:
        raise InvalidBundle(f"{folder}: {exc}", code=exc.code) from exc
