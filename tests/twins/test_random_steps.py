"""Models with dropout, stochastic depth and noise on every runtime, against eager torch with the same draws."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models import BATCH_SIZE, app_of, batches
from support.remote_runtime import runtime_of
from torch.nn.functional import cross_entropy

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.contract import example_assignment
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.trainer import RuntimeTrainer, training_batches
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export.module.draws import fixed_draws, values_of
from fanin.edge.runtimes.base import PaddedBatch, StepSettings
from fanin.edge.runtimes.randomness import random_key, random_ports
from fanin.edge.tensors import Float32s

RUNTIMES = ("onnx", "reference", "litert", "tflite")
RATE = 0.05
KEY = random_key(1, 2, 3)


def eager(name: str, bundle: Bundle, epoch: list[PaddedBatch]) -> Float32s:
    """Train eager torch on these batches. The draws are those of the padded batch; the mask excludes the padding."""
    module = app_of(name).module
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


def train(runtime: str, bundle: Bundle, epoch: list[PaddedBatch], key: int) -> Float32s:
    step = runtime_of(runtime).open_train(bundle)
    state = step.begin(bundle.initial_parameters())
    for batch in epoch:
        state, _ = step(state, batch, StepSettings(learning_rate=RATE, random_key=key))
    return state.parameters


@pytest.mark.parametrize(
    ("name", "runtime"),
    [
        pytest.param(name, runtime, marks=() if (name, runtime) == ("noisy", "onnx") else pytest.mark.nightly)
        for name in ("noisy", "lstm", "gru")
        for runtime in RUNTIMES
    ],
)
def test_twenty_steps_with_the_same_draws_end_where_eager_torch_ends(
    name: str, runtime: str, bundle_for: Callable[[str, str], Bundle]
) -> None:
    bundle, epoch = bundle_for(name, runtime), list(batches(157, seed=7))
    expected = eager(name, bundle, epoch)
    actual = train(runtime, bundle, epoch, KEY)
    assert np.all(np.abs(actual - expected) <= 1e-5 * np.maximum(1.0, np.abs(expected)))
    assert np.abs(train(runtime, bundle, epoch, KEY + 1) - expected).max() > 1e-3


def test_a_device_draws_from_seed_partition_round_and_step(bundle_for: Callable[[str, str], Bundle]) -> None:
    bundle, runtime = bundle_for("noisy", "onnx"), runtime_of("onnx")
    x = np.concatenate([batch.inputs["x"] for batch in batches(32, seed=2)])
    y = np.concatenate([batch.y for batch in batches(32, seed=2)])
    examples = Examples(inputs={"x": x}, y=y)
    store = MemoryStore(
        train=examples, validation=Examples(inputs={"x": x[:BATCH_SIZE]}, y=y[:BATCH_SIZE]), partition=5
    )
    model = OpenedModel(bundle=bundle, parameters=bundle.initial_parameters())
    assignment = replace(example_assignment(bundle), round=4)
    change = RuntimeTrainer(runtime, store).train(model, assignment, lambda: None)
    training = assignment.training
    step = runtime.open_train(bundle)
    state = step.begin(model.parameters)
    settings = StepSettings(
        learning_rate=training.learning_rate,
        proximal_weight=training.proximal_weight,
        random_key=random_key(training.seed, 5, 4),
    )
    for batch in training_batches(store, model, assignment):
        state, _ = step(state, batch, settings)
    assert np.array_equal(change.values, (state.parameters.astype(np.float64) - model.parameters).astype(np.float32))
