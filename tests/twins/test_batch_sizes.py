"""A Bundle with several batch sizes: each train graph against eager torch, in every runtime and for all lengths."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models import BATCH_SIZE, OTHER_SIZES, app_of, export_bundle, samples
from support.nightly import in_ci
from support.remote_runtime import runtime_of
from support.tags import tags_app, tags_examples
from torch.nn.functional import cross_entropy

from fanin.clients.data.batching import batches
from fanin.clients.data.examples import Examples
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export.module.draws import fixed_draws, values_of
from fanin.edge.runtimes.base import PaddedBatch, StepSettings
from fanin.edge.runtimes.randomness import random_key, random_ports

RUNTIMES = in_ci(("onnx", "reference", "litert", "tflite"), ("onnx",))
RATE = 0.05
KEY = random_key(1, 2, 3)


def epoch_of(size: int) -> list[PaddedBatch]:
    """Return the batches of an epoch; the last one is short."""
    x, y = samples(5 * size + 2, seed=4)
    return list(batches(Examples(inputs={"x": x}, y=y), size, np.random.default_rng(2)))


def eager(bundle: Bundle, epoch: list[PaddedBatch]) -> np.ndarray:
    """Train eager torch on these batches with the device's random draws. Return the parameters."""
    module = app_of("sizes").module
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    ports = random_ports(bundle.manifest.signatures["train"].inputs)
    for step, batch in enumerate(epoch):
        x, y, mask = (torch.from_numpy(part) for part in (batch.inputs["x"], batch.y, batch.mask))
        optimizer.zero_grad()
        with fixed_draws(ports, values_of(ports, KEY, step)):
            losses = cross_entropy(module(x), y.long(), reduction="none")
        ((mask * losses).sum() / mask.sum()).backward()
        optimizer.step()
    tensors = {key: value.detach().numpy() for key, value in module.named_parameters()}
    return bundle.manifest.table.flatten(tensors)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("size", [BATCH_SIZE, *OTHER_SIZES])
def test_each_batch_size_trains_as_eager_torch(
    size: int, runtime: str, bundle_for: Callable[[str, str], Bundle]
) -> None:
    bundle, epoch = bundle_for("sizes", runtime).at_batch(size), epoch_of(size)
    assert {len(batch.y) for batch in epoch} == {size} and {*epoch[-1].mask} <= {0.0, 1.0} != {*epoch[0].mask}
    step = runtime_of(runtime).open_train(bundle)
    state = step.begin(bundle.initial_parameters())
    for batch in epoch:
        state, _ = step(state, batch, StepSettings(learning_rate=RATE, random_key=KEY))
    expected = eager(bundle, epoch)
    assert np.all(np.abs(state.parameters - expected) <= 1e-5 * np.maximum(1.0, np.abs(expected)))
    assert np.abs(expected - bundle.initial_parameters()).max() > 0.02


@pytest.mark.nightly
def test_a_length_and_a_batch_size_choose_the_graph_together() -> None:
    app, size = replace(tags_app(), other_batch_sizes=(2,)), 2
    bundle = export_bundle(app).at_batch(size)
    epoch = list(batches(tags_examples(30, seed=7), size, np.random.default_rng(4), bundle.manifest.lengths))
    assert len({batch.y.shape for batch in epoch}) == 3
    module, step = app.module, runtime_of("onnx").open_train(bundle)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    state = step.begin(bundle.initial_parameters())
    for batch in epoch:
        x, y = torch.from_numpy(batch.inputs["x"]), torch.from_numpy(batch.y).long()
        optimizer.zero_grad()
        losses = cross_entropy(module(x).movedim(-1, 1), y, ignore_index=-1, reduction="none")
        ((torch.from_numpy(batch.mask) * losses.sum(1) / (y >= 0).sum(1)).sum() / batch.mask.sum()).backward()
        optimizer.step()
        state, _ = step(state, batch, StepSettings(learning_rate=RATE))
    expected = bundle.manifest.table.flatten({key: value.detach().numpy() for key, value in module.named_parameters()})
    assert np.all(np.abs(state.parameters - expected) <= 1e-5 * np.maximum(1.0, np.abs(expected)))
