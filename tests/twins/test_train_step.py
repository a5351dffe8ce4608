"""The exported train step against eager torch: autograd and ``torch.optim.SGD`` are the slow twin."""

import numpy as np
import pytest
import torch
from support.models import app_of, batches, bundle_of
from torch.nn.functional import cross_entropy

from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import Batch, TrainState
from fanin.edge.tensors import Float32s

NUM_SAMPLES = 157
"""Twenty batches of 8, the last of 5."""
LEARNING_RATE = 0.05
TOLERANCE = 1e-5


def eager(name: str, found: list[Batch]) -> tuple[Float32s, list[float]]:
    """Parameters after these batches, and each one's mean loss; padding is cut off, not masked."""
    module = app_of(name).module
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.9)
    losses = []
    for batch in found:
        num = int(batch.mask.sum())
        optimizer.zero_grad()
        loss = cross_entropy(module(torch.from_numpy(batch.x[:num])), torch.from_numpy(batch.y[:num]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    tensors = {key: value.detach().numpy() for key, value in module.named_parameters()}
    return bundle_of(name).manifest.table.flatten(tensors), losses


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("runtime", ["onnx", "reference"])
def test_twenty_steps_end_where_eager_torch_ends(runtime: str, name: str) -> None:
    bundle, found = bundle_of(name), list(batches(NUM_SAMPLES, seed=7))
    assert [int(batch.mask.sum()) for batch in found] == [8] * 19 + [5]
    parameters = bundle.initial_parameters()
    state = TrainState(parameters=parameters, momentum=np.zeros_like(parameters))
    step, losses = open_runtime(runtime).open_train(bundle), []
    for batch in found:
        state, loss = step(state, batch, LEARNING_RATE)
        losses.append(loss)
    expected, expected_losses = eager(name, found)
    assert np.all(np.abs(state.parameters - expected) <= TOLERANCE * np.maximum(1.0, np.abs(expected)))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5, atol=1e-6)
    assert np.abs(expected - parameters).max() > 0.05


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_evaluation_is_eager_torch_in_eval_mode(name: str) -> None:
    bundle, module = bundle_of(name), app_of(name).module.eval()
    evaluate = open_runtime("onnx").open_evaluate(bundle)
    for batch in batches(30, seed=3):
        num = int(batch.mask.sum())
        with torch.no_grad():
            logits = module(torch.from_numpy(batch.x[:num]))
        labels = torch.from_numpy(batch.y[:num])
        sums = evaluate(bundle.initial_parameters(), batch)
        assert (sums.predicted[: len(labels)] == logits.argmax(dim=1).numpy()).all()
        assert sums.loss_sum == pytest.approx(cross_entropy(logits, labels, reduction="sum").item(), rel=1e-5)
