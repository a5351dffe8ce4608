"""``edge.export`` on odd modules: shared and unused layers, names of operators, small batches, several formats."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.models import NUM_CLASSES, app_of, export_bundle, samples
from support.nightly import in_ci
from torch import Tensor, nn

from fanin.edge.export import Adam, Adapters, Recipe, Sgd
from fanin.edge.export.graph.decompositions.tables import ONNX
from fanin.edge.export.graph.forward import trace_evaluate, trace_infer
from fanin.edge.export.graph.train import trace_train
from fanin.edge.export.module.prepare import prepare
from fanin.edge.runtimes.available import open_runtime


class SharedLayers(nn.Module):
    """Layers under two names, a weight of two layers, a norm, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = nn.Linear(64, 64)
        self.norm = self.norm_again = nn.BatchNorm1d(64)
        self.tied = nn.Linear(64, 64)
        self.tied.weight = self.first.weight
        self.unused, self.unused_norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.head = nn.Linear(64, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        hidden = self.norm(self.first(x.flatten(1))).relu()
        return self.head(self.tied(self.norm_again(self.again(hidden)).relu()).relu())


class Operators(nn.Module):
    """Parameters with the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Parameter(torch.randn(NUM_CLASSES, 64))
        for name in ("mul", "add", "view", "mean", "relu", "sub"):
            self.register_parameter(name, nn.Parameter(torch.full((64,), 0.5)))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        hidden = (x.view(-1, 64) * self.mul + self.add - self.sub).relu() + self.view + self.mean * self.relu
        return nn.functional.linear(hidden, self.linear)


@pytest.mark.parametrize(
    ("factory", "recipe"),
    [
        (SharedLayers, Recipe(optimizer=Sgd(weight_decay=0.1))),
        # In CI, test_recipes trains adapters in a graph, and the previous case has shared layers.
        pytest.param(SharedLayers, Recipe(trains=Adapters(rank=2), quantization_aware=True), marks=pytest.mark.nightly),
        (Operators, Recipe(optimizer=Adam(weight_decay=0.1, decoupled=True))),
    ],
    ids=["shared", "shared-adapters", "operators"],
)
def test_odd_modules_are_exported_and_verified(factory: Callable[[], nn.Module], recipe: Recipe) -> None:
    torch.manual_seed(7)
    bundle = export_bundle(replace(app_of("mlp"), name="odd", module=factory(), recipe=recipe))
    names = {spec.name for spec in bundle.manifest.table.specs}
    assert not any("again" in name or name == "tied.weight" for name in names)
    derived = bundle.manifest.derived
    origins = {origin for slot in bundle.manifest.slots["onnx"] for origin in derived.origins(slot.parameter)}
    assert origins - {""} - set(derived.constants) == {name for name in names if not name.startswith("unused")}


@pytest.mark.parametrize("batch_size", in_ci((1, 2), (1,)))
def test_a_batch_may_be_small(batch_size: int) -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, NUM_CLASSES))
    bundle = export_bundle(replace(app_of("mlp"), name="small", module=module, batch_size=batch_size))
    predict = open_runtime("onnx").open_predict(bundle, bundle.initial_parameters())
    assert predict({"x": samples(3, seed=1)[0]}).shape == (3, NUM_CLASSES)


def test_a_module_is_traced_unchanged_for_the_next_format() -> None:
    norms = nn.BatchNorm2d(1), nn.BatchNorm2d(1).eval()
    module = nn.Sequential(*norms, nn.Flatten(), nn.Linear(64, NUM_CLASSES))
    prepared = prepare(replace(app_of("mlp"), module=module))
    modes = [layer.training for layer in prepared.module.modules()]
    first = trace_train(prepared, ONNX)
    trace_evaluate(prepared, ONNX)
    trace_infer(prepared)
    assert [layer.training for layer in prepared.module.modules()] == modes
    second = trace_train(prepared, ONNX)
    for actual, expected in zip(
        second.program.module()(*first.examples), first.program.module()(*first.examples), strict=True
    ):
        assert torch.equal(actual, expected)


class Recurrent(nn.Module):
    """Attention over the output of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 4, num_layers=2, dropout=0.5, batch_first=True)
        self.attention, self.head = nn.MultiheadAttention(4, 1, batch_first=True), nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        steps = self.recurrent(x.flatten(1).unflatten(1, (8, 8)))[0]
        return self.head(self.attention(steps, steps, steps, need_weights=False)[0].mean(1))


@pytest.mark.nightly
def test_attention_over_a_recurrent_layer_is_traced() -> None:
    module = Recurrent()
    prepared = prepare(replace(app_of("mlp"), module=module))
    graph = trace_infer(prepared)
    x = samples(4, seed=2)[0]
    logits = graph.program.module()(*prepared.parameters.values(), torch.from_numpy(x))
    with torch.no_grad():
        torch.testing.assert_close(logits, module.eval()(torch.from_numpy(x)))
