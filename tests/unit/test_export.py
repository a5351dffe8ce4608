"""``edge.export``: the content of the exported Bundle, and the error message for each refused App."""

import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from support.models import BATCH_SIZE, NUM_CLASSES, PUBLISHER, app_of, bundle_of, export_bundle, samples
from support.nightly import in_ci
from torch import Tensor, nn

from fanin.edge.bundles.bundle import open_folder
from fanin.edge.bundles.slots import SlotKind
from fanin.edge.export import App, cross_entropy, export
from fanin.edge.export.graph.decompositions.tables import ONNX
from fanin.edge.export.graph.train import trace_train
from fanin.edge.export.module.prepare import prepare
from fanin.edge.export.quiet import quiet_torch
from fanin.edge.export.verification.ready import checked
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.signatures import Port
from fanin.protos.errors import InvalidInput, UnsupportedModel

SMALL_GAP = 0.15
"""Limit for logits of size 1, before and after rounding to 8 bits in every layer. Int8 kernels differ between
processors. The largest measured difference is 0.105, on a processor without VNNI."""


class ManyLayers(nn.Module):
    """Layers that the two small models lack: attention on sequences, pools, transposed and frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4).eval()
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.pools = nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.SiLU(), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d((4, 2)))
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.after = nn.LayerNorm(8)
        self.head = nn.Linear(8, NUM_CLASSES)
        self.unused = nn.Parameter(torch.zeros(3))
        self.stem.weight.requires_grad_(False)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        hidden = self.pools(self.up(self.norm(self.stem(x)))).flatten(2)
        attention, _ = self.mix(hidden, hidden, hidden, need_weights=False)
        return self.head(self.after(hidden + attention).mean(1))


@pytest.fixture(scope="module")
def mixed_app() -> App:
    """The App of ``ManyLayers``."""
    torch.manual_seed(5)
    return replace(app_of("mlp"), name="mixed", module=ManyLayers())


@pytest.mark.nightly
def test_a_model_of_many_layers_becomes_a_verified_bundle(mixed_app: App) -> None:
    bundle = export_bundle(mixed_app)
    names = [spec.name for spec in bundle.manifest.table.specs]
    assert "unused" in names
    assert "stem.weight" not in names
    slots = bundle.manifest.slots["onnx"]
    parameters = {slot.parameter for slot in slots} - {""}
    # A frozen bias of a trained weight is a constant of the manifest, and so are the scales of a frozen weight.
    assert parameters == set(names) - {"unused"} | {"head.bias"}
    assert set(bundle.manifest.derived.constants) == {"head.bias", "stem.weight:scales"}
    kinds = {slot.parameter: slot.kind for slot in slots}
    assert (kinds["stem.bias"], kinds["norm.bias"]) == (SlotKind.BIAS_SCALE, SlotKind.FLOAT)
    assert kinds["head.weight"] == SlotKind.WEIGHT_SCALE
    transposed_slots = [slot for slot in slots if slot.permutation]
    assert {slot.parameter for slot in transposed_slots} == {"mix.in_proj_weight"}
    assert all(slot.kind is SlotKind.WEIGHT and slot.permutation == (1, 0) for slot in transposed_slots)
    x, _ = samples(5, seed=2)
    predictions = open_runtime("onnx").open_predict(bundle, bundle.initial_parameters())({"x": x})
    with torch.no_grad():
        expected = mixed_app.module.eval()(torch.from_numpy(x)).numpy()
    assert np.abs(predictions - expected).max() < SMALL_GAP


def test_an_export_is_reproducible_and_changes_nothing_and_its_folder_may_be_text(tmp_path: Path) -> None:
    app = app_of("mlp")
    before = {name: value.clone() for name, value in app.module.state_dict().items()}
    bundle = export(app, str(tmp_path / "deep" / "bundle"), PUBLISHER, ["onnx"]).bundle
    stored_bundle = open_folder(tmp_path / "deep" / "bundle", trusted=[PUBLISHER.public])
    # The same App and key give the same bytes, so a Bundle can be rebuilt and compared.
    assert bundle.sha256 == stored_bundle.sha256 == bundle_of("mlp").sha256
    assert app.module.training
    for name, value in app.module.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.grad is None


def test_the_manifest_names_every_port() -> None:
    manifest = bundle_of("mlp").manifest
    names = [spec.name for spec in manifest.table.specs]
    train = manifest.signatures["train"]
    assert [port.name for port in train.inputs] == [
        *names,
        *(f"momentum.{name}" for name in names),
        *("x", "y", "mask", "learning_rate", "optimizer.momentum"),
    ]
    assert [port.name for port in train.outputs] == [
        *(f"next.{name}" for name in names),
        *(f"next.momentum.{name}" for name in names),
        "loss",
    ]
    assert train.inputs[-5:] == (
        Port(name="x", dtype="float32", shape=(BATCH_SIZE, 1, 8, 8)),
        Port(name="y", dtype="int32", shape=(BATCH_SIZE,)),
        Port(name="mask", dtype="float32", shape=(BATCH_SIZE,)),
        Port(name="learning_rate", dtype="float32", shape=()),
        Port(name="optimizer.momentum", dtype="float32", shape=()),
    )
    infer = manifest.signatures["infer"]
    assert infer.inputs == (Port(name="x", dtype="float32", shape=(-1, 1, 8, 8)),)
    assert infer.outputs == (Port(name="logits", dtype="float32", shape=(-1, NUM_CLASSES)),)


@pytest.mark.parametrize("signature", ["train", "evaluate", "infer"])
def test_a_graph_contains_nothing_of_its_environment(signature: str) -> None:
    data = bundle_of("cnn").graph(signature, "onnx")
    for word in (b".py", b"site-packages", b"Traceback", str(Path(__file__).parent).encode()):
        assert word not in data


def test_a_graph_holds_no_value_of_a_slot() -> None:
    bundle = bundle_of("cnn")
    model = onnx.load_from_string(bundle.graph("infer", "onnx"))
    slots = {slot.initializer for slot in bundle.manifest.slots["onnx"]}
    values = {value.name: value for value in model.graph.initializer}
    assert slots <= set(values)
    assert all(values[name].data_location == onnx.TensorProto.EXTERNAL and not values[name].raw_data for name in slots)


def test_cross_entropy_equals_torch() -> None:
    logits, labels = torch.randn(7, 5), torch.arange(7) % 5
    expected = nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(cross_entropy(logits, labels), expected)


class ModuleWithHead(nn.Module):
    """A module around a forward function."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(64, NUM_CLASSES)


