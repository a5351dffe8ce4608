"""Bundles of a hostile operator, over gRPC and TLS: names that leave a folder, and manifests that cost much time."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import federations as f
from support.commands import Fanin, fanin_in_process, one_line
from support.hosted import Hosted

from fanin.clients.operator import CONTROL
from fanin.clients.transport import CallOptions, Connection
from fanin.edge.bundles.bundle import write_bundle
from fanin.edge.bundles.keys import BUNDLE_CONTEXT
from fanin.protos.calls import AUTHORIZATION, BEARER
from fanin.protos.chunks import MAX_CHUNK_BYTES, artifact_of, cut
from fanin.protos.errors import InvalidBundle, InvalidInput
from fanin.v1 import control_pb2 as pb
from fanin.v1 import fleet_pb2

Row = dict[str, dict[str, dict[str, object]]]
BAD_NAMES = {
    "parent": "../../x",
    "inner parent": "a/../../x",
    "absolute": "/etc/passwd",
    "empty": "",
    "NUL": "a\0b",
    "ESC": "\x1b[2J",
    "BEL": "\a",
    "bidi": "\u202eabc",
    "line feed": "a\nverified",
    "backslash": "..\\x",
}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A coordinator."""
    host = Hosted(tmp_path_factory.mktemp("hostile")).start()
    yield host
    host.stop()


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


def row_of(folder: Path) -> Row:
    """Return the manifest of a small Bundle, parsed."""
    return json.loads(f.bundle_in(folder, f.SMALL_SHAPES).signed.data)


def renamed(row: Row, kind: str, name: str) -> Row:
    """Give one artifact, parameter, slot or the model another name."""
    if kind == "name":
        return {**row, "name": name}  # type: ignore[dict-item]
    text = json.dumps(row)
    old = {"artifact": "graph", "parameter": "a", "slot": "a"}[kind]
    changed = json.loads(text)
    if kind == "slot":
        changed["slots"]["onnx"][0]["initializer"] = name
    elif kind == "parameter":
        changed["parameters"][name] = changed["parameters"].pop(old)
    else:
        changed["artifacts"][name] = changed["artifacts"].pop(old)
    return changed


class Publisher:
    """An operator's calls without the checks of the production client."""

    def __init__(self, host: Hosted, connection: Connection) -> None:
        self._connection = connection
        metadata = ((AUTHORIZATION, f"{BEARER}{host.operator_token}"),)
        self._call = CallOptions(metadata=metadata, timeout_s=60.0)

    def put(self, data: bytes, chunk_bytes: int = 1 << 20) -> None:
        """Store Chunks."""
        chunks = list(cut(data, chunk_bytes=chunk_bytes))
        requests = (pb.ChunkData(sha256=ref.sha256, data=piece).SerializeToString() for ref, piece in chunks)
        self._connection.stream_unary(f"{CONTROL}PutChunks", requests, pb.PutChunksReply.FromString, self._call)

    def publish(self, manifest: bytes) -> str:
        """Publish a Bundle by its manifest."""
        self.put(manifest)
        artifact = artifact_of(manifest)
        chunks = (fleet_pb2.ChunkRef(sha256=ref.sha256, size_bytes=ref.size_bytes) for ref in artifact.chunks)
        bundle = fleet_pb2.BundleRef(
            manifest=fleet_pb2.Artifact(sha256=artifact.sha256, size_bytes=artifact.size_bytes, chunks=chunks),
            public_key=bytes.fromhex(f.PUBLISHER.public),
            signature=f.PUBLISHER.sign(BUNDLE_CONTEXT, manifest),
        )
        request = pb.PublishBundleRequest(bundle=bundle).SerializeToString()
        reply = self._connection.unary(f"{CONTROL}PublishBundle", request, pb.PublishBundleReply.FromString, self._call)
        return reply.bundle_sha256


@pytest.fixture
def publisher(host: Hosted) -> Iterator[Publisher]:
    """An operator whose coordinator has the artifacts of the small Bundle."""
    connection = Connection(host.address, host.ca)
    operator = Publisher(host, connection)
    bundle = f.bundle_in(host.folder, f.SMALL_SHAPES)
    for name in bundle.manifest.artifacts:
        operator.put(bundle.artifact(name))
    yield operator
    connection.close()


@pytest.mark.parametrize("kind", ["artifact", "parameter", "slot", "name"])
@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
def test_a_bundle_with_a_name_that_is_no_label_is_not_published(
    host: Hosted, publisher: Publisher, kind: str, name: str
) -> None:
    manifest = json.dumps(renamed(row_of(host.folder), kind, name)).encode()
    with pytest.raises(InvalidInput) as excinfo:
        publisher.publish(manifest)
    is_empty = (kind, name) == ("parameter", "")
    text = "tensor name: got an empty one" if is_empty else f"got the name {name!r}, expected 1 to"
    assert text in str(excinfo.value)
    assert str(excinfo.value).isprintable()


def test_the_name_of_a_bundle_cannot_control_the_terminal(fanin: Fanin, host: Hosted, tmp_path: Path) -> None:
    row = renamed(row_of(host.folder), "name", "\x1b]0;owned\a\u202e")
    bundle = f.bundle_in(host.folder, f.SMALL_SHAPES)
    artifacts = {name: bundle.artifact(name) for name in bundle.manifest.artifacts}
    write_bundle(tmp_path / "bundle", json.dumps(row).encode(), artifacts, f.PUBLISHER)
    line = one_line(fanin("inspect", tmp_path / "bundle"), "inspect")
    assert "manifest: name: got the name '\\x1b]0;owned\\x07\\u202e', expected 1 to " in line


def test_a_manifest_that_names_one_chunk_a_thousand_times_is_refused_before_it_is_read(
    host: Hosted, publisher: Publisher
) -> None:
    data = np.random.default_rng(0).bytes(MAX_CHUNK_BYTES)
    publisher.put(data, MAX_CHUNK_BYTES)
    ((ref, _),) = cut(data, chunk_bytes=MAX_CHUNK_BYTES)
    row = row_of(host.folder)
    chunk = {"sha256": ref.sha256, "size_bytes": ref.size_bytes, "url": ""}
    row["artifacts"]["large"] = {
        "sha256": "ab" * 32,
        "size_bytes": 1000 * MAX_CHUNK_BYTES,
        "chunks": [chunk] * 1000,  # type: ignore[dict-item]
    }
    manifest = json.dumps(row, separators=(",", ":")).encode()
    assert len(manifest) < 120_000
    began_s = time.process_time()
    with pytest.raises(InvalidBundle, match="FN-0378"):
        publisher.publish(manifest)
    # All threads of the coordinator are in this process. Hashing 3 GB takes several seconds.
    assert time.process_time() - began_s < 2.0
