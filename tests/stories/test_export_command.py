"""``fanin export``: what it writes and tells, what ``--check`` finds, and what is refused with one line."""

import json
from pathlib import Path

import pytest
from support.commands import Fanin, fanin_in_process, one_line

from fanin.edge.bundle import open_folder

APP = """
from dataclasses import replace
import torch
from torch import nn
from fanin.edge.export import App, Recipe

class Fold(nn.Module):
    def forward(self, x):
        return nn.functional.grid_sample(x, torch.zeros(x.shape[0], 4, 4, 2, device=x.device), align_corners=False)

def of(*layers, scale=1.0):
    torch.manual_seed(0)
    x = torch.rand(64, 1, 4, 4)
    module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3))
    with torch.no_grad():
        y = module.eval()(scale * x).argmax(1)
    validation = (scale * x, y)
    return App(name="small", module=module.train(), calibration=x, batch_size=4, num_classes=3, validation=validation)

def plain():
    return of(nn.Dropout(0.5))

def odd():
    return of(nn.Conv2d(1, 1, 1), nn.Upsample(scale_factor=1.0, mode="bicubic"))

def between():
    return of(nn.Conv2d(1, 1, 1), Fold())

class Flip(nn.Module):
    def forward(self, raw):
        return torch.special.bessel_j0(raw.float())

def raw():
    found = of(nn.Conv2d(1, 1, 1))
    pixels = torch.zeros(64, 1, 4, 4, dtype=torch.uint8)
    return replace(found, preprocess=Flip(), raw=pixels)

def far():
    # What devices see is far beyond what the scales were calibrated for.
    return of(nn.Linear(4, 4), nn.Tanh(), scale=100.0)
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


def test_a_bundle_in_both_formats_and_what_its_maker_should_know(fanin: Fanin, app: Path, tmp_path: Path) -> None:
    key, out = tmp_path / "publisher.key", tmp_path / "bundle"
    outcome = fanin("export", f"{app}:plain", "--out", out, "--key", key, "--json")
    assert outcome.status == 0, outcome.err
    row = json.loads(outcome.out)
    assert set(row["size_bytes"]) == {"train.onnx", "evaluate.onnx", "infer.onnx", "model.tflite", "parameters"}
    assert set(row["int8_drop_points"]) == {"onnx", "tflite"}
    assert all(abs(points) <= 1.0 for points in row["int8_drop_points"].values())
    assert row["notes"] == [
        "module 0 (Dropout) has dropout 0.5 in torch, none on devices: a graph draws no random numbers"
    ]
    bundle = open_folder(out, trusted=[key.with_suffix(".pub").read_text().strip()])
    assert bundle.sha256 == row["bundle"]
    again = fanin("export", f"{app}:plain", "--out", out, "--key", key)
    assert one_line(again, "export") == f"--out: {out} is not empty, expected a new folder"


def test_one_format_for_people(fanin: Fanin, app: Path, tmp_path: Path) -> None:
    words = ("export", f"{app}:plain", "--out", tmp_path / "b", "--key", tmp_path / "k", "--format", "onnx")
    outcome = fanin(*words)
    assert outcome.status == 0, outcome.err
    assert "note: module 0 (Dropout)" in outcome.out
    assert "float 100.00 %, int8" in outcome.out
    assert ".tflite" not in outcome.out


def test_check_tells_that_all_is_well(fanin: Fanin, app: Path) -> None:
    outcome = fanin("export", f"{app}:plain", "--check", "--format", "onnx")
    assert outcome.status == 0
    assert outcome.out == "App small: every part of it trains and infers in onnx\n"


@pytest.mark.parametrize(
    ("name", "module", "kind", "operator"),
    [
        ("odd", "1", "Upsample", "aten.upsample_bicubic2d_backward"),
        ("raw", "preprocess", "Flip", "prims.bessel_j0"),
        ("between", "1", "Fold", "aten.grid_sampler_2d_backward"),
    ],
)
def test_check_names_the_module_the_operator_and_the_runtimes(
    fanin: Fanin, app: Path, name: str, module: str, kind: str, operator: str
) -> None:
    outcome = fanin("export", f"{app}:{name}", "--check", "--format", "onnx", "--json")
    assert outcome.status == 1
    (found,) = json.loads(outcome.out)["findings"]
    assert (found["module"], found["kind"], found["operator"]) == (module, kind, operator)
    assert found["runtimes"] == ["onnxruntime"]
    told = fanin("export", f"{app}:{name}", "--check", "--format", "onnx")
    assert f"module {module} ({kind}) uses {operator}, which has no form in onnxruntime" in told.out
    assert "what to do: replace the operator" in told.out


def test_an_int8_that_is_far_worse_is_refused_unless_allowed(fanin: Fanin, app: Path, tmp_path: Path) -> None:
    words = ("export", f"{app}:far", "--out", tmp_path / "b", "--key", tmp_path / "k", "--format", "onnx")
    said = one_line(fanin(*words), "export")
    assert "points worse than float" in said
    assert "expected at most 1;" in said
    assert not (tmp_path / "b").exists()
    assert fanin(*words, "--max-int8-drop", "100").status == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--format", "coreml", "--check"), "--format: got ['coreml'], expected some of ['onnx', 'tflite']"),
        ((), "--out: expected a folder for the bundle, or --check to write none"),
    ],
)
def test_wrong_options_are_told(fanin: Fanin, app: Path, words: tuple[str, ...], said: str) -> None:
    assert one_line(fanin("export", f"{app}:plain", *words), "export") == said
