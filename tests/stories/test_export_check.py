"""``fanin export --check`` is the export without its last step: both pass, or both refuse for the same reason."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.commands import Fanin, fanin_in_process, one_line
from support.models import app_of
from support.nightly import in_ci

from fanin.edge.bundles.bundle import open_folder
from fanin.edge.bundles.slots import SlotKind
from fanin.edge.export.diagnosis.parts import failure_of_step
from fanin.edge.export.module.prepare import prepare
from fanin.edge.export.refusals import INT8, RUN
from fanin.protos.errors import InvalidBundle

APP = """
import ctypes
import numpy as np
import torch
from torch import nn
from fanin.edge.export import App

class Experts(nn.Module):
    def __init__(self, product):
        super().__init__()
        self.product, self.weight = product, nn.Parameter(0.3 * torch.randn(4, 8, 8))
        self.bias, self.head = nn.Parameter(torch.zeros(8)), nn.Linear(32, 3)

    def forward(self, x):
        return self.head(torch.relu(self.product(x, self.weight) + self.bias).flatten(1))

def experts(product=torch.matmul):
    torch.manual_seed(0)
    return App(name="e", module=Experts(product), calibration=torch.randn(32, 4, 1, 8), batch_size=4, num_classes=3)

def stacked():
    return experts(lambda x, w: torch.bmm(x.flatten(2).transpose(0, 1), w).transpose(0, 1))

def first():
    return experts(lambda x, w: (w @ x.transpose(-1, -2)).transpose(-1, -2))

def frozen():
    app = experts()
    app.module.weight.requires_grad_(False)
    return app

class Hidden(nn.Module):
    def forward(self, x):
        # A trace cannot detect a read of the memory.
        if not self.training:
            return x
        kind = ctypes.c_float if x.dtype == torch.float32 else ctypes.c_double
        values = np.ctypeslib.as_array(ctypes.cast(x.data_ptr(), ctypes.POINTER(kind)), (x.numel(),))
        return x * float(values.max())

def of(*layers, scale=1.0):
    torch.manual_seed(0)
    x = torch.rand(64, 16)
    module = nn.Sequential(*layers, nn.Linear(16, 3))
    with torch.no_grad():
        y = module.eval()(scale * x).argmax(1)
    return App(
        name="s", module=module.train(), calibration=x, batch_size=4, num_classes=3, validation=(scale * x, y)
    )

def hidden():
    return of(Hidden())

def far():
    torch.manual_seed(0)
    return of(nn.Linear(16, 16), nn.Tanh(), scale=100.0)
"""


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A file with Apps."""
    path = tmp_path / "apps.py"
    path.write_text(APP)
    return path


@dataclass(frozen=True)
class Refusal:
    """What both commands must report: the step that fails, a part of the reason, and of the headline."""

    step: str
    reason: str
    headline: str


REFUSALS = {
    "hidden": Refusal(RUN, "differs from torch's by", "module itself (Sequential) does not compute in onnxruntime"),
    "far": Refusal(INT8, "points worse than float", "module itself (Sequential) loses too much by int8 in onnxruntime"),
}


@pytest.mark.parametrize("name", in_ci(REFUSALS, ("far",)))
def test_the_check_refuses_what_the_export_refuses(fanin: Fanin, app: Path, tmp_path: Path, name: str) -> None:
    words, expected = ("export", f"{app}:{name}", "--format", "onnx", "--quiet"), REFUSALS[name]
    outcome = fanin(*words, "--check", "--json")
    assert outcome.status == 1, outcome
    (finding,) = json.loads(outcome.out)["findings"]
    assert (finding["step"], finding["graph_format"]) == (expected.step, "onnx")
    assert expected.reason in finding["reason"]
    assert fanin(*words, "--check").out.startswith(expected.headline)
    assert one_line(fanin(*words, "--out", tmp_path / "b", "--key", tmp_path / "k"), "export") == finding["reason"]


def test_the_check_has_the_limit_of_the_export(fanin: Fanin, app: Path) -> None:
    words = ("export", f"{app}:far", "--format", "onnx", "--quiet", "--check", "--max-int8-drop", "100")
    assert fanin(*words).status == 0


@pytest.mark.parametrize("graph_format", in_ci(("onnx", "tflite"), ("onnx",)))
@pytest.mark.parametrize("name", in_ci(("experts", "stacked", "first", "frozen"), ("experts", "stacked")))
def test_a_product_with_several_matrices_stays_float_and_is_reported(
    fanin: Fanin, app: Path, tmp_path: Path, name: str, graph_format: str
) -> None:
    words = ("export", f"{app}:{name}", "--format", graph_format, "--quiet")
    assert fanin(*words, "--check").status == 0
    outcome = fanin(*words, "--out", tmp_path / "b", "--key", tmp_path / "k", "--json")
    assert outcome.status == 0, outcome.err
    note = f"{graph_format}: these weights stay float32, because their products have no int8 form, "
    note += "or values almost zero on the calibration data: weight"
    # A frozen weight is a constant of the graph, and no slot.
    assert (note in json.loads(outcome.out)["notes"]) == (name != "frozen")
    bundle = open_folder(tmp_path / "b", trusted=[(tmp_path / "k.pub").read_text().strip()])
    kinds = {slot.parameter: slot.kind for slot in bundle.manifest.slots[graph_format]}
    assert kinds.get("weight", SlotKind.FLOAT) is SlotKind.FLOAT
    assert kinds["head.weight"] is not SlotKind.FLOAT


def test_an_error_of_a_runtime_names_the_layer_of_its_node() -> None:
    prepared = prepare(app_of("mlp"))
    exc = InvalidBundle("infer graph: onnxruntime cannot run it (while running QGemm node. Name:'3/node_linear_1')")
    (finding,) = failure_of_step(prepared.what, prepared.eager, ("onnx", RUN), exc).findings
    assert (finding.module, finding.kind, finding.step) == ("3", "Linear", RUN)
    assert finding.reason == f"App {prepared.app.name} (Mlp): {exc}"


def test_one_format_that_fails_does_not_hide_the_other(fanin: Fanin, app: Path) -> None:
    outcome = fanin("export", f"{app}:far", "--quiet", "--check", "--json")
    findings = json.loads(outcome.out)["findings"]
    assert {row["graph_format"] for row in findings} == {"onnx", "tflite"}


def test_the_check_loads_the_parameters_that_the_export_loads(fanin: Fanin, app: Path, tmp_path: Path) -> None:
    words = ("export", f"{app}:experts", "--format", "onnx", "--quiet", "--parameters", tmp_path / "lacking.bin")
    check = one_line(fanin(*words, "--check"), "export")
    assert "lacking.bin" in check
    assert one_line(fanin(*words, "--out", tmp_path / "b", "--key", tmp_path / "k"), "export") == check
