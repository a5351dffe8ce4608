"""A model of three inputs with dropout on every runtime, against eager torch with the same draws."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import PUBLISHER, app_of, export_bundle
from support.nightly import in_ci
from support.remote_runtime import runtime_of
from support.several import BATCH_SIZE, several_examples
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fanin.clients.data.batching import batches_in_order
from fanin.edge.assembly.assemble import AssembledGraphs, assemble
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import Adapters, Recipe
from fanin.edge.export.formats.graphs import FORMATS
from fanin.edge.export.module.draws import fixed_draws, values_of
from fanin.edge.export.standalone.floats import float_models
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch, StepSettings
from fanin.edge.runtimes.models import run_rows
from fanin.edge.runtimes.randomness import random_key, random_ports
from fanin.edge.signatures import DEVICE_SIGNATURES

RUNTIMES = in_ci(("onnx", "reference", "litert", "tflite"), ("onnx",))
RATE = 0.05
KEY = random_key(1, 2, 3)


def logits_of(module: nn.Module, batch: PaddedBatch) -> Tensor:
    return module(**{name: torch.from_numpy(array) for name, array in batch.inputs.items()})["logits"]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_twenty_steps_and_an_evaluation_are_those_of_eager_torch(
    runtime: str, bundle_for: Callable[[str, str], Bundle]
) -> None:
    bundle, epoch = bundle_for("several", runtime), list(batches_in_order(several_examples(157, seed=7), BATCH_SIZE))
    module = app_of("several").module
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    ports = random_ports(bundle.manifest.signatures["train"].inputs)
    step = runtime_of(runtime).open_train(bundle)
    state = step.begin(bundle.initial_parameters())
    for number, batch in enumerate(epoch):
        state, loss = step(state, batch, StepSettings(learning_rate=RATE, random_key=KEY))
        y, mask = torch.from_numpy(batch.y).long(), torch.from_numpy(batch.mask)
        optimizer.zero_grad()
        with fixed_draws(ports, values_of(ports, KEY, number)):
            expected_loss = (mask * cross_entropy(logits_of(module, batch), y, reduction="none")).sum() / mask.sum()
        expected_loss.backward()
        optimizer.step()
        assert loss == pytest.approx(expected_loss.item(), rel=1e-5)
    expected = bundle.manifest.table.flatten({key: value.detach().numpy() for key, value in module.named_parameters()})
    assert np.all(np.abs(state.parameters - expected) <= 1e-5 * np.maximum(1.0, np.abs(expected)))
    assert np.abs(expected - bundle.initial_parameters()).max() > 0.05
    sums = runtime_of(runtime).open_evaluate(bundle)(state.parameters, epoch[0])
    with torch.no_grad():
        assert (sums.predicted == logits_of(module.eval(), epoch[0]).argmax(dim=1).numpy()).all()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_int8_predicts_any_number_of_samples_like_torch(runtime: str, bundle_for: Callable[[str, str], Bundle]) -> None:
    bundle, module = bundle_for("several", runtime), app_of("several").module.eval()
    (batch,) = batches_in_order(several_examples(11, seed=5), 11)
    with torch.no_grad():
        expected = logits_of(module, batch).numpy()
    logits = runtime_of(runtime).open_predict(bundle, bundle.initial_parameters())(batch.inputs)
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= 0.05 * np.ptp(expected)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "recipe", [Recipe(quantization_aware=True), Recipe(trains=Adapters(rank=2)), Recipe(trains="head")], ids=str
)
def test_recipes_are_verified_with_several_inputs(recipe: Recipe) -> None:
    # The export compares its graphs with eager torch.
    bundle = export_bundle(replace(app_of("several"), recipe=recipe))
    assert [port.name for port in bundle.manifest.signatures["infer"].inputs] == ["ids", "attention_mask", "numbers"]


@pytest.mark.parametrize("graph_format", in_ci(("onnx", "tflite"), ("onnx",)))
def test_a_plain_float_file_has_the_inputs_by_name(graph_format: str, bundle_for: Callable[[str, str], Bundle]) -> None:
    app, bundle = app_of("several"), bundle_for("several", FORMATS[graph_format].runtime)
    data = float_models(app, bundle, bundle.initial_parameters(), graph_format)["infer"]
    model = open_runtime(FORMATS[graph_format].runtime).open_model(data, "the file")
    assert {port.name for port in model.inputs} == {"ids", "attention_mask", "numbers"}
    (batch,) = batches_in_order(several_examples(5, seed=5), 5)
    with torch.no_grad():
        expected = logits_of(app.module.eval(), batch).numpy()
    np.testing.assert_allclose(run_rows(model, batch.inputs)["logits"], expected, rtol=0, atol=1e-5)


def test_graphs_of_several_inputs_are_assembled(bundle_for: Callable[[str, str], Bundle], tmp_path: Path) -> None:
    bundle = bundle_for("several", "onnx")
    manifest = bundle.manifest
    spec = AssembledGraphs(
        name="several",
        batch_size=manifest.batch_size,
        num_classes=manifest.num_classes,
        parameters=manifest.table.views(bundle.initial_parameters()),
        graphs={"onnx": {name: bundle.graph(name, "onnx") for name in DEVICE_SIGNATURES}},
        slots={"onnx": manifest.slots["onnx"]},
        activations=manifest.activations,
        num_tokens=manifest.num_tokens,
        optimizer=manifest.optimizer,
    )
    assembled_bundle = assemble(spec, tmp_path / "bundle", PUBLISHER)
    (batch,) = batches_in_order(several_examples(5, seed=5), 5)
    expected, logits = (
        open_runtime("onnx").open_predict(candidate, bundle.initial_parameters())(batch.inputs)
        for candidate in (bundle, assembled_bundle)
    )
    np.testing.assert_array_equal(logits, expected)
