"""Personal parameters in an export: the shared and the personal parameters, and refused patterns."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.errors import raises
from support.models import PUBLISHER
from torch import Tensor, nn

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.contract import Countdown, check_trainer, example_assignment, example_model
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.edge.bundles.bundle import Bundle, open_folder
from fanin.edge.bundles.manifest_json import dump_manifest, parse_manifest
from fanin.edge.export import Adapters, App, Recipe, Sgd, export
from fanin.edge.export.module.prepare import prepare, with_parameters
from fanin.edge.export.standalone.floats import float_models
from fanin.edge.export.standalone.quantized import int8_models
from fanin.edge.export.vectorized.step import VectorStep
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch, StepSettings, VersionValues
from fanin.edge.runtimes.measure import measure
from fanin.edge.runtimes.models import run_rows
from fanin.protos.errors import InvalidBundle, UnsupportedModel
from fanin.protos.messages import Training
from fanin.server.evaluation.metrics import evaluate_version


class Split(nn.Module):
    """A shared body with a norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(torch.relu(self.norm(self.body(x))))


def app_with(**recipe: object) -> App:
    torch.manual_seed(1)
    module, x = Split(), torch.randn(32, 6)
    return App(name="split", module=module, calibration=x, batch_size=4, num_classes=3, recipe=Recipe(**recipe))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    app = app_with(local=["head.*", "norm.*"], optimizer=Sgd(momentum=0.9), proximal=True)
    return export(app, tmp_path_factory.mktemp("personal") / "bundle", PUBLISHER, formats=("onnx",)).bundle


def test_the_table_that_travels_is_the_one_without_personal_parameters(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert manifest.local is not None
    assert [spec.name for spec in manifest.table.specs] == ["body.bias", "body.weight"]
    # Patterns match running statistics too: FedBN keeps the entire norm on the device.
    norm = ["norm.bias", "norm.running_mean", "norm.running_var", "norm.weight"]
    assert [spec.name for spec in manifest.local.table.specs] == ["head.bias", "head.weight", *norm]
    assert [spec.name for spec in manifest.model_table.specs] == [
        "body.bias",
        "body.weight",
        "head.bias",
        "head.weight",
        *norm,
    ]
    assert bundle.initial_parameters().size == manifest.table.num_values == 6 * 8 + 8
    module = app_with().module
    values = manifest.model_table.views(bundle.completed(bundle.initial_parameters()))
    for name, value in module.state_dict().items():
        if name in values:
            np.testing.assert_array_equal(values[name], value.numpy())


def test_join_and_split_are_inverse(bundle: Bundle) -> None:
    manifest = bundle.manifest
    values = np.arange(manifest.model_table.num_values, dtype=np.float32)
    shared, personal = manifest.split(values)
    assert (shared.size, personal.size) == (56, 27 + 32)
    np.testing.assert_array_equal(manifest.join(shared, personal), values)
    with raises(ValueError, "flat vector: got shape (55,), expected (56,)"):
        manifest.join(shared[1:], personal)


def test_graphs_train_and_predict_with_both(bundle: Bundle) -> None:
    runtime, manifest = open_runtime("onnx"), bundle.manifest
    initial = bundle.completed(bundle.initial_parameters())
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((4, 6)).astype(np.float32), np.array([0, 1, 2, 0], np.int32)
    step = runtime.open_train(bundle)
    batch = PaddedBatch(inputs={"x": x}, y=y, mask=np.ones(4, np.float32))
    state, _ = step(step.begin(initial), batch, StepSettings(learning_rate=0.5, anchor=initial))
    changed = [
        bool((after != before).any())
        for after, before in zip(manifest.split(state.parameters), manifest.split(initial), strict=True)
    ]
    assert changed == [True, True]
    shared, personal = manifest.split(initial)
    others = manifest.join(shared, personal + 1)
    assert not np.array_equal(
        runtime.open_predict(bundle, initial)({"x": x}), runtime.open_predict(bundle, others)({"x": x})
    )
    with raises(ValueError, f"parameters: got float32 (56,), expected float32 ({initial.size},)"):
        step(step.begin(shared), batch, StepSettings(learning_rate=0.5))


def test_standalone_models_have_the_initial_personal_parameters(bundle: Bundle) -> None:
    runtime, x = open_runtime("onnx"), np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    shared = bundle.initial_parameters() * np.float32(0.5)
    expected = runtime.open_predict(bundle, bundle.completed(shared))({"x": x})
    int8 = run_rows(runtime.open_model(int8_models(bundle, shared, "onnx")["infer"], "int8"), {"x": x})
    np.testing.assert_array_equal(int8["logits"], expected)
    app = app_with(local=["head.*", "norm.*"], optimizer=Sgd(momentum=0.9), proximal=True)
    model = runtime.open_model(float_models(app, bundle, shared, "onnx")["infer"], "float")
    in_float = run_rows(model, {"x": x})["logits"]
    module = with_parameters(app, bundle.manifest.table.views(shared))
    with torch.no_grad():
        np.testing.assert_allclose(in_float, module(torch.from_numpy(x)).numpy(), rtol=1e-4, atol=1e-5)


def test_a_manifest_has_the_key_only_with_personal_parameters(bundle: Bundle) -> None:
    data = dump_manifest(bundle.manifest)
    assert parse_manifest(data) == bundle.manifest
    assert json.loads(data)["local"]["initial"] == "local"
    assert "local" not in json.loads(
        dump_manifest(replace(bundle.manifest, local=None, table=bundle.manifest.model_table))
    )
    assert bundle.manifest.files("onnx") >= {"local", "train.onnx"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"parameters": {}}, "manifest: local: got no parameters, expected at least one; leave the key out"),
        ({"initial": "none"}, "manifest: local: got the initial values 'none', expected an artifact of their own"),
        (
            {"initial": "parameters"},
            "manifest: local: got the initial values 'parameters', expected an artifact of their own",
        ),
        (
            {"parameters": {"body.bias": [8]}},
            "manifest: local: got ['body.bias'] also among the parameters that travel",
        ),
        ({"more": 1}, "manifest.local: got unknown ['more'], expected ['initial', 'parameters']"),
    ],
)
def test_a_manifest_whose_personal_parameters_contradict_it_is_refused(
    bundle: Bundle, change: dict[str, object], problem: str
) -> None:
    row = json.loads(dump_manifest(bundle.manifest))
    row["local"] |= change
    with raises(InvalidBundle, problem):
        parse_manifest(json.dumps(row).encode())


