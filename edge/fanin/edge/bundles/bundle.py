"""The Bundle: what a device needs to run a model, as a signed manifest and content-addressed graphs.

``Bundle.open`` is the only way to one, and it verifies before it tells anything:

1. the signature is by a key that the caller trusts, over the exact bytes of the manifest;
2. the format number is one that we know;
3. the manifest parses into facts that agree with each other;
4. an artifact's bytes are handed out only after their SHA-256 was checked.

Bytes are read through a function from a Chunk's digest to its bytes, so a Bundle lives equally well in a
folder, a device's cache or a coordinator's blobs. In a folder it is::

    bundle.json          the manifest, exactly the bytes that were signed
    bundle.sig           JSON {"public_key": hex, "signature": hex}
    chunks/<sha256>      the Chunks of all artifacts
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fanin.edge.bundles.keys import BUNDLE_CONTEXT, SigningKey, is_signed
from fanin.edge.bundles.manifest import Manifest, parse_manifest
from fanin.edge.tensors import Float32s, decode_parameters, sha256_hex
from fanin.protos.chunks import assemble, cut, short
from fanin.protos.errors import InvalidBundle, InvalidInput

MANIFEST_FILE: Final = "bundle.json"
SIGNATURE_FILE: Final = "bundle.sig"
CHUNKS_FOLDER: Final = "chunks"
MAX_MANIFEST_BYTES: Final = 3 << 20
"""A manifest travels in one message; 3 MiB list the Chunks of some 25 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedManifest:
    """A manifest's exact bytes and who signed them."""

    data: bytes
    public_key: str
    signature: bytes

    @property
    def sha256(self) -> str:
        """The Bundle's name everywhere."""
        return sha256_hex(self.data)


class Bundle:
    """A verified Bundle: typed facts, and graphs by name."""

    def __init__(self, signed: SignedManifest, manifest: Manifest, read: Callable[[str], bytes]) -> None:
        self.signed = signed
        self.manifest = manifest
        self._read = read

    @classmethod
    def open(cls, signed: SignedManifest, *, trusted: Collection[str], read: Callable[[str], bytes]) -> "Bundle":
        """Verify the manifest and expose it.

        ``trusted`` are publishers' public keys (hex); ``read`` gives a Chunk by digest.
        Raises InvalidBundle.
        """
        # (1) Who signed, before a byte of it is parsed.
        if signed.public_key not in trusted:
            raise InvalidBundle(
                f"bundle: signed by key {short(signed.public_key)}, expected one of "
                f"{sorted(short(key) for key in trusted)}; pass the publisher's public key if you trust it"
            )
        if not is_signed(signed.public_key, signed.signature, BUNDLE_CONTEXT, signed.data):
            raise InvalidBundle(
                f"bundle {short(signed.sha256)}: the signature does not match the manifest; "
                "it was changed after it was signed, get it again from its publisher"
            )
        # (2) and (3)
        return cls(signed, parse_manifest(signed.data), read)

    @property
    def sha256(self) -> str:
        """The Bundle's name: SHA-256 of the manifest's bytes."""
        return self.signed.sha256

    def artifact(self, name: str) -> bytes:
        """An artifact's bytes, verified (4). Raises InvalidBundle."""
        artifact = self.manifest.artifacts.get(name)
        if artifact is None:
            raise InvalidBundle(
                f"bundle: got artifact name {name!r}, expected one of {sorted(self.manifest.artifacts)}"
            )
        try:
            return assemble(f"artifact {name}", artifact, self._read)
        except InvalidInput as exc:
            raise InvalidBundle(f"bundle {short(self.sha256)}: {exc}") from exc

    def graph(self, signature: str, graph_format: str) -> bytes:
        """The graph file of a Signature in ``onnx`` or another format. Raises InvalidBundle."""
        found = self.manifest.signatures.get(signature)
        if found is None:
            raise InvalidBundle(
                f"bundle: got signature {signature!r}, expected one of {sorted(self.manifest.signatures)}"
            )
        name = found.graphs.get(graph_format)
        if name is None:
            raise InvalidBundle(
                f"bundle: signature {signature!r} has graphs in {sorted(found.graphs)}, got asked for {graph_format!r}"
            )
        return self.artifact(name)

    def initial_parameters(self) -> Float32s:
        """The parameters of Version 0 (num_values,). Raises InvalidBundle."""
        try:
            table, flat = decode_parameters(self.artifact(self.manifest.initial))
        except InvalidInput as exc:
            raise InvalidBundle(f"bundle {short(self.sha256)}: {exc}") from exc
        if table != self.manifest.table:
            raise InvalidBundle(f"bundle {short(self.sha256)}: initial parameters have other names or shapes")
        return flat


def write_bundle(folder: Path, manifest: bytes, artifacts: Mapping[str, bytes], key: SigningKey) -> SignedManifest:
    """Sign a Bundle and write it into a folder."""
    signed = SignedManifest(data=manifest, public_key=key.public, signature=key.sign(BUNDLE_CONTEXT, manifest))
    save_bundle(folder, signed, artifacts)
    return signed


def save_bundle(folder: Path, signed: SignedManifest, artifacts: Mapping[str, bytes]) -> None:
    """Write a Bundle into a folder; the signature is written last, so a half-written one never opens."""
    chunks = folder / CHUNKS_FOLDER
    chunks.mkdir(parents=True, exist_ok=True)
    for data in artifacts.values():
        for ref, piece in cut(data):
            (chunks / ref.sha256).write_bytes(piece)
    (folder / MANIFEST_FILE).write_bytes(signed.data)
    text = json.dumps({"public_key": signed.public_key, "signature": signed.signature.hex()}, indent=1)
    (folder / SIGNATURE_FILE).write_text(text + "\n")


def read_signed_manifest(folder: Path) -> SignedManifest:
    """The manifest and signature of a Bundle folder, not verified yet. Raises InvalidBundle."""
    if not folder.exists():
        raise InvalidBundle(f"{folder}: does not exist, expected the folder of a Bundle")
    try:
        data = (folder / MANIFEST_FILE).read_bytes()
        row = json.loads((folder / SIGNATURE_FILE).read_bytes())
        return SignedManifest(data=data, public_key=str(row["public_key"]), signature=bytes.fromhex(row["signature"]))
    except FileNotFoundError as exc:
        raise InvalidBundle(f"{folder}: not a Bundle, {exc.filename} is missing") from exc
    except (ValueError, TypeError, LookupError) as exc:
        raise InvalidBundle(f"{folder / SIGNATURE_FILE}: not a signature file ({exc})") from exc


def folder_reader(folder: Path) -> Callable[[str], bytes]:
    """A reader of Chunks from a Bundle folder, for ``Bundle.open``."""

    def read(digest: str) -> bytes:
        try:
            return (folder / CHUNKS_FOLDER / digest).read_bytes()
        except FileNotFoundError as exc:
            raise InvalidBundle(f"{folder}: chunk {short(digest)} is missing") from exc

    return read


def open_folder(folder: Path, *, trusted: Collection[str]) -> Bundle:
    """Open a Bundle folder that one of ``trusted`` signed. Raises InvalidBundle."""
    signed = read_signed_manifest(folder)
    try:
        return Bundle.open(signed, trusted=trusted, read=folder_reader(folder))
    except InvalidBundle as exc:
        raise InvalidBundle(f"{folder}: {exc}") from exc
