"""Small Apps on 8x8 images, their Bundles, and data that they can learn."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from fanin.edge.bundles.bundle import (
    CHUNKS_FOLDER,
    Bundle,
    SignedManifest,
    folder_reader,
    read_signed_manifest,
    write_bundle,
)
from fanin.edge.bundles.keys import BUNDLE_CONTEXT, SigningKey
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.bundles.manifest_json import dump_manifest
from fanin.edge.export import App, export
from fanin.edge.export.formats.graphs import Graphs
from fanin.edge.runtimes.base import PaddedBatch
from fanin.protos.chunks import artifact_of, cut
from support.padded import padded_app
from support.several import several_app
from support.tags import tags_app

PUBLISHER = SigningKey(bytes(range(32)))
NUM_CLASSES = 4
BATCH_SIZE = 8
OTHER_SIZES = (3, 20)


class Mlp(nn.Sequential):
    """A perceptron with two layers."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES))


class Cnn(nn.Module):
    """Every kind of convolution with its own backward form, a norm and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 1),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.body(x).mean((-2, -1)))


class Noisy(nn.Module):
    """Dropout as a function, stochastic depth for each sample, and the noise of a VAE: three draws of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 16), nn.Linear(16, 16)
        self.log_variance, self.head = nn.Linear(16, 16), nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        hidden = dropout(torch.relu(self.first(x.flatten(1))), 0.25, self.training)
        branch = torch.relu(self.second(hidden))
        if self.training:
            branch = branch * branch.new_empty(len(branch), 1).bernoulli_(0.5) / 0.5
            hidden = hidden + 0.1 * torch.randn_like(hidden) * torch.exp(0.5 * self.log_variance(hidden))
        return self.head(hidden + branch)


class Rows(nn.Module):
    """Two recurrent layers with dropout between them, over the rows of the image."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.layers, self.head = cell(8, 6, num_layers=2, dropout=0.4, batch_first=True), nn.Linear(6, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.layers(x.squeeze(1))[0][:, -1])


MODULES: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {"mlp": Mlp, "cnn": Cnn, "noisy": Noisy, "lstm": partial(Rows, nn.LSTM), "gru": partial(Rows, nn.GRU)}
)


def app_of(name: str) -> App:
    """Return the App of this name, always with the same initial parameters."""
    if name == "several":
        return several_app()
    if name == "tags":
        return tags_app()
    if name == "padded":
        return padded_app()
    if name == "sizes":
        return replace(app_of("noisy"), name="sizes", other_batch_sizes=OTHER_SIZES)
    torch.manual_seed(3)
    x, _ = samples(64, seed=1)
    return App(
        name=name,
        module=MODULES[name](),
        calibration=torch.from_numpy(x),
        batch_size=BATCH_SIZE,
        num_classes=NUM_CLASSES,
    )


@cache
def bundle_of(name: str) -> Bundle:
    """Return the App's Bundle, which is exported once a process and cached in memory."""
    return export_bundle(app_of(name))


def export_bundle(app: App, formats: Sequence[str] = ("onnx",)) -> Bundle:
    """Export the App. Return its Bundle in memory."""
    with tempfile.TemporaryDirectory() as folder:
        export(app, Path(folder), PUBLISHER, formats)
        return in_memory(Path(folder))


def in_memory(folder: Path) -> Bundle:
    """Read a Bundle's folder into memory."""
    read = folder_reader(folder)
    chunks = {path.name: read(path.name) for path in (folder / CHUNKS_FOLDER).iterdir()}
    return Bundle.open(read_signed_manifest(folder), trusted=[PUBLISHER.public], read=chunks.__getitem__)


def with_artifact(bundle: Bundle, name: str, data: bytes) -> Bundle:
    """Return the Bundle with another artifact under this name, and with a valid digest and signature."""
    artifacts = {**bundle.manifest.artifacts, name: artifact_of(data)}
    return with_manifest(bundle, replace(bundle.manifest, artifacts=artifacts), data)


def with_manifest(bundle: Bundle, manifest: Manifest, *artifacts: bytes) -> Bundle:
    """Return a Bundle with another, signed manifest, the same artifacts, and these ones."""
    data = dump_manifest(manifest)
    signed = SignedManifest(data=data, public_key=PUBLISHER.public, signature=PUBLISHER.sign(BUNDLE_CONTEXT, data))
    files = [*(bundle.artifact(name) for name in bundle.manifest.artifacts), *artifacts]
    chunks = {ref.sha256: piece for artifact in files for ref, piece in cut(artifact)}
    return Bundle.open(signed, trusted=[PUBLISHER.public], read=chunks.__getitem__)


def with_train_graph(bundle: Bundle, graphs: Graphs) -> Bundle:
    """Return the Bundle with the train graph of these graphs and its ports."""
    name, (inputs, outputs) = graphs.signatures["train"], graphs.ports["train"]
    train = replace(bundle.manifest.signatures["train"], inputs=inputs, outputs=outputs)
    changed = with_artifact(bundle, name, graphs.files[name])
    return with_manifest(changed, replace(changed.manifest, signatures={**changed.manifest.signatures, "train": train}))


def write_copy(bundle: Bundle, folder: Path) -> None:
    """Write the Bundle to a folder, for another process."""
    artifacts = {name: bundle.artifact(name) for name in bundle.manifest.artifacts}
    write_bundle(folder, bundle.signed.data, artifacts, PUBLISHER)


def samples(num: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``num`` noisy 8x8 images (num, 1, 8, 8) with one stripe a class, and their labels (num,)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, NUM_CLASSES, num)
    images = 0.3 * rng.standard_normal((num, 1, 8, 8))
    for index, label in enumerate(labels):
        images[index, 0, 2 * label : 2 * label + 2] += 1.0
    return images.astype(np.float32), labels.astype(np.int32)


def batches(num: int, *, seed: int) -> Iterator[PaddedBatch]:
    """Yield ``num`` samples in batches; the last one is padded and masked."""
    x, y = samples(num, seed=seed)
    for start in range(0, num, BATCH_SIZE):
        count = len(x[start : start + BATCH_SIZE])
        batch = PaddedBatch(
            inputs={"x": np.zeros((BATCH_SIZE, 1, 8, 8), np.float32)},
            y=np.zeros(BATCH_SIZE, np.int32),
            mask=np.zeros(BATCH_SIZE, np.float32),
        )
        batch.inputs["x"][:count], batch.y[:count], batch.mask[:count] = (
            x[start : start + count],
            y[start : start + count],
            1.0,
        )
        yield batch
