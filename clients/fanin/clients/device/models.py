"""The verification of a downloaded model: which Chunks a Publication needs, and how they are opened.

The order is the security property:

1. The manifest is verified before a graph is downloaded.
2. The Version is verified before its parameters and auxiliary tensors are downloaded.
3. The parameters and auxiliary tensors are verified before they are used.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from fanin.edge.bundles.bundle import MAX_MANIFEST_BYTES, Bundle, SignedManifest
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.bundles.versions import check_version
from fanin.edge.codecs.vector import VectorLayout
from fanin.edge.ranges import RANGES, grids_of, ranges_table
from fanin.edge.runtimes.models import PREPROCESS
from fanin.edge.signatures import DEVICE_SIGNATURES
from fanin.edge.tensors import Float32s, TensorTable, decode_parameters
from fanin.protos.chunks import Artifact, ChunkRef, assemble
from fanin.protos.errors import InvalidBundle, InvalidInput, InvalidVersion
from fanin.protos.messages import Order, Publication, Training


class SavedTraining(Protocol):
    """The state of an unfinished training, which survives the end of the process. ``storage.trainings`` has it.

    A trainer writes its state now and then, and reads it when it begins. It returns the same bits as without.
    """

    def read(self) -> memoryview | None:
        """Return the content that was written last for this Assignment; None to begin anew."""
        ...

    def write(self, pieces: Sequence[bytes | memoryview]) -> bool:
        """Replace the content durably. Return False if that is not possible now; the training continues."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A verified Bundle and the tensors of a verified Version.

    Attributes:
        bundle: The Bundle.
        parameters: The parameters of the Version (num_values,).
        local: The personal parameters of the device (num_local_values,). None: the initial values of the Bundle. With
            Ditto, the device's copy of all parameters (num_values,), laid out by ``own_table``. None: the Version's.
        auxiliary: The auxiliary tensors that the stages of the Assignment read (num_values,), by name.
        ranges: The ranges of the Version's activations (2 * activations,). None: those of the Bundle.
        inputs: Inputs of the train graph that the stages set (num_values,), by kind: ``control`` is added to the
            gradient of each step.
        device_seed: Seed of what the device's own code draws in the training (32 bytes), from the device's secret. None
            in a simulation, and outside of a training. ``app_seed`` has a seed for both.
        saved: The state of this training that an earlier process saved, and the place for the next one. None in a
            simulation, and outside of a training.
    """

    bundle: Bundle
    parameters: Float32s
    local: Float32s | None = None
    auxiliary: Mapping[str, Float32s] = field(default_factory=lambda: MappingProxyType({}))
    ranges: Float32s | None = None
    inputs: Mapping[str, Float32s] = field(default_factory=lambda: MappingProxyType({}))
    device_seed: bytes | None = field(default=None, repr=False)
    saved: SavedTraining | None = field(default=None, repr=False)

    def values(self) -> Float32s:
        """Return all parameters of the graphs (num_model_values,): the Version's and the personal ones.

        Raises:
            InvalidBundle: The initial values of the Bundle are damaged.
        """
        if self.local is None or self.bundle.manifest.local is None:
            return self.bundle.completed(self.parameters)
        return self.bundle.manifest.join(self.parameters, self.local)

    def own_values(self) -> Float32s:
        """Return the parameters of the device's predictions: its copy under Ditto, else ``values()``.

        Raises:
            InvalidBundle: The initial values of the Bundle are damaged.
        """
        return self.values() if self.local is None or self.bundle.manifest.local is not None else self.local

    def kept_values(self, training: Training) -> Float32s | None:
        """Return what a training of the device begins with and never sends; None if it has no such values.

        Raises:
            InvalidBundle: The initial values of the Bundle are damaged.
        """
        if self.bundle.manifest.local is not None:
            return self.bundle.manifest.split(self.values())[1]
        if not keeps_copy(self.bundle, training):
            return None
        return self.parameters if self.local is None else self.local


def keeps_copy(bundle: Bundle, training: Training) -> bool:
    """Return whether a device keeps a copy of all parameters in trainings with these settings: Ditto."""
    return training.ditto_weight > 0.0 and training.personal_epochs > 0 and bundle.manifest.local is None


def own_table(bundle: Bundle) -> TensorTable:
    """Return the layout of ``OpenedModel.local``: the personal parameters, or without any those of Ditto's copy."""
    local = bundle.manifest.local
    return bundle.manifest.table if local is None else local.table


def manifest_chunks(publication: Publication) -> tuple[ChunkRef, ...]:
    """Return the Chunks of the manifest, which are downloaded first. Raises InvalidBundle if it is too large."""
    manifest = publication.bundle.manifest
    if manifest.size_bytes > MAX_MANIFEST_BYTES:
        raise InvalidBundle(
            f"bundle: got a manifest of {manifest.size_bytes} bytes, expected at most {MAX_MANIFEST_BYTES}",
            code="FN-0828",
        )
    return manifest.chunks


def open_bundle(publication: Publication, trusted: Collection[str], read: Callable[[str], bytes]) -> Bundle:
    """Open the Publication's Bundle and verify its manifest. Raises InvalidBundle."""
    ref = publication.bundle
    try:
        data = assemble("manifest", ref.manifest, read)
    except InvalidInput as exc:
        raise InvalidBundle(f"bundle: {exc}", code=exc.code) from exc
    signed = SignedManifest(data=data, public_key=ref.public_key, signature=ref.signature)
    return Bundle.open(signed, trusted=trusted, read=read)


