"""``fanin export``: its files and its report, the findings of ``--check``, and refusals in one line."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.commands import STEP, Fanin, fanin_in_process, one_line, usage_line
from support.nightly import in_ci

from fanin.edge.bundles.bundle import open_folder

APP = """
from dataclasses import replace
import torch
from torch import nn
from fanin.edge.export import App, Recipe, squared_error

class Fold(nn.Module):
    def forward(self, x):
        return nn.functional.interpolate(x, size=(4, 4), mode="bicubic", antialias=True)

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
    return of(nn.Conv2d(1, 1, 1), nn.Unflatten(1, (1, 1)), nn.Upsample(scale_factor=1.0, mode="trilinear"))

def between():
    return of(nn.Conv2d(1, 1, 1), Fold())

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        return nn.functional.interpolate(x, size=(4, 4), mode="bicubic", antialias=True)

def inside():
    return of(nn.Conv2d(1, 1, 1), nn.Sequential(Block()))

def odd_loss(logits, labels):
    return torch.special.bessel_j0(logits).sum(1)

def losing():
    return replace(plain(), loss=odd_loss)

def mean_loss(logits, labels):
    return nn.functional.cross_entropy(logits, labels)

def reducing():
    return replace(plain(), loss=mean_loss)

def failing_loss(logits, labels):
    return torch.nn.functional.nll_loss(logits[0], labels)

def failing():
    return replace(plain(), loss=failing_loss)

class Flip(nn.Module):
    def forward(self, raw):
        return torch.special.bessel_j0(raw.float())

def raw():
    found = of(nn.Conv2d(1, 1, 1))
    pixels = torch.zeros(64, 1, 4, 4, dtype=torch.uint8)
    return replace(found, preprocess=Flip(), raw=pixels)

def values(scale=1.0):
    torch.manual_seed(0)
    x = torch.rand(64, 16)
    module = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        validation = (scale * x, module(scale * x))
    return App(name="values", module=module, calibration=x, batch_size=4, loss=squared_error, validation=validation)

def far_values():
    return values(scale=100.0)

def unmeasured():
    return replace(plain(), validation=None)

def unmeasured_values():
    return replace(values(), validation=None)

def outlying():
    # One sample takes the whole range: the others are all the same to 8 bits.
    found = unmeasured()
    found.inputs["x"][0] = 1e4
    return found

def far():
    # What devices see is far beyond what the scales were calibrated for.
    torch.manual_seed(0)
    return of(nn.Linear(4, 4), nn.Tanh(), scale=100.0)

def losing_labels(num):
    # In int8, the second input of the first samples ends at 1, and the first class wins.
    torch.manual_seed(0)
    x, module = torch.rand(64, 2) / 2 + 0.5, nn.Linear(2, 2, bias=False)
    seen = x.clone()
    seen[:num] = torch.tensor([0.5, 50.0])
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.1]]))
        validation = (seen, module(seen).argmax(1))
    return App(name="few", module=module, calibration=x, batch_size=4, num_classes=2, validation=validation)

def one_label():
    return losing_labels(1)

def four_labels():
    return losing_labels(4)
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


def test_a_bundle_in_both_formats_and_the_notes_for_its_publisher(fanin: Fanin, app: Path, tmp_path: Path) -> None:
    key, out = tmp_path / "publisher.key", tmp_path / "bundle"
    outcome = fanin("export", f"{app}:plain", "--out", out, "--key", key, "--json")
    assert outcome.status == 0, outcome.err
    row = json.loads(outcome.out)
    assert set(row["size_bytes"]) == {"train.onnx", "evaluate.onnx", "infer.onnx", "model.tflite", "parameters"}
    assert set(row["int8_drop_points"]) == {"onnx", "tflite"}
    assert all(abs(points) <= 1.0 for points in row["int8_drop_points"].values())
    assert row["notes"] == ["a device draws 256 bytes of random numbers for each train step"]
    bundle = open_folder(out, trusted=[key.with_suffix(".pub").read_text().strip()])
    assert bundle.sha256 == row["bundle"]
    (tmp_path / "model.tflite").write_bytes(bundle.artifact("model.tflite"))
    np.save(tmp_path / "x.npy", np.ones((1, *bundle.manifest.signatures["infer"].inputs[0].shape[1:]), np.float32))
    inference = fanin("infer", tmp_path / "model.tflite", "--data", tmp_path / "x.npy", "--signature", "infer")
    assert inference.status == 0 and inference.err.startswith(
        "note: a file with the signatures infer and train is a bundle's"
    )
    retry = fanin("export", f"{app}:plain", "--out", out, "--key", key)
    assert (
        usage_line(retry, "export")
        == f"--out: {out} is not empty, expected a new folder; name another one, or remove it"
    )


