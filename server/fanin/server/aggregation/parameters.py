"""The parameters and the auxiliary tensors of a Version, as blobs and as arrays.

A model of 2 GB is read and written in consecutive slices, so that the fold needs little memory besides its sum. The
bytes are those of ``edge.tensors``: the header of the table, then the values as little-endian float32.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np

from fanin.edge.bundles.manifest import Manifest
from fanin.edge.codecs.grid import Precision
from fanin.edge.codecs.vector import VectorLayout
from fanin.edge.ranges import RANGES, ranges_table
from fanin.edge.runtimes.base import VersionValues
from fanin.edge.tensors import Float32s, TensorTable, decode_parameters
from fanin.protos.chunks import Artifact, short
from fanin.protos.errors import Corrupted, InvalidInput
from fanin.protos.messages import Version
from fanin.server.aggregation.folding import first_grid_of
from fanin.server.aggregation.rules import STRATEGY_STATE
from fanin.server.storage.protocols.files import BlobReader

SLICE_VALUES: Final = 1 << 20
"""Values of a slice of an auxiliary tensor of zeros, about as many as a Chunk has."""


def encode_parameters(table: TensorTable, pieces: Iterable[Float32s]) -> Iterator[bytes]:
    """Yield the canonical bytes of parameters, or of an auxiliary tensor, that arrive in consecutive slices."""
    yield table.header()
    for piece in pieces:
        yield piece.astype("<f4", copy=False).tobytes()


def parameter_pieces(blobs: BlobReader, version: Version, table: TensorTable) -> Iterator[Float32s]:
    """Yield the verified parameters of a Version in consecutive slices.

    Raises:
        NotFound: A Chunk is missing.
        Corrupted: A Chunk is damaged, or the parameters are those of another table.
    """
    what = f"version {version.number} of run {version.run_id}"
    problem = f"{what}: names or shapes differ from bundle {short(version.bundle_sha256)}"
    return _pieces(table, blobs.pieces(what, version.parameters), problem)


def auxiliary_pieces(blobs: BlobReader, version: Version, name: str, table: TensorTable) -> Iterator[Float32s]:
    """Yield a verified auxiliary tensor of a Version in slices: zeros for a Version without it.

    Args:
        blobs: The blobs of the Versions.
        version: The Version.
        name: The tensor.
        table: The layout of the tensor.

    Raises:
        NotFound: A Chunk is missing.
        Corrupted: A Chunk is damaged, or the tensor has another size.
    """
    what = f"version {version.number} of run {version.run_id}, auxiliary tensor {name}"
    artifact = version.auxiliary.get(name)
    if artifact is None:
        num_values = table.num_values
        sizes = (min(SLICE_VALUES, num_values - first) for first in range(0, num_values, SLICE_VALUES))
        return (np.zeros(size, np.float32) for size in sizes)
    return _pieces(table, blobs.pieces(what, artifact), f"{what}: has another size than the bundle demands")


def _pieces(table: TensorTable, chunks: Iterable[bytes], problem: str) -> Iterator[Float32s]:
    """Yield the values of canonical bytes. Raises Corrupted with ``problem`` if their table is another one."""
    header, buffered = table.header(), b""
    header_bytes = len(header)
    for chunk in chunks:
        buffered += chunk
        if header_bytes:
            if len(buffered) < header_bytes:
                continue
            if buffered[:header_bytes] != header:
                raise Corrupted(problem, code="FN-0523")
            buffered, header_bytes = buffered[header_bytes:], 0
        # A Chunk may end within a value of 4 bytes.
        size_bytes = len(buffered) // 4 * 4
        yield np.frombuffer(buffered, "<f4", count=size_bytes // 4)
        buffered = buffered[size_bytes:]


def encode_state(slices: Iterable[Float32s]) -> Iterator[bytes]:
    """Yield the bytes of a tensor of an outer state that arrives in slices: its values as little-endian float32."""
    return (values.astype("<f4", copy=False).tobytes() for values in slices)


def state_slices(blobs: BlobReader, state: Mapping[str, Artifact]) -> Mapping[str, Iterator[Float32s]]:
    """Return the tensors of an outer state by name, verified while they are read. Reading raises NotFound, Corrupted.

    No value crosses the boundary of a Chunk.
    """
    return {
        name: (np.frombuffer(chunk, "<f4") for chunk in blobs.pieces(f"outer state {name}", artifact))
        for name, artifact in state.items()
    }


def strategy_state(blobs: BlobReader, state: Mapping[str, Artifact]) -> bytes:
    """Return the verified state of a strategy in an outer state; empty without one. Raises NotFound, Corrupted."""
    artifact = state.get(STRATEGY_STATE)
    return b"" if artifact is None else blobs.read_artifact(f"outer state {STRATEGY_STATE}", artifact)


def load_parameters(blobs: BlobReader, version: Version, table: TensorTable) -> Float32s:
    """Return the verified parameters of a Version.

    Returns:
        An array of shape (num_values,).

    Raises:
        NotFound: A Chunk is missing.
        Corrupted: A Chunk is damaged, or the parameters are those of another table.
    """
    what = f"version {version.number} of run {version.run_id}"
    try:
        stored_table, flat = decode_parameters(blobs.read_artifact(what, version.parameters))
    except InvalidInput as exc:
        raise Corrupted(f"{what}: {exc}", code="FN-0523") from exc
    if stored_table != table:
        raise Corrupted(f"{what}: names or shapes differ from bundle {short(version.bundle_sha256)}", code="FN-0523")
    return flat


def load_version(blobs: BlobReader, version: Version, manifest: Manifest) -> VersionValues:
    """Return the verified parameters of a Version (num_values,), and its ranges if it has any.

    Raises:
        NotFound: A Chunk is missing.
        Corrupted: A Chunk is damaged, or a tensor is that of another Bundle.
    """
    parameters, ranges = load_parameters(blobs, version, manifest.table), None
    if RANGES in version.auxiliary:
        pieces = auxiliary_pieces(blobs, version, RANGES, ranges_table(manifest.activations))
        ranges = np.concatenate(list(pieces))
    return VersionValues(parameters=parameters, ranges=ranges)


def first_grid_from(base: Version, layout: VectorLayout, codec: Precision, blobs: BlobReader) -> tuple[int, ...]:
    """Return the first grid from a Version's parameters: an exponent for each block. Raises NotFound, Corrupted."""
    return first_grid_of(layout, parameter_pieces(blobs, base, layout.table), codec)
