"""Models with lengths: trainings on batches of all lengths, against eager torch, and their predictions."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.models import app_of
from support.nightly import in_ci
from support.padded import BATCH_SIZE as PADDED_BATCH_SIZE
from support.padded import padded_app, padded_examples
from support.remote_runtime import runtime_of
from support.tags import BATCH_SIZE, NUM_TAGS, SIZES, tags_examples
from torch.nn.functional import cross_entropy

from fanin.clients.data.batching import batches
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.slots import SlotKind
from fanin.edge.runtimes.base import StepSettings
from fanin.edge.runtimes.models import model_inputs

RUNTIMES = in_ci(("onnx", "reference", "litert", "tflite"), ("onnx",))
RATE = 0.05


def loss_of(logits: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the samples; that of a sample is the mean over its labels."""
    losses = cross_entropy(logits.movedim(-1, 1), y, ignore_index=-1, reduction="none")
    sample_losses = losses.sum(1) / (y >= 0).sum(1)
    return (mask * sample_losses).sum() / mask.sum()


@pytest.mark.nightly
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_an_epoch_over_all_lengths_is_that_of_eager_torch(
    runtime: str, bundle_for: Callable[[str, str], Bundle]
) -> None:
    bundle, examples = bundle_for("tags", runtime), tags_examples(60, seed=7)
    epoch = list(batches(examples, BATCH_SIZE, np.random.default_rng(4), bundle.manifest.lengths))
    sizes = [batch.y.shape[1] for batch in epoch]
    assert {*sizes} == {*SIZES} and sizes != sorted(sizes)
    module = app_of("tags").module
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    device_runtime = runtime_of(runtime)
    step, evaluate = device_runtime.open_train(bundle), device_runtime.open_evaluate(bundle)
    state = step.begin(bundle.initial_parameters())
    for batch in epoch:
        x, y = torch.from_numpy(batch.inputs["x"]), torch.from_numpy(batch.y).long()
        optimizer.zero_grad()
        expected_loss = loss_of(module(x), y, torch.from_numpy(batch.mask))
        evaluation = evaluate(state.parameters, batch)
        assert evaluation.loss_sum == pytest.approx(expected_loss.item() * float(batch.mask.sum()), rel=1e-4)
        state, loss = step(state, batch, StepSettings(learning_rate=RATE))
        assert loss == pytest.approx(expected_loss.item(), rel=1e-4)
        expected_loss.backward()
        optimizer.step()
    expected = bundle.manifest.table.flatten({key: value.detach().numpy() for key, value in module.named_parameters()})
    assert np.all(np.abs(state.parameters - expected) <= 1e-5 * np.maximum(1.0, np.abs(expected)))
    assert np.abs(expected - bundle.initial_parameters()).max() > 0.05


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_an_epoch_over_shorter_rows_is_that_of_eager_torch_without_padding(
    runtime: str, bundle_for: Callable[[str, str], Bundle]
) -> None:
    bundle, examples = bundle_for("padded", runtime), padded_examples(10, 4, seed=7)
    module, graphs = padded_app().module, runtime_of(runtime)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    step, evaluate = graphs.open_train(bundle), graphs.open_evaluate(bundle)
    state = step.begin(bundle.initial_parameters())
    for batch in batches(examples, PADDED_BATCH_SIZE, np.random.default_rng(4), bundle.manifest.lengths):
        assert (batch.inputs["ids"][:, 4:] == 11).all() and not batch.inputs["seen"][:, 4:].any()
        ids, seen = (torch.from_numpy(batch.inputs[name][:, :4]) for name in ("ids", "seen"))
        y = torch.from_numpy(batch.y[:, :4]).long()
        optimizer.zero_grad()
        expected_loss = loss_of(module(ids, seen), y, torch.from_numpy(batch.mask))
        evaluation = evaluate(state.parameters, batch)
        assert evaluation.loss_sum == pytest.approx(expected_loss.item() * float(batch.mask.sum()), rel=1e-4)
        state, loss = step(state, batch, StepSettings(learning_rate=RATE))
        assert loss == pytest.approx(expected_loss.item(), rel=1e-4)
        expected_loss.backward()
        optimizer.step()
    expected = bundle.manifest.table.flatten({key: value.detach().numpy() for key, value in module.named_parameters()})
    np.testing.assert_allclose(state.parameters, expected, rtol=0.0, atol=1e-5)
    assert np.abs(expected - bundle.initial_parameters()).max() > 0.01


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_prediction_depends_on_the_words_and_not_on_their_padding(
    runtime: str, bundle_for: Callable[[str, str], Bundle]
) -> None:
    bundle = bundle_for("tags", runtime)
    predict = runtime_of(runtime).open_predict(bundle, bundle.initial_parameters())
    x = np.array([[3, 5, 7], [2, 4, 0]], np.int32)
    logits = predict({"x": x})
    assert logits.shape == (2, 3, NUM_TAGS)
    for length in (4, 8, 11, 16, 30):
        padded_x = np.pad(x, ((0, 0), (0, length - 3)))
        padded_logits = predict({"x": padded_x})
        # All lengths share the activation scales. Only float operators between products round differently.
        assert np.abs(padded_logits[:, :3] - logits).max() <= 0.05 * np.ptp(logits)
        assert model_inputs(bundle, {"x": padded_x}, None)["x"].shape == (2, SIZES[0])
    with pytest.raises(ValueError, match="row 1: got the length 17, expected at most 16, the longest of the model's"):
        predict({"x": np.array([[1] + [0] * 16, [1] * 17], np.int32)})


@pytest.mark.parametrize("runtime", in_ci(["onnx", "litert"], ["onnx"]))
def test_ranges_are_shared_by_all_lengths(runtime: str, bundle_for: Callable[[str, str], Bundle]) -> None:
    bundle, graph_format = bundle_for("tags", runtime), "onnx" if runtime == "onnx" else "tflite"
    names = {row.name for row in bundle.manifest.activations if row.graph_format == graph_format}
    keys = [key for key in bundle.manifest.slots if key.partition("@")[0] == graph_format]
    for slots in map(bundle.manifest.slots.__getitem__, keys):
        assert {slot.activation for slot in slots if slot.kind is SlotKind.ACTIVATION_SCALE} == names
    assert len(names) >= 2 and len(keys) == 3
    inputs = tags_examples(5, seed=3).inputs
    lows, highs = runtime_of(runtime).open_ranges(bundle, bundle.initial_parameters())(inputs)
    assert lows.shape == (5, len(names)) and np.isfinite(lows).all() and (lows <= highs).all()