def test_one_format_as_text(fanin: Fanin, app: Path, tmp_path: Path) -> None:
    words = ("export", f"{app}:plain", "--out", tmp_path / "b", "--key", tmp_path / "k", "--format", "onnx")
    outcome = fanin(*words)
    assert outcome.status == 0, outcome.err
    assert "note: a device draws 256 bytes" in outcome.out
    assert "float 100.00 %, int8" in outcome.out
    assert ".tflite" not in outcome.out


def test_an_export_prints_its_steps_on_standard_error(fanin: Fanin, app: Path, tmp_path: Path) -> None:
    words = ("export", f"{app}:plain", "--key", tmp_path / "k", "--format", "onnx", "--out")
    outcome = fanin(*words, tmp_path / "a", "--json")
    assert outcome.status == 0
    assert json.loads(outcome.out)["bundle"]
    assert STEP.sub("", outcome.err) == ""
    assert STEP.findall(outcome.err) == [
        f"loading the App {app}:plain",
        "preparing the module",
        "onnx: tracing, converting and quantizing",
        "onnx: verifying against eager torch",
        "onnx: comparing int8 with float",
        "writing the bundle",
    ]
    quiet_outcome = fanin(*words, tmp_path / "b", "--quiet")
    assert (quiet_outcome.status, quiet_outcome.err) == (0, "")


def test_check_reports_an_app_without_findings(fanin: Fanin, app: Path) -> None:
    outcome = fanin("export", f"{app}:plain", "--check", "--format", "onnx")
    assert outcome.status == 0
    assert outcome.out == "App small: every part of it trains and infers in onnx\n"


@dataclass(frozen=True)
class Finding:
    """The finding that the check must report for an App."""

    module: str
    kind: str
    operator: str
    advice: str


FINDINGS = {
    "odd": Finding(
        "2", "Upsample", "aten.upsample_trilinear3d_backward", "train only the layers after it: its forward"
    ),
    "raw": Finding("preprocess", "Flip", "aten.special_bessel_j0", "preprocess is exported as a graph, too"),
    "between": Finding(
        "1", "Fold", "aten._upsample_bicubic2d_aa_backward", "train only the layers after it: its forward"
    ),
    "losing": Finding("", "loss", "", "the loss does not depend on them; use operators with a gradient"),
}


@pytest.mark.parametrize("name", in_ci(FINDINGS, ("between", "losing")))
def test_check_names_the_module_the_operator_the_runtimes_and_the_remedy(fanin: Fanin, app: Path, name: str) -> None:
    outcome = fanin("export", f"{app}:{name}", "--check", "--format", "onnx", "--json")
    assert outcome.status == 1
    (finding,) = json.loads(outcome.out)["findings"]
    expected = FINDINGS[name]
    assert (finding["module"], finding["kind"], finding["operator"]) == (
        expected.module,
        expected.kind,
        expected.operator,
    )
    assert finding["call"] == ""
    assert expected.advice in finding["advice"]
    # A loss for which torch itself has no gradient does not concern a runtime.
    assert finding["runtimes"] == (["onnxruntime"] if expected.operator else [])


def test_check_prints_each_finding_and_its_remedy(fanin: Fanin, app: Path) -> None:
    outcome = fanin("export", f"{app}:inside", "--check", "--format", "onnx")
    first, *_, last = outcome.out.splitlines()
    assert first == (
        "module 1.0 (Block) at apps.py:36 calls torch.nn.functional.interpolate between its layers, which uses "
        "aten._upsample_bicubic2d_aa_backward, which has no form in onnxruntime"
    )
    assert last.startswith("  what to do: replace it, or train only the layers after it")


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("losing", "def odd_loss(logits, labels):", "no gradient reaches the parameters that learn from the loss"),
        (
            "reducing",
            "    return nn.functional.cross_entropy(logits, labels)",
            "returned (), expected (4,): one loss",
        ),
        (
            "failing",
            "    return torch.nn.functional.nll_loss(logits[0], labels)",
            "the loss fails at apps.py",
        ),
    ],
)
def test_the_headline_of_an_error_of_the_loss_names_the_loss(
    fanin: Fanin, app: Path, name: str, source: str, reason: str
) -> None:
    outcome = fanin("export", f"{app}:{name}", "--check", "--format", "onnx")
    first, second, _ = outcome.out.splitlines()
    line = 1 + app.read_text().splitlines().index(source)
    assert first == f"the loss at apps.py:{line} cannot be exported for any runtime"
    assert reason in second


