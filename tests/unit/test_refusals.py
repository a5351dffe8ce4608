"""Modules that no graph can express: the export and the check refuse them with the module's name and its line."""

import ctypes
import inspect
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from support.models import BATCH_SIZE, NUM_CLASSES, PUBLISHER, app_of, export_bundle
from support.nightly import in_ci
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fanin.commands.console.terminal import write_json
from fanin.edge.bundles.derived import Derived
from fanin.edge.export import App, Recipe, check_app, export, next_token, squared_error
from fanin.edge.export.formats.graphs import onnx_infer
from fanin.edge.export.formats.int8.folding import Infer
from fanin.edge.export.formats.onnx.int8 import _quantize
from fanin.edge.export.formats.onnx.ranges import Calibration
from fanin.edge.export.graph.decompositions.tables import ONNX
from fanin.edge.export.graph.examples import example_batch, other_batch
from fanin.edge.export.graph.forward import trace_infer
from fanin.edge.export.graph.reading import NoReading
from fanin.edge.export.graph.train import trace_train
from fanin.edge.export.module.prepare import prepare
from fanin.edge.export.refusals import NoForm, Place, ValueRead
from fanin.edge.export.verification.ready import check_kept
from fanin.protos.errors import InvalidInput, UnsupportedModel

Forward = Callable[[Tensor], Tensor]


class Odd(nn.Module):
    """A layer that calls the given function."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.odd = forward

    def forward(self, x: Tensor) -> Tensor:
        """Return the function's result."""
        return self.odd(x)


def odd(forward: Forward, **facts: object) -> App:
    """Return an App with an ``Odd`` layer in the middle."""
    torch.manual_seed(5)
    module = nn.Sequential(nn.Flatten(), Odd(forward), nn.Linear(64, NUM_CLASSES))
    return replace(app_of("mlp"), name="odd", module=module, **facts)


def _scaled(x: Tensor) -> Tensor:
    y = x.clone()
    y[y > 0] = y[y > 0] * 2.0
    return y


READS: dict[str, Forward] = {
    "tolist": lambda x: x * max(x.detach().flatten().tolist()),
    "numpy": lambda x: x * torch.from_numpy(x.detach().numpy().mean(1, keepdims=True)),
    "asarray": lambda x: x * float(np.asarray(x.detach()).max()),
    "item": lambda x: x * x.max().item(),
    "int": lambda x: x * int(x.max()),
    "if": lambda x: x if x.sum() > 0 else -x,
    "if-list": lambda x: x if x.tolist()[0][0] > 0 else -x,
}


@pytest.mark.parametrize("name", READS)
def test_a_value_that_is_read_while_a_graph_is_traced_is_refused(name: str) -> None:
    prepared = prepare(odd(READS[name]))
    message = r"cannot be traced: module 1 \(Odd\) at test_refusals\.py:\d+ reads the value of a tensor, by \S+\(\); "
    with pytest.raises(UnsupportedModel, match=rf"App odd \(Sequential\): the train step for onnx {message}"):
        trace_train(prepared, ONNX)
    with pytest.raises(UnsupportedModel, match=rf"App odd \(Sequential\): the inference {message}"):
        trace_infer(prepared, 1)


SELECTS: dict[str, tuple[Forward, str]] = {
    "mask": (lambda x: x * x[x > 0].mean(), "an index of true and false"),
    "masked": (_scaled, "an index of true and false"),
    "nonzero": (lambda x: x + x.nonzero().float().mean(), r"aten\.nonzero"),
    "where": (lambda x: x + torch.where(x > 0)[0].float().mean(), r"aten\.nonzero"),
    "unique": (lambda x: x * torch.unique(x.detach().round()).shape[0], r"aten\._unique2"),
    "masked_select": (lambda x: x + torch.masked_select(x, x > 0).mean(), r"aten\.masked_select"),
    "bincount": (lambda x: x + torch.bincount((x.flatten() > 0).long()).float().mean(), r"aten\.bincount"),
}