def trained_files(bundle: Bundle, graph_format: str, batch_size: int, sizes: Collection[int]) -> frozenset[str]:
    """Return the artifacts that a device needs for a training, in addition to the parameters of the Version.

    Args:
        bundle: The verified Bundle. It may have graphs for other batch sizes and for other lengths.
        graph_format: The format of the device's runtime.
        batch_size: Batch size of the Assignment; 0 for the Bundle's own.
        sizes: The lengths that the device's rows need. Ignored for a Bundle without lengths.

    Raises:
        InvalidInput: The Bundle has no train graph for the batch size.
    """
    return _files(bundle.manifest.at_batch(batch_size), graph_format, DEVICE_SIGNATURES, sizes)


def served_files(bundle: Bundle, graph_format: str) -> frozenset[str]:
    """Return the artifacts that a device needs for predictions, in addition to the parameters of the Version.

    ``infer`` of all lengths is among them, because an app may predict rows of any length at any time.
    """
    lengths = bundle.manifest.lengths
    return _files(bundle.manifest, graph_format, ("infer",), () if lengths is None else lengths.sizes)


def _files(manifest: Manifest, graph_format: str, kinds: Collection[str], sizes: Collection[int]) -> frozenset[str]:
    lengths = manifest.lengths
    names = {*kinds} if lengths is None else {lengths.signature(kind, size) for kind in kinds for size in sizes}
    return manifest.files(graph_format, {*names, PREPROCESS})


def file_chunks(bundle: Bundle, names: Collection[str]) -> tuple[ChunkRef, ...]:
    """Return the Chunks of artifacts."""
    return tuple(ref for name in sorted(names) for ref in bundle.manifest.artifacts[name].chunks)


def verify_version(publication: Publication, bundle: Bundle, seen: Order) -> None:
    """Verify the Publication's Version before its parameters are downloaded.

    Args:
        publication: Names the Version.
        bundle: Its verified Bundle.
        seen: The highest (epoch, number) that this device has verified in the Run.

    Raises:
        InvalidVersion: A signature or a number is wrong, or the parameters have the wrong size.
    """
    version, table = publication.version, bundle.manifest.table
    check_version(
        version,
        run_id=publication.run_id,
        bundle_sha256=bundle.sha256,
        publisher=bundle.signed.public_key,
        seen=seen,
    )
    _check_size(_what(publication), "parameters", version.parameters, table)


def auxiliary_chunks(publication: Publication, bundle: Bundle, names: Sequence[str]) -> tuple[ChunkRef, ...]:
    """Return the Chunks of the auxiliary tensors of these names, before they are downloaded.

    Args:
        publication: Names the Version, which is verified.
        bundle: Its verified Bundle.
        names: The names.

    Raises:
        InvalidVersion: A tensor is missing or has the wrong size.
    """
    artifacts, what = publication.version.auxiliary, _what(publication)
    for name in names:
        if name not in artifacts:
            raise InvalidVersion(
                f"{what}: got the auxiliary tensors {sorted(artifacts)}, expected {name!r}, which the stages of the "
                "assignment read",
                code="FN-0831",
            )
        _check_size(what, f"the auxiliary tensor {name!r}", artifacts[name], _auxiliary_table(bundle, name))
    return tuple(ref for name in names for ref in artifacts[name].chunks)


def open_parameters(publication: Publication, bundle: Bundle, read: Callable[[str], bytes]) -> Float32s:
    """Return the Version's parameters (num_values,), verified. Raises InvalidVersion."""
    return _open(_what(publication), publication.version.parameters, bundle.manifest.table, read)


def open_auxiliary(publication: Publication, bundle: Bundle, name: str, read: Callable[[str], bytes]) -> Float32s:
    """Return an auxiliary tensor (num_values,), verified. Raises InvalidVersion."""
    what = f"{_what(publication)}: auxiliary tensor {name!r}"
    return _open(what, publication.version.auxiliary[name], _auxiliary_table(bundle, name), read)


def _what(publication: Publication) -> str:
    return f"version {publication.version.number} of run {publication.run_id}"


def open_ranges(publication: Publication, bundle: Bundle, read: Callable[[str], bytes]) -> Float32s | None:
    """Return the ranges of the Version's activations, verified; None if it has none. Raises InvalidVersion."""
    if RANGES not in publication.version.auxiliary:
        return None
    ranges = open_auxiliary(publication, bundle, RANGES, read)
    grids_of(bundle.manifest.activations, ranges)
    return ranges


def _auxiliary_table(bundle: Bundle, name: str) -> TensorTable:
    if name == RANGES:
        return ranges_table(bundle.manifest.activations)
    return VectorLayout(table=bundle.manifest.table).auxiliary


def _check_size(version: str, what: str, artifact: Artifact, table: TensorTable) -> None:
    # The signature covers only the digest. An attacker who changed the list of Chunks could fill this disk.
    size_bytes, expected_bytes = artifact.size_bytes, len(table.header()) + 4 * table.num_values
    if size_bytes != expected_bytes:
        raise InvalidVersion(
            f"{version}: got {what} of {size_bytes} bytes, expected {expected_bytes} by the bundle's manifest",
            code="FN-0828",
        )


def _open(what: str, artifact: Artifact, expected: TensorTable, read: Callable[[str], bytes]) -> Float32s:
    try:
        table, flat = decode_parameters(assemble(what, artifact, read))
    except InvalidInput as exc:
        raise InvalidVersion(f"{what}: {exc}" if what not in str(exc) else str(exc), code=exc.code) from exc
    if table != expected:
        raise InvalidVersion(f"{what}: names or shapes differ from the bundle's", code="FN-0828")
    return flat