@pytest.mark.nightly
def test_an_int8_that_is_far_worse_is_refused_unless_allowed(fanin: Fanin, app: Path, tmp_path: Path) -> None:
    words = ("export", f"{app}:far", "--out", tmp_path / "b", "--key", tmp_path / "k", "--format", "onnx")
    message = one_line(fanin(*words), "export")
    assert "points worse than float" in message
    assert "expected at most 1;" in message
    assert not (tmp_path / "b").exists()
    assert fanin(*words, "--max-int8-drop", "100").status == 0


def test_one_label_that_int8_loses_is_chance_and_four_of_64_are_not(fanin: Fanin, app: Path, tmp_path: Path) -> None:
    words = ("--key", tmp_path / "k", "--format", "onnx")
    outcome = fanin("export", f"{app}:one_label", "--out", tmp_path / "one", *words)
    assert outcome.status == 0, outcome.err
    assert (
        "onnx: int8 loses 1 of 64 labels, 1.56 points with a sampling error of 2.57; one label is 1.6 points. The "
        "limit is 1, and this sample cannot judge the difference of 0.56 points; use at least 1337 labels"
    ) in outcome.out
    message = one_line(fanin("export", f"{app}:four_labels", "--out", tmp_path / "four", *words), "export")
    assert "int8 loses 4 of 64 labels, 6.25 points with a sampling error of 5.14; one label is 1.6 points" in message
    assert "expected at most 1;" in message


def test_values_of_int8_that_are_far_worse_are_refused_unless_allowed(fanin: Fanin, app: Path, tmp_path: Path) -> None:
    words = ("--key", tmp_path / "k", "--format", "onnx")
    outcome = fanin("export", f"{app}:values", "--out", tmp_path / "good", *words, "--json")
    assert outcome.status == 0, outcome.err
    row = json.loads(outcome.out)
    assert row["int8_drop_points"] == {} and 0.0 < row["int8_rise_percent"]["onnx"] <= 10.0
    assert row["int8_loss_rise"].keys() == {"onnx"}
    words = ("export", f"{app}:far_values", "--out", tmp_path / "b", *words)
    message = one_line(fanin(*words), "export")
    assert re.search(
        r"onnx: int8's squared error is \d+\.\d\d % above float's \(mean loss .*expected at most 10;", message
    )
    assert not (tmp_path / "b").exists()
    assert fanin(*words, "--max-int8-drop", "1e6").status == 0


@pytest.mark.parametrize(
    ("name", "key", "pattern"),
    [
        (
            "unmeasured",
            "int8_agreement",
            r"onnx  +int8 and float agree on \d+\.\d\d % of the labels on 64 calibration examples",
        ),
        (
            "unmeasured_values",
            "int8_relative_error",
            r"onnx  +int8 differs from float by \d\.\d\d % of the values' spread on 64",
        ),
    ],
)
def test_without_validation_data_the_two_forms_are_compared(
    fanin: Fanin, app: Path, tmp_path: Path, name: str, key: str, pattern: str
) -> None:
    words = ("export", f"{app}:{name}", "--key", tmp_path / "k", "--format", "onnx")
    outcome = fanin(*words, "--out", tmp_path / "a")
    assert outcome.status == 0 and re.search(pattern, outcome.out), outcome
    assert "a large difference" not in outcome.out
    row = json.loads(fanin(*words, "--out", tmp_path / "b", "--json").out)
    assert row["int8_drop_points"] == row["int8_rise_percent"] == {}
    assert set(row[key]) == {"onnx"}


def test_calibration_data_that_makes_int8_useless_is_reported(fanin: Fanin, app: Path, tmp_path: Path) -> None:
    outcome = fanin("export", f"{app}:outlying", "--out", tmp_path / "b", "--key", tmp_path / "k", "--format", "onnx")
    assert outcome.status == 0, outcome.err
    assert re.search(r"note: onnx: int8 and float agree on \d\d?\.\d\d % .*, a large difference", outcome.out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--format", "coreml", "--check"), "--format: got ['coreml'], expected some of ['onnx', 'tflite']"),
        ((), "--out: expected a folder for the bundle, or --check to write none"),
        (("--check", "--out", "b"), "--out: got --check too, which writes nothing; expected one of them"),
        (("--max-int8-drop", "nan"), "--max-int8-drop: got nan, expected a number of at least 0"),
    ],
)
def test_wrong_options_are_reported(fanin: Fanin, app: Path, words: tuple[str, ...], message: str) -> None:
    assert usage_line(fanin("export", f"{app}:plain", *words), "export") == message