@pytest.mark.parametrize("name", in_ci(SELECTS, ["masked", "nonzero"]))
def test_an_operator_whose_result_has_no_fixed_shape_is_refused(name: str) -> None:
    forward, operator = SELECTS[name]
    error = rf"module 1 \(Odd\) at test_refusals\.py:\d+ selects by {operator}, .* one shape for every batch; keep all"
    with pytest.raises(UnsupportedModel, match=error):
        trace_train(prepare(odd(forward)), ONNX)


def test_a_constant_selects_and_a_mask_fills() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x * x[:, torch.arange(64) > 2].sum(1, keepdim=True)
        y[y > 0] = 0.0
        return y

    assert trace_train(prepare(odd(forward)), ONNX).outputs[-1] == "loss"


def test_a_loss_must_not_read_either() -> None:
    app = odd(lambda x: x, loss=lambda logits, labels: logits.sum(1) * labels.tolist()[0])
    with pytest.raises(UnsupportedModel, match="FN-0769"):
        trace_train(prepare(app), ONNX)


def test_constants_may_be_read_and_data_is_detached() -> None:
    constants = torch.arange(3.0)

    def call(x: Tensor) -> Tensor:
        with NoReading():
            return x * (constants + 1).tolist()[2] + x.data + torch.tensor([2.0]).item()

    graph = make_fx(call)(torch.zeros(2))
    torch.testing.assert_close(graph(torch.tensor([1.0, 2.0])), torch.tensor([6.0, 10.0]))
    with pytest.raises(ValueRead, match=r"^Tensor\.tolist\(\)$"):
        make_fx(_read)(torch.zeros(2))


def _read(x: Tensor) -> Tensor:
    with NoReading():
        return torch.tensor((x + 1).tolist())


class Hidden(nn.Module):
    """A module that reads its input's memory directly in training mode, which tracing cannot detect."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x times a value of x in training mode."""
        if not self.training:
            return x
        kind = ctypes.c_float if x.dtype == torch.float32 else ctypes.c_double
        values = np.ctypeslib.as_array(ctypes.cast(x.data_ptr(), ctypes.POINTER(kind)), (x.numel(),))
        return x * float(values.max())


def test_a_constant_that_a_graph_captured_from_the_traced_batch_is_refused() -> None:
    module = nn.Sequential(nn.Flatten(), Hidden(), nn.Linear(64, NUM_CLASSES))
    with pytest.raises(UnsupportedModel, match="FN-0789"):
        export_bundle(replace(app_of("mlp"), name="hidden", module=module))


class HiddenInThrees(Hidden):
    """``Hidden`` in batches of three samples only."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x times a value of x in training mode."""
        return super().forward(x) if self.training and len(x) == 3 else x


def test_the_graph_of_each_batch_size_is_verified() -> None:
    module = nn.Sequential(nn.Flatten(), HiddenInThrees(), nn.Linear(64, NUM_CLASSES))
    app = replace(app_of("mlp"), name="hidden", module=module, other_batch_sizes=(3,))
    with pytest.raises(UnsupportedModel, match="FN-0789"):
        export_bundle(app)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_the_other_batch_differs_and_is_as_valid(batch_size: int) -> None:
    app = replace(app_of("mlp"), batch_size=batch_size)
    prepared = prepare(app)
    examples = example_batch(prepared)
    (inputs, y, mask), (other_inputs, other_y, other_mask) = examples, other_batch(prepared, examples)
    x, other_x = inputs["x"], other_inputs["x"]
    assert other_x.shape == x.shape and other_y.shape == y.shape and other_y.dtype == y.dtype
    assert not (x == other_x).all(dim=1).any()
    assert app.inputs["x"].min() <= other_x.min() and other_x.max() <= app.inputs["x"].max()
    assert not torch.equal(y, other_y) and other_y.min() >= 0 and other_y.max() < NUM_CLASSES
    assert torch.equal(mask, other_mask) == (batch_size == 1)
    assert other_mask.sum() >= min(batch_size, 1)