class FunctionalDropout(ModuleWithHead):
    """Dropout that is active in evaluation mode too."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(nn.functional.dropout(x.flatten(1), 0.5))


class Branch(ModuleWithHead):
    """A branch on a tensor's value."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(x.flatten(1) if x.sum() > 0 else -x.flatten(1))


class Counter(ModuleWithHead):
    """Counts its calls in a buffer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        self.calls += 1
        return self.head(x.flatten(1))


class Renewer(ModuleWithHead):
    """Stores a running mean: each call assigns a new tensor to the buffer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        self.mean = 0.9 * self.mean + 0.1 * x.mean()
        return self.head(x.flatten(1) - self.mean)


def with_head(*layers: nn.Module) -> nn.Module:
    """Return the layers, followed by a head."""
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, NUM_CLASSES))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (with_head().double(), r"parameter 1.weight is torch.float64, expected torch.float32; call module.float\(\)"),
        (
            with_head(nn.BatchNorm2d(1, track_running_stats=False)),
            r"module 0 \(BatchNorm2d\) has no running statistics, .* write track_running_stats=True, or use GroupNorm",
        ),
        (
            with_head(nn.BatchNorm2d(1, momentum=None)),
            r"module 0 \(BatchNorm2d\) has momentum=None, .* expected a number; write momentum=0.1",
        ),
        (
            with_head(nn.RReLU()),
            r"module 0 \(RReLU\) draws aten.rrelu_with_noise, expected dropout, or uniform or normal",
        ),
        (Branch(nn.Identity()), r"\(Branch\): the train step for onnx cannot be traced: .* avoid Python branches"),
        (
            Counter(nn.Identity()),
            r"itself \(Counter\) at test_export\.py:\d+ changes its buffers \['calls'\] in training",
        ),
        (
            Renewer(nn.Identity()),
            r"itself \(Renewer\) at test_export\.py:\d+ changes its buffers \['mean'\] in training",
        ),
        (
            with_head(nn.InstanceNorm2d(1, track_running_stats=True)),
            r"module 0 \(InstanceNorm2d\) changes its buffers \['0.running_mean', '0.running_var'\] in training",
        ),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(64, 9)),
            r"itself \(Sequential\) returned \(2, 9\), expected logits of",
        ),
        (
            with_head().requires_grad_(False),
            r"no parameter requires a gradient \(trains: 'full'\), expected at least one",
        ),
    ],
    ids=[
        *(
            "float64",
            "no-statistics",
            "no-momentum",
            "rrelu",
            "branch",
            "buffer",
            "renewed-buffer",
            "instance-norm",
        ),
        *("logits", "frozen"),
    ],
)
def test_a_module_that_no_graph_can_train_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"App mlp.*{message}"):
        trace_train(checked(replace(app_of("mlp"), module=module), ["onnx"]), ONNX)


def test_an_export_runs_the_module_once_on_its_calibration_data(tmp_path: Path) -> None:
    app, num_batches, passes = app_of("mlp"), 100, []

    def count(module: nn.Module, inputs: object, output: object) -> None:
        passes.extend([module] * isinstance(module, type(app.module)))

    calibration = torch.rand(num_batches * BATCH_SIZE, 1, 8, 8)
    hook = torch.nn.modules.module.register_module_forward_hook(count)
    try:
        export(replace(app, calibration=calibration, validation=None), tmp_path, PUBLISHER, formats=["onnx"])
    finally:
        hook.remove()
    assert num_batches < len(passes) < 2 * num_batches


