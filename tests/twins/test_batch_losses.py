"""Losses of a whole batch, in exported graphs and in a vectorized step, against eager torch on the real rows."""

import numpy as np
import pytest
import torch
from support.batch_losses import (
    BATCH_SIZE,
    CASES,
    batch_loss_app,
    batch_loss_bundle,
    batches_of_views,
    views_of,
)
from support.models import export_bundle
from support.nightly import in_ci
from support.remote_runtime import runtime_of
from torch import Tensor, nn

from fanin.clients.data.batching import batches_in_order
from fanin.edge.export.vectorized.step import VectorSettings, VectorStep
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch, StepSettings

RATE = 0.05
RUNS = [(name, runtime) for name in CASES for runtime in ("onnx", "litert", "tflite")]


def rows_of(module: nn.Module, batch: PaddedBatch) -> tuple[dict[str, Tensor], Tensor]:
    """Return the output and the targets of the real rows."""
    num = int(batch.mask.sum())
    output = module(**{key: torch.from_numpy(array[:num]) for key, array in batch.inputs.items()})
    return dict(zip("012", output, strict=True)), torch.from_numpy(batch.y[:num].astype(np.int64))


def plain_loss(name: str, module: nn.Module, batch: PaddedBatch) -> Tensor:
    """Return the loss of the real rows, as its package writes it."""
    case, (output, y) = CASES[name], rows_of(module, batch)
    if case.is_undefined_for_one and len(y) == 1:
        return case.masked(output, y, torch.ones(1))
    return case.plain(output, y)


@pytest.mark.parametrize("run", in_ci(RUNS, [("simclr", "onnx"), ("clip", "litert")]))
def test_steps_with_full_and_partial_batches_are_those_of_eager_torch(run: tuple[str, str]) -> None:
    name, runtime = run
    bundle = batch_loss_bundle(name, ("onnx",) if runtime == "onnx" else ("onnx", "tflite"))
    module = batch_loss_app(name).module
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    step, evaluate = runtime_of(runtime).open_train(bundle), runtime_of(runtime).open_evaluate(bundle)
    state = step.begin(bundle.initial_parameters())
    for batch in batches_of_views():
        num = int(batch.mask.sum())
        expected_loss = plain_loss(name, module, batch)
        sums = evaluate(state.parameters, batch)
        assert sums.loss_sum == pytest.approx(num * expected_loss.item(), rel=1e-4, abs=1e-5)
        state, value = step(state, batch, StepSettings(learning_rate=RATE))
        optimizer.zero_grad()
        expected_loss.backward()
        for each in module.parameters():
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        optimizer.step()
        assert value == pytest.approx(expected_loss.item(), rel=1e-4, abs=1e-6)
        expected = bundle.manifest.table.flatten(
            {key: each.detach().numpy() for key, each in module.named_parameters()}
        )
        assert np.all(np.abs(state.parameters - expected) <= 1e-5 * np.maximum(1.0, np.abs(expected)))
    assert np.abs(expected - bundle.initial_parameters()).max() > 0.001


@pytest.mark.parametrize("name", in_ci(CASES, ("simclr", "supervised")))
def test_a_vectorized_step_is_that_of_each_client(name: str) -> None:
    step, bundle = VectorStep(batch_loss_app(name)), batch_loss_bundle(name, ("onnx",))
    initial, batches = bundle.initial_parameters(), batches_of_views()[1:]
    settings = VectorSettings(
        learning_rates=[RATE] * 3, proximal_weight=0.0, anchor=initial, controls=[None] * 3, random_keys=[0, 1, 2]
    )
    state, losses = step(step.begin(initial, 3), batches, settings)
    graph_step = open_runtime("onnx").open_train(bundle)
    for batch, actual, loss in zip(batches, step.parameters(state), losses, strict=True):
        expected, expected_loss = graph_step(graph_step.begin(initial), batch, StepSettings(learning_rate=RATE))
        np.testing.assert_allclose(actual, expected.parameters, rtol=0, atol=1e-6)
        assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)


def test_the_content_of_padding_changes_no_bit_of_a_step() -> None:
    bundle = batch_loss_bundle("simclr", ("onnx",))
    step = open_runtime("onnx").open_train(bundle)
    batch = batches_of_views()[2]
    rng, num = np.random.default_rng(3), int(batch.mask.sum())
    inputs = {name: array.copy() for name, array in batch.inputs.items()}
    for array in inputs.values():
        array[num:] = rng.normal(size=array[num:].shape)
    other = PaddedBatch(inputs=inputs, y=batch.y, mask=batch.mask)
    begin = step.begin(bundle.initial_parameters())
    first, second = (step(begin, each, StepSettings(learning_rate=RATE))[0] for each in (batch, other))
    np.testing.assert_allclose(first.parameters, second.parameters, rtol=0, atol=1e-7)


def test_a_batch_without_rows_has_no_loss_and_moves_nothing() -> None:
    bundle = batch_loss_bundle("vicreg", ("onnx",))
    step, batch = open_runtime("onnx").open_train(bundle), batches_of_views()[0]
    empty = PaddedBatch(inputs=batch.inputs, y=batch.y, mask=np.zeros(BATCH_SIZE, np.float32))
    initial = bundle.initial_parameters()
    state, loss = step(step.begin(initial), empty, StepSettings(learning_rate=RATE))
    assert loss == 0.0 and np.array_equal(state.parameters, initial)
    assert open_runtime("onnx").open_evaluate(bundle)(initial, empty).loss_sum == 0.0


def test_another_batch_size_compares_as_many_samples() -> None:
    bundle = export_bundle(batch_loss_app("simclr", other_batch_sizes=(4,))).at_batch(4)
    module = batch_loss_app("simclr").module
    step = open_runtime("onnx").open_train(bundle)
    batch = next(batches_in_order(views_of(4), 4))
    _, value = step(step.begin(bundle.initial_parameters()), batch, StepSettings(learning_rate=RATE))
    assert value == pytest.approx(plain_loss("simclr", module, batch).item(), rel=1e-5)