def test_the_other_batch_of_tokens_has_tokens_of_the_same_positions() -> None:
    tokens = torch.randint(0, 20, (32, 6), dtype=torch.int32)
    module = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 20))
    app = App(name="t", module=module, calibration=tokens, batch_size=4, num_classes=20, loss=next_token)
    prepared = prepare(app)
    examples = example_batch(prepared)
    inputs, y, _ = other_batch(prepared, examples)
    x = inputs["x"]
    assert x.dtype == torch.int32 and not torch.equal(x, examples[0]["x"])
    assert all(set(x[:, position].tolist()) <= set(tokens[:, position].tolist()) for position in range(6))
    assert int((y == -1).sum()) == int((examples[1] == -1).sum()) == 1


def raise_key_error(x: Tensor) -> Tensor:
    """Raise an error of the App's own code."""
    raise KeyError(f"oops {len(x)}")


@pytest.mark.parametrize(
    ("app", "module", "reason", "advice"),
    [
        (odd(READS["if"]), ("1", "Odd"), r"train step .* by bool\(\)", "torch.where"),
        (odd(READS["if"], recipe=Recipe(quantization_aware=True)), ("1", "Odd"), r"by bool\(\)", "torch.where"),
        (
            odd(raise_key_error),
            ("1", "Odd"),
            r"fails in module 1 \(Odd\) at test_refusals.py:\d+ \(KeyError: 'oops 2'\)",
            "fix the code",
        ),
        (odd(lambda x: x[:, :9]), ("2", "Linear"), "fails in module 2 .*shapes cannot be multiplied", "fix the code"),
        (
            odd(lambda x: x[:, :9], recipe=Recipe(quantization_aware=True)),
            *(("2", "Linear"), "quantization_aware: the module .*fails in module 2", "fix the code"),
        ),
        (
            odd(lambda x: x, loss=squared_error),
            *(("", "loss"), r"the loss fails \(ValueError: squared error: got", "fix the code"),
        ),
        (odd(SELECTS["mask"][0]), ("1", "Odd"), r"selects by an index of true and false", "torch.where(mask, x, 0.0)"),
        (odd(lambda x: x.view(BATCH_SIZE, 64)), ("1", "Odd"), "accepts only 8 samples at a time", "write x.shape"),
    ],
    ids=["branch", "branch-qat", "raises", "shapes", "shapes-qat", "loss", "mask", "fixed-batch"],
)
def test_the_check_reports_errors_that_concern_no_runtime(
    app: App, module: tuple[str, str], reason: str, advice: str
) -> None:
    (finding,) = check_app(app, ["onnx", "tflite"])
    assert (finding.module, finding.kind, finding.runtimes, finding.operator) == (*module, (), "")
    assert finding.line.startswith("test_refusals.py:") == (finding.kind == "Odd")
    assert re.search(reason, finding.reason)
    assert advice in finding.advice and advice not in finding.reason


class Hiding(nn.Module):
    """A module that masks the last class."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.head, self.value = nn.Linear(64, NUM_CLASSES), value

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(x.flatten(1)).masked_fill(torch.arange(NUM_CLASSES) == NUM_CLASSES - 1, self.value)


def test_a_class_is_not_hidden_by_infinity() -> None:
    with pytest.raises(UnsupportedModel, match="FN-0781"):
        check_kept(prepare(replace(app_of("mlp"), module=Hiding(-math.inf))))
    check_kept(prepare(replace(app_of("mlp"), module=Hiding(-1e9))))


def test_a_parameter_that_a_forward_writes_is_refused() -> None:
    module = nn.Sequential(nn.Embedding(20, 4, max_norm=0.1), nn.Linear(4, 20))
    tokens = torch.randint(0, 20, (32, 6), dtype=torch.int32)
    app = App(name="t", module=module, calibration=tokens, batch_size=4, num_classes=20, loss=next_token)
    message = r"App t: module 0 \(Embedding\) writes its parameters \['0.weight'\] in forward, .* without max_norm"
    for formats in (["onnx"], ["tflite"]):
        (finding,) = check_app(app, formats)
        assert re.search(message, f"{finding.reason}; {finding.advice}") and finding.module == "0"


class Projected(nn.Module):
    """An LSTM with a projection, which ONNX lacks, before a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 8, batch_first=True, proj_size=4)
        self.head = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.cells(x.flatten(1)[:, None, :8])[0][:, -1])


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_a_recurrent_layer_that_onnx_lacks_is_named() -> None:
    prepared = prepare(replace(app_of("mlp"), module=Projected()))
    with pytest.raises(NoForm, match=r"module cells \(LSTM\) has proj_size=4, .*; use proj_size=0") as excinfo:
        onnx_infer(prepared, Infer(traced=trace_infer(prepared, 1), values={}, derived=Derived(), scales={}))
    assert excinfo.value.place == Place(module="cells", kind="LSTM")


