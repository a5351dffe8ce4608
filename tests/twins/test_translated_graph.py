"""The ONNX writer against ``torch.onnx.export``: the same operators and bit-identical results."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fanin.edge.export import App
from fanin.edge.export.formats.onnx.translate import translate
from fanin.edge.export.graph.decompositions.tables import ONNX
from fanin.edge.export.graph.train import trace_train
from fanin.edge.export.module.prepare import prepare
from fanin.edge.export.quiet import quiet_torch


class UnusualOperators(nn.Module):
    """An operator without an ONNX form, one with several types, and one whose form is a function of another opset."""

    def forward(self, x: Tensor) -> Tensor:
        """Values (B, 4)."""
        y = nn.functional.softshrink(x, 0.2)
        return torch.erf(y) * torch.arange(4) + x.std(dim=1, keepdim=True) / x.shape[0]


def _train_step() -> ExportedProgram:
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4)
    )
    app = App(name="cnn", module=module, calibration=torch.randn(8, 1, 6, 6), batch_size=4, num_classes=4)
    return trace_train(prepare(app), ONNX).program


def _unusual_operators() -> ExportedProgram:
    return torch.export.export(
        UnusualOperators(), (torch.randn(3, 4),), dynamic_shapes=({0: Dim("batch")},), strict=False
    )


PROGRAMS = {"train step": _train_step, "operators without a form": _unusual_operators}


@pytest.mark.parametrize("name", PROGRAMS)
def test_translation_equals_torchs_exporter(name: str) -> None:
    with quiet_torch():
        onnx_program = torch.onnx.export(PROGRAMS[name](), dynamo=True, verbose=False)
        model = translate(PROGRAMS[name]())
    assert onnx_program is not None
    torch_model = onnx_program.model_proto
    assert Counter(node.op_type for node in model.graph.node) == Counter(
        node.op_type for node in torch_model.graph.node
    )
    assert [(row.domain, row.version) for row in model.opset_import] == [
        (row.domain, row.version) for row in torch_model.opset_import
    ]
    values = _values(model)
    for actual, expected in zip(_run(model, values), _run(torch_model, values), strict=True):
        np.testing.assert_array_equal(actual, expected)


def _values(model: onnx.ModelProto) -> list[np.ndarray]:
    rng, values = np.random.default_rng(2), []
    for port in model.graph.input:
        shape = [dim.dim_value or 3 for dim in port.type.tensor_type.shape.dim]
        is_float = port.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        values.append(
            rng.uniform(0.1, 1.0, shape).astype(np.float32) if is_float else rng.integers(0, 4, shape).astype(np.int32)
        )
    return values


def _run(model: onnx.ModelProto, values: list[np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return session.run(None, dict(zip([port.name for port in session.get_inputs()], values, strict=True)))
