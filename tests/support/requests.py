"""A coordinator that records which artifacts of its Bundle a device requests."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fanin.clients.device.contract import example_assignment
from fanin.clients.operator import ref_of
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.versions import sign_version
from fanin.protos import messages as m
from fanin.protos.chunks import cut
from support.scripted import Script
from support.values import PUBLISHER


@dataclass
class Requests(Script):
    """A coordinator with one Assignment. It serves complete Chunks."""

    def download(self, download: m.Download) -> Iterator[bytes]:
        self._call("download")
        files = [self.bundle.signed.data, *(self.bundle.artifact(name) for name in self.bundle.manifest.artifacts)]
        data = {ref.sha256: piece for file in files for ref, piece in cut(file)}[download.sha256]
        self.served_bytes[download.sha256] = self.served_bytes.get(download.sha256, 0) + len(data)
        yield data

    @property
    def graphs(self) -> set[str]:
        """Return the graphs of which a device has requested bytes."""
        artifacts = self.bundle.manifest.artifacts
        names = {
            name for name, each in artifacts.items() if any(ref.sha256 in self.served_bytes for ref in each.chunks)
        }
        return names - {self.bundle.manifest.initial}


def requests_of(bundle: Bundle, batch_size: int = 0) -> Requests:
    """Return the coordinator of a Run of this Bundle, with the Plan's batch size."""
    version = sign_version(
        PUBLISHER,
        parent=None,
        run_id="run",
        bundle_sha256=bundle.sha256,
        parameters=bundle.manifest.artifacts[bundle.manifest.initial],
    )
    work = example_assignment(bundle)
    training = replace(work.training, batch_size=batch_size)
    return Requests(bundle=bundle, work=replace(work, bundle=ref_of(bundle.signed), version=version, training=training))