def test_a_graph_that_the_quantizer_cannot_run_is_an_unsupported_model() -> None:
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Add", ["x", "c"], ["y"])],
            "infer",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
            [numpy_helper.from_array(np.zeros((3, 3), np.float32), "c")],
        )
    )
    with pytest.raises(UnsupportedModel, match="FN-0784"):
        _quantize(model, Calibration({"x": np.zeros((2, 4), np.float32)}, 2), (), {})


class Volume(nn.Module):
    """A model with an inner layer that no format supports."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 64), nn.Linear(64, 4)
        self.volume = nn.Upsample(scale_factor=1.0, mode="trilinear")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        volume = self.first(x.flatten(1)).reshape(-1, 1, 4, 4, 4)
        return self.head(self.volume(volume).flatten(1))


def test_an_export_names_the_module_of_an_operator_without_a_form(tmp_path: Path) -> None:
    app = replace(app_of("mlp"), module=Volume())
    with pytest.raises(
        UnsupportedModel,
        match=r"\(.*aten\.upsample_trilinear3d.*\); module volume \(Upsample\) at test_refusals\.py:\d+: replace",
    ):
        export(app, tmp_path / "bundle", PUBLISHER, ["onnx"])


class Distance(nn.Module):
    """A custom layer with an operator that ONNX lacks."""

    def forward(self, x: Tensor) -> Tensor:
        """Return distances (B, n)."""
        y = x * 2.0
        return torch.hypot(x, y)


def test_the_check_names_the_line_of_an_operator_without_a_form() -> None:
    module = nn.Sequential(nn.Flatten(), Distance(), nn.Linear(64, NUM_CLASSES))
    (finding,) = check_app(replace(app_of("mlp"), module=module), ["onnx"])
    assert (finding.module, finding.kind, finding.operator) == ("1", "Distance", "aten.hypot")
    line = inspect.getsourcelines(Distance.forward)[1] + 3
    assert finding.line == f"test_refusals.py:{line}"


def test_logits_of_another_number_of_classes_are_refused_before_anything_is_traced() -> None:
    app = app_of("mlp")
    wrong = replace(app, num_classes=app.num_classes + 1)
    with pytest.raises(UnsupportedModel, match="FN-0738"):
        example_batch(prepare(wrong))


def test_the_cost_of_int8_must_be_a_number(tmp_path: Path) -> None:
    for cost in (math.nan, -1.0):
        with pytest.raises(InvalidInput, match="FN-0709"):
            export(app_of("mlp"), tmp_path / "bundle", PUBLISHER, ["onnx"], cost)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(("value", "kind"), [(math.nan, "NaN"), (-math.inf, "infinity")])
def test_data_that_is_not_finite_is_reported_with_its_sample(value: float, kind: str) -> None:
    app = app_of("mlp")
    x = app.inputs["x"].clone()
    x[5, 0, 2, 1] = x[9] = value
    message = (
        f"got {kind} in sample 5 \\(2 of 64 samples have values that are not finite\\), expected finite values only"
    )
    with pytest.raises(UnsupportedModel, match=f"App mlp: calibration data: {message}"):
        replace(app, calibration=x)
    targets = torch.zeros(64, 4).index_put((torch.tensor([5, 9]),), torch.tensor(value))
    with pytest.raises(UnsupportedModel, match=f"App mlp: validation data y: {message}"):
        replace(app, num_classes=0, loss=squared_error, validation=(app.inputs["x"], targets))


def test_json_has_no_number_that_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    write_json("-", {"a": [math.nan, 1.5], "b": {"c": (-math.inf, 2)}, "d": "NaN"})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"c": [None, 2]}, "d": "NaN"}
