"""``pretrain``: the trained copy of the App, the unchanged original, and data that does not fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import fanin_in_process, usage_line
from support.raw import raw_app, raw_of
from support.several import several_app, several_examples
from torch import nn

from fanin.clients.data.digits import load_digits
from fanin.clients.data.examples import Examples
from fanin.datacenter.training.pretraining import Pretraining, fitting_data, pretrain
from fanin.edge.export import Adam, App, Recipe, squared_error
from fanin.protos.errors import Diverged, InvalidInput, UnsupportedModel

DIGITS = load_digits()
TRAIN = Examples(inputs={"x": DIGITS.inputs["x"][:401]}, y=DIGITS.y[:401])


def digits() -> App:
    """Return an untrained App with a norm, which fails on a batch of one sample."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    x = torch.from_numpy(DIGITS.inputs["x"][:64])
    return App(name="digits", module=module, calibration=x, batch_size=16, num_classes=10)


def accuracy(app: App) -> float:
    """Return the accuracy on held-out examples."""
    x, y = fitting_data(app, Examples(inputs={"x": DIGITS.inputs["x"][1000:]}, y=DIGITS.y[1000:]))
    with torch.no_grad():
        return float((app.module.eval()(x["x"]).argmax(1) == y).float().mean())


def test_an_app_learns_and_the_original_does_not_change() -> None:
    app, lines = digits(), list[str]()
    before = {name: value.clone() for name, value in app.module.state_dict().items()}
    trained = pretrain(app, TRAIN, Pretraining(epochs=3), lines.append)
    assert all(torch.equal(value, before[name]) for name, value in app.module.state_dict().items())
    assert [line.partition(",")[0] for line in lines] == [f"pretraining: epoch {number} of 3" for number in (1, 2, 3)]
    pretrain(app, TRAIN, Pretraining(epochs=1), lines.append)
    assert lines[3].partition(", ")[2] == lines[0].partition(", ")[2]
    assert accuracy(app) < 0.3
    assert accuracy(trained) > 0.6


def test_the_recipe_trains() -> None:
    app = replace(digits(), recipe=Recipe(optimizer=Adam(), clip_norm=1.0))
    app.module[1].weight.requires_grad_(requires_grad=False)
    trained = pretrain(app, TRAIN, Pretraining(epochs=2, learning_rate=0.01), lambda line: None)
    torch.testing.assert_close(trained.module[1].weight, app.module[1].weight, rtol=0.0, atol=0.0)
    assert accuracy(trained) > 0.6


def test_raw_data_is_preprocessed() -> None:
    app = raw_app("pixels")
    data = Examples(inputs={"x": raw_of("pixels").numpy()}, y=np.zeros(len(raw_of("pixels")), np.int32))
    torch.testing.assert_close(fitting_data(app, data)[0], app.inputs)


def test_an_app_of_several_inputs_learns() -> None:
    app, lines = several_app(), list[str]()
    pretrain(app, several_examples(160, seed=2), Pretraining(epochs=6, learning_rate=0.1), lines.append)
    first, last = (float(lines[number].rpartition(" ")[2]) for number in (0, -1))
    assert last < 0.7 * first
    wrong = Examples(inputs={"ids": several_examples(8, seed=2).inputs["ids"]}, y=np.zeros(8, np.int32))
    with pytest.raises(InvalidInput, match="FN-1387"):
        pretrain(app, wrong, Pretraining(), lines.append)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"inputs": {"x": np.zeros((4, 8), np.float32)}},
            r"got data x torch.float32 \(4, 8\), expected torch.float32 \(n, 1, 8, 8\)",
        ),
        ({"y": np.full(4, 10, np.int32)}, "got data y torch.int32 from 10 to 10, expected classes from 0 to 9"),
        ({"y": np.zeros(4, np.float32)}, "got data y torch.float32 .* expected classes from 0 to 9"),
    ],
)
def test_data_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    data = replace(DIGITS.take(np.arange(4)), **change)
    with pytest.raises(InvalidInput, match=f"pretraining: {message}"):
        pretrain(digits(), data, Pretraining(), lambda line: None)


def test_integer_targets_of_a_model_of_values_are_int64_in_its_loss() -> None:
    module, y = nn.Sequential(nn.Flatten(), nn.Linear(64, 1)), TRAIN.y[:, None]
    app = replace(digits(), module=module, num_classes=0, loss=squared_error, targets=y)
    assert fitting_data(app, replace(TRAIN, y=y))[1].dtype == torch.int64
    with pytest.raises(InvalidInput, match="FN-1387"):
        fitting_data(app, replace(TRAIN, y=y.astype(np.float32)))


def test_a_loss_that_is_not_finite_ends_the_training() -> None:
    app = replace(digits(), module=nn.Sequential(nn.Flatten(), nn.Linear(64, 1)), num_classes=0, loss=squared_error)
    data = Examples(inputs={"x": TRAIN.inputs["x"]}, y=TRAIN.y[:, None].astype(np.float32))
    with pytest.raises(Diverged, match=r"the loss is (nan|inf) in epoch 1, .* lower the learning rate"):
        pretrain(app, data, Pretraining(learning_rate=1e9), lambda line: None)


def test_a_module_that_fails_is_named() -> None:
    app = replace(digits(), module=nn.Sequential(nn.Flatten(), nn.Linear(63, 10)))
    with pytest.raises(UnsupportedModel, match=r"App digits: the pretraining fails in module 1 \(Linear\)"):
        pretrain(app, TRAIN, Pretraining(), lambda line: None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--epochs", "3"), "--epochs and --learning-rate: expected --pretrain DATA with them"),
        (("--pretrain", "digits", "--check"), "--pretrain: got --check too, which does not train"),
        (
            ("--pretrain", "digits", "--epochs", "0", "--out", "new"),
            "pretraining: got 0 epochs and a learning rate of 0.01, expected",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    fanin = fanin_in_process(capsys, monkeypatch)
    assert usage_line(fanin("export", "nothing.py:app", *words), "export").startswith(message)


APP = """
import torch
from fanin.clients.data.digits import load_digits
from fanin.edge.export import App

def app():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    return App(name="digits", module=module, calibration=load_digits().inputs["x"][:64], batch_size=16, num_classes=10)
"""


@pytest.mark.nightly
def test_an_export_trains_first_and_measures_int8(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fanin = fanin_in_process(capsys, monkeypatch)
    (tmp_path / "linear.py").write_text(APP)
    words = ("--out", tmp_path / "bundle", "--key", tmp_path / "key", "--format", "onnx", "--pretrain", "digits")
    outcome = fanin("export", f"{tmp_path / 'linear.py'}:app", *words, "--epochs", "2")
    assert outcome.status == 0, outcome
    assert "s: pretraining: epoch 2 of 2, loss 0." in outcome.err
    assert "  onnx                    float 8" in outcome.out
