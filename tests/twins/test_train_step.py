"""The exported train step against eager torch, with autograd and ``torch.optim.SGD`` as the reference."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.models import app_of, batches
from support.remote_runtime import runtime_of
from torch.nn.functional import cross_entropy

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.base import PaddedBatch, StepSettings
from fanin.edge.tensors import Float32s

RUNTIMES = ("onnx", "reference", "litert", "tflite")
NUM_SAMPLES = 157
"""The samples of twenty batches of 8, the last of which has 5."""
LEARNING_RATE = 0.05
TOLERANCE = 1e-5


def eager(bundle: Bundle, epoch: list[PaddedBatch]) -> tuple[Float32s, list[float]]:
    """Train eager torch on these batches without padding rows. Return the parameters and each batch's mean loss."""
    module = app_of(bundle.manifest.name).module
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.9)
    losses = []
    for batch in epoch:
        num = int(batch.mask.sum())
        optimizer.zero_grad()
        loss = cross_entropy(module(torch.from_numpy(batch.inputs["x"][:num])), torch.from_numpy(batch.y[:num]).long())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    tensors = {key: value.detach().numpy() for key, value in module.named_parameters()}
    return bundle.manifest.table.flatten(tensors), losses


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_twenty_steps_end_where_eager_torch_ends(
    runtime: str, name: str, both_formats: Callable[[str], Bundle]
) -> None:
    bundle, epoch = both_formats(name), list(batches(NUM_SAMPLES, seed=7))
    assert [int(batch.mask.sum()) for batch in epoch] == [8] * 19 + [5]
    parameters = bundle.initial_parameters()
    step, losses = runtime_of(runtime).open_train(bundle), []
    state = step.begin(parameters)
    for batch in epoch:
        state, loss = step(state, batch, StepSettings(learning_rate=LEARNING_RATE))
        losses.append(loss)
    expected, expected_losses = eager(bundle, epoch)
    assert np.all(np.abs(state.parameters - expected) <= TOLERANCE * np.maximum(1.0, np.abs(expected)))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5, atol=1e-6)
    assert np.abs(expected - parameters).max() > 0.05


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_evaluation_is_eager_torch_in_eval_mode(runtime: str, name: str, both_formats: Callable[[str], Bundle]) -> None:
    bundle, module = both_formats(name), app_of(name).module.eval()
    evaluate = runtime_of(runtime).open_evaluate(bundle)
    for batch in batches(30, seed=3):
        num = int(batch.mask.sum())
        with torch.no_grad():
            logits = module(torch.from_numpy(batch.inputs["x"][:num]))
        labels = torch.from_numpy(batch.y[:num]).long()
        sums = evaluate(bundle.initial_parameters(), batch)
        assert (sums.predicted[: len(labels)] == logits.argmax(dim=1).numpy()).all()
        assert sums.loss_sum == pytest.approx(cross_entropy(logits, labels, reduction="sum").item(), rel=1e-5)