@pytest.mark.parametrize("graph_format", in_ci(["onnx", "tflite"], ["onnx"]))
def test_a_good_export_imports_no_diagnosis(graph_format: str, tmp_path: Path) -> None:
    code = f"""
import sys, torch
from torch import nn
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.export import App, export
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 4))
app = App(name="good", module=net, calibration=torch.rand(16, 1, 8, 8), batch_size=8, num_classes=4)
export(app, sys.argv[1], SigningKey.generate(), formats=["{graph_format}"])
print([name for name in sys.modules if name.startswith("fanin.edge.export.diagnosis")])
"""
    command = [sys.executable, "-c", code, str(tmp_path / "bundle")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_frozen_dropout_and_batchnorm_are_accepted() -> None:
    module = with_head(nn.BatchNorm2d(1).eval(), nn.Dropout(0.25).eval(), nn.Dropout(0.0))
    prepared = prepare(replace(app_of("mlp"), module=module))
    assert trace_train(prepared, ONNX).inputs[-2:] == ["learning_rate", "optimizer.momentum"]
    assert not prepared.notes
    assert not prepared.tracked


def test_a_loss_must_be_one_number_a_sample() -> None:
    with pytest.raises(
        UnsupportedModel,
        match=r"the loss at test_export\.py:\d+ returned \(\), expected \(8,\): one loss for",
    ):
        app = replace(app_of("mlp"), loss=lambda logits, labels: cross_entropy(logits, labels).mean())
        trace_train(prepare(app), ONNX)


class UncallableLayer(nn.Linear):
    """A layer that the export must not run."""

    def forward(self, x: Tensor) -> Tensor:
        """Fail."""
        raise AssertionError("the folder was not checked first")


@pytest.mark.parametrize("as_text", [False, True])
def test_a_folder_with_files_is_refused_before_the_module_runs(tmp_path: Path, *, as_text: bool) -> None:
    (tmp_path / "other").write_text("kept")
    app, folder = (
        replace(app_of("mlp"), module=UncallableLayer(64, NUM_CLASSES)),
        str(tmp_path) if as_text else tmp_path,
    )
    with pytest.raises(InvalidInput) as excinfo:
        export(app, folder, PUBLISHER)
    assert (
        str(excinfo.value)
        == f"export: folder: {tmp_path} is not empty, expected a new folder; name another one, or remove it"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("folder", [None, 7, b"bundle", ""])
def test_a_folder_that_is_no_path_is_refused_before_the_module_runs(folder: str) -> None:
    app = replace(app_of("mlp"), module=UncallableLayer(64, NUM_CLASSES))
    with pytest.raises(InvalidInput, match="FN-0397"):
        export(app, folder, PUBLISHER)


def test_a_refused_export_leaves_no_folder(tmp_path: Path) -> None:
    message = r"\(FunctionalDropout\) at test_\S+:\d+ draws uniform values \(8, 64\) in evaluation mode, expected"
    with pytest.raises(UnsupportedModel, match=message):
        export(replace(app_of("mlp"), module=FunctionalDropout(nn.Identity())), tmp_path / "bundle", PUBLISHER)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "App: name: got '', expected 1 to 128 letters, digits or"),
        ({"name": "my digits!"}, "App: name: got 'my digits!', expected 1 to 128 letters, digits or"),
        ({"name": ".digits"}, "App: name: got '.digits', expected 1 to 128 letters, digits or"),
        ({"name": 7}, "App: name: got 7, expected a str"),
        ({"batch_size": 0}, "got batch_size 0 and num_classes 4, expected a batch_size of at least 1"),
        (
            {"num_classes": 1},
            r"got batch_size 8 and num_classes 1, expected .* num_classes of at least 2, or 0 for values",
        ),
        ({"num_classes": -1}, "got batch_size 8 and num_classes -1, expected"),
        (
            {"calibration": torch.zeros(1, 4)},
            r"App mlp: calibration data: got torch.float32 \(1, 4\), expected float32 values or int32 tokens",
        ),
        ({"calibration": torch.zeros(4, 4).double()}, "calibration data: got torch.float64"),
        ({"calibration": torch.full((4, 4), torch.nan)}, "expected finite values only"),
        (
            {"validation": (torch.full((4, 1, 8, 8), torch.nan), torch.zeros(4))},
            "validation data: .* finite values only",
        ),
        (
            {"validation": (torch.zeros(4, 1, 8, 8), torch.zeros(3))},
            r"got validation data x float32 \(4, 1, 8, 8\) and y \(3,\), expected one y for each x",
        ),
        (
            {"validation": (torch.zeros(4, 64), torch.zeros(4))},
            r"got validation data x float32 \(4, 64\) .* x like the calibration data .* \(64, 1, 8, 8\)",
        ),
    ],
)
def test_an_app_with_an_invalid_field_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        replace(app_of("mlp"), **changes)


def test_only_torchs_own_warnings_are_hidden() -> None:
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        with quiet_torch():
            warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated", FutureWarning, stacklevel=1)
            warnings.warn("yours", FutureWarning, stacklevel=1)
    assert [str(row.message) for row in records] == ["yours"]