def test_initial_values_of_another_form_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    row = json.loads(dump_manifest(bundle.manifest))
    row["artifacts"]["local"] = row["artifacts"]["parameters"]
    changed = Bundle(
        bundle.signed, parse_manifest(json.dumps(row).encode()), lambda sha256: bundle.artifact("parameters")
    )
    with pytest.raises(InvalidBundle, match="FN-0357"):
        changed.completed(bundle.initial_parameters())


LEARNED = sorted(f"{layer}.{name}" for layer in ("body", "head", "norm") for name in ("bias", "weight"))
UNKNOWN = (
    "App split: local: the pattern 'top.*' matches no parameter, expected at least one of "
    f"{sorted([*LEARNED, 'norm.running_mean', 'norm.running_var'])}; correct or remove it"
)
FROZEN = (
    "App split: local: the pattern 'body.*' matches only body.weight, which does not learn and never travels, expected "
    "at least one of ['head.bias', 'head.weight']; correct or remove it"
)
ALL = (
    "App split: local: the patterns ['head.*'] match all parameters that learn, expected at least one that travels, "
    "such as head.bias; make them more exact, or train without a federation"
)


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ({"local": ["top.*"]}, UNKNOWN),
        ({"local": ["body.*"], "trains": "head"}, FROZEN),
        ({"local": ["head.*"], "trains": "head"}, ALL),
    ],
)
def test_patterns_that_mean_nothing_are_refused(recipe: dict[str, object], problem: str) -> None:
    with raises(UnsupportedModel, problem):
        prepare(app_with(**recipe))


def test_some_adapters_may_be_personal() -> None:
    prepared = prepare(app_with(local=["head.*"], trains=Adapters(rank=2)))
    assert prepared.local == {"head.down.weight", "head.up.weight"}
    assert set(prepared.parameters) - prepared.local == {"body.down.weight", "body.up.weight"}


