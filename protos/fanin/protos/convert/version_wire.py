"""Wire form of Artifacts, Bundles, delegations, Versions and publications."""

from types import MappingProxyType

from fanin.protos.chunks import Artifact, ChunkRef
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import BundleRef, Delegation, Publication, Version
from fanin.v1 import fleet_pb2 as pb


def artifact_to_proto(artifact: Artifact) -> pb.Artifact:
    chunks = (pb.ChunkRef(sha256=ref.sha256, size_bytes=ref.size_bytes, url=ref.url) for ref in artifact.chunks)
    return pb.Artifact(sha256=artifact.sha256, size_bytes=artifact.size_bytes, chunks=chunks)


def artifact_from_proto(message: pb.Artifact) -> Artifact:
    chunks = tuple(ChunkRef(sha256=ref.sha256, size_bytes=ref.size_bytes, url=ref.url) for ref in message.chunks)
    return Artifact(sha256=message.sha256, size_bytes=message.size_bytes, chunks=chunks)


def bundle_to_proto(bundle: BundleRef) -> pb.BundleRef:
    return pb.BundleRef(
        manifest=artifact_to_proto(bundle.manifest),
        public_key=bytes.fromhex(bundle.public_key),
        signature=bundle.signature,
    )


def bundle_from_proto(message: pb.BundleRef) -> BundleRef:
    return BundleRef(
        manifest=artifact_from_proto(message.manifest),
        public_key=message.public_key.hex(),
        signature=message.signature,
    )


def delegation_to_proto(delegation: Delegation) -> pb.Delegation:
    return pb.Delegation(
        run_id=delegation.run_id,
        epoch=delegation.epoch,
        bundle_sha256=delegation.bundle_sha256,
        run_public_key=bytes.fromhex(delegation.run_public_key),
        signature=delegation.signature,
    )


def delegation_from_proto(message: pb.Delegation) -> Delegation:
    return Delegation(
        run_id=message.run_id,
        epoch=message.epoch,
        bundle_sha256=message.bundle_sha256,
        run_public_key=message.run_public_key.hex(),
        signature=message.signature,
    )


def version_to_proto(version: Version) -> pb.Version:
    return pb.Version(
        run_id=version.run_id,
        epoch=version.epoch,
        number=version.number,
        parent=version.parent,
        bundle_sha256=version.bundle_sha256,
        parameters=artifact_to_proto(version.parameters),
        public_key=bytes.fromhex(version.public_key),
        signature=version.signature,
        delegation=delegation_to_proto(version.delegation) if version.delegation else None,
        auxiliary=(
            pb.Auxiliary(name=name, tensor=artifact_to_proto(tensor)) for name, tensor in version.auxiliary.items()
        ),
    )


def version_from_proto(message: pb.Version) -> Version:
    auxiliary = {each.name: artifact_from_proto(each.tensor) for each in message.auxiliary}
    if len(auxiliary) < len(message.auxiliary):
        raise InvalidInput(f"version {message.number}: got two auxiliary tensors of one name, expected different names")
    return Version(
        run_id=message.run_id,
        epoch=message.epoch,
        number=message.number,
        parent=message.parent,
        bundle_sha256=message.bundle_sha256,
        parameters=artifact_from_proto(message.parameters),
        public_key=message.public_key.hex(),
        signature=message.signature,
        delegation=delegation_from_proto(message.delegation) if message.HasField("delegation") else None,
        auxiliary=MappingProxyType(auxiliary),
    )


def publication_to_proto(publication: Publication) -> pb.Publication:
    return pb.Publication(
        download_id=publication.download_id,
        run_id=publication.run_id,
        bundle=bundle_to_proto(publication.bundle),
        version=version_to_proto(publication.version),
    )


def publication_from_proto(message: pb.Publication) -> Publication:
    return Publication(
        download_id=message.download_id,
        run_id=message.run_id,
        bundle=bundle_from_proto(message.bundle),
        version=version_from_proto(message.version),
    )
