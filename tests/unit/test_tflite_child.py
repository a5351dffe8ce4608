"""The converter's second attempt runs in a process of its own, and the export outlives that process."""

import sys

import numpy as np
import pytest
import torch
from ai_edge_litert.interpreter import Interpreter
from torch import Tensor, nn

from fanin.edge.export.formats.tflite.converter.child import convert_in_child
from fanin.edge.export.formats.tflite.converter.convert import convert
from fanin.edge.export.formats.tflite.writer import to_tflite
from fanin.edge.export.graph.traced import Traced
from fanin.edge.export.quiet import quiet_converter
from fanin.protos.errors import UnsupportedModel


class Repeated(nn.Module):
    """Repeats channels. The converter's first choice of layouts repeats rows instead, and the shapes do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.register_buffer("scale", torch.arange(8.0)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        total = self.conv(x) + flat.tanh().view_as(x) + flat.sigmoid().view_as(x)
        output: Tensor = total.repeat(1, 2, 1, 1) * self.scale
        return output


def trace(module: nn.Module, x: Tensor) -> Traced:
    program = torch.export.export(module.eval(), (x,))
    return Traced(program=program, examples=[x], inputs=["x"], outputs=["y"])


@pytest.mark.nightly
def test_a_graph_that_the_first_attempt_cannot_lay_out_is_converted_by_the_child() -> None:
    module, x = Repeated(), torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    signatures = {"infer": trace(module, x)}
    with quiet_converter(), pytest.raises(RuntimeError, match="broadcast"):
        convert(signatures, "GREEDY")
    file = to_tflite(signatures, "App repeated")
    output = Interpreter(model_content=file, num_threads=1).get_signature_runner("infer")(x=x.numpy())["y"]
    np.testing.assert_allclose(output, module(x).detach().numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "import os, sys; sys.stderr.write('F0000 Check failed: layout\\n'); sys.stderr.flush(); os.abort()",
            "signal SIGABRT ended the converter: F0000 Check failed: layout",
        ),
        ("import sys; sys.exit(3)", "the converter ended with status 3: no output"),
        ("pass", "the converter ended with status 0: no output"),
        (
            "import pathlib, sys; pathlib.Path(sys.argv[1], 'error.txt').write_text('no such layout'); sys.exit(1)",
            "no such layout",
        ),
    ],
    ids=["signal", "status", "no result", "refused"],
)
def test_a_child_without_a_result_becomes_one_error(code: str, reason: str) -> None:
    signatures = {"infer": trace(nn.ReLU(), torch.ones(2))}
    with pytest.raises(UnsupportedModel) as excinfo:
        convert_in_child(signatures, "App small", [sys.executable, "-c", code])
    assert str(excinfo.value) == (
        f"App small: cannot be converted to TFLite ({reason}); replace that part of the model, or freeze it; "
        "fanin export --check names it"
    )