def test_one_pattern_without_a_list_is_refused() -> None:
    with raises(UnsupportedModel, "recipe: local: got 'head.*', expected a list of patterns such as ['head.*']"):
        Recipe(local="head.*")


def test_the_engine_vmap_refuses_personal_parameters() -> None:
    problem = (
        "App split: local: got ['head.*'], expected no personal parameters for the engine vmap: clients that train "
        "together start from one Version"
    )
    with raises(UnsupportedModel, problem):
        VectorStep(app_with(local=["head.*"]))


@pytest.mark.nightly
def test_a_bundle_of_both_formats_has_the_same_personal_parameters(tmp_path: Path) -> None:
    bundle = export(app_with(local=["head.*"]), tmp_path / "bundle", PUBLISHER).bundle
    assert open_folder(tmp_path / "bundle", trusted=[PUBLISHER.public]).manifest.local == bundle.manifest.local
    x = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    y = np.array([0, 1, 2], np.int32)
    shared = bundle.initial_parameters()
    store = MemoryStore(partition=0, train=Examples(inputs={"x": x}, y=y), validation=Examples(inputs={"x": x}, y=y))
    work = example_assignment(bundle, Training(epochs=2, learning_rate=0.25, seed=1))
    changes = []
    for name in ("onnx", "litert"):
        runtime = open_runtime(name)
        changes.append(check_trainer(RuntimeTrainer(runtime, store), example_model(bundle), work))
        first, second = (
            runtime.open_predict(bundle, bundle.manifest.join(shared, each))({"x": x})
            for each in (bundle.initial_local(), -bundle.initial_local())
        )
        np.testing.assert_allclose(first, -second, atol=0.05 * float(np.abs(first).max()))
    heads = [change.local for change in changes]
    assert heads[0] is not None and heads[1] is not None and not np.array_equal(heads[0], bundle.initial_local())
    np.testing.assert_allclose(heads[0], heads[1], rtol=1e-4, atol=1e-5)


def test_a_version_is_evaluated_with_the_initial_personal_parameters(bundle: Bundle) -> None:
    rng, runtime = np.random.default_rng(0), open_runtime("onnx")
    x, y = rng.standard_normal((4, 6)).astype(np.float32), np.array([0, 1, 2, 0], np.int32)
    batches = [PaddedBatch(inputs={"x": x}, y=y, mask=np.ones(4, np.float32))]
    shared = bundle.initial_parameters() * np.float32(0.5)
    values = evaluate_version(runtime, bundle, VersionValues(parameters=shared), batches).values
    expected = measure(
        runtime, bundle, VersionValues(parameters=bundle.manifest.join(shared, bundle.initial_local())), batches
    )
    assert (values["loss"], values["accuracy"]) == (expected.loss_sum / 4, expected.accuracy_float)


def test_scaffold_corrects_only_the_shared_parameters(tmp_path: Path) -> None:
    app = app_with(local=["head.*", "norm.*"], optimizer=Sgd(momentum=0.0), scaffold=True)
    bundle = export(app, tmp_path / "bundle", PUBLISHER, formats=("onnx",)).bundle
    rng = np.random.default_rng(0)
    examples = Examples(
        inputs={"x": rng.standard_normal((4, 6)).astype(np.float32)}, y=np.array([0, 1, 2, 0], np.int32)
    )
    store = MemoryStore(partition=0, train=examples, validation=examples)
    trainer = RuntimeTrainer(open_runtime("onnx"), store)
    control = np.ones(bundle.manifest.table.num_values, np.float32)
    work = example_assignment(bundle, Training(epochs=1, learning_rate=0.25, seed=1))
    plain, corrected = (
        trainer.train(replace(example_model(bundle), inputs=inputs), work, Countdown())
        for inputs in ({}, {"control": control})
    )
    # After one step the correction is the learning rate times the control variate.
    np.testing.assert_allclose(corrected.values, plain.values - np.float32(0.25), atol=1e-6)
    assert plain.local is not None and corrected.local is not None
    np.testing.assert_array_equal(corrected.local, plain.local)
    assert not np.array_equal(plain.local, bundle.initial_local())
