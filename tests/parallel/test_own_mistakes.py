"""Mistakes in a user's App end a training job with one sentence that names the cause and the line."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fanin.datacenter.config.settings import DataSettings, ModelSettings, StopSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.files.jobfiles import read_error, write_config
from fanin.datacenter.jobs.job import _error_of_app, main
from fanin.datacenter.parallel.settings import TrainingSettings

MODULE = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from fanin.edge.export import App
from fanin.edge.export.app.losses import next_token

class Net(nn.Module):
    def __init__(self, vocabulary=12):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 4), nn.Linear(4, 12)

    def forward(self, x):
        return self.head(self.embed(x))

def of(module, loss=next_token):
    x = torch.zeros(4, 4, dtype=torch.int32)
    return App(name="own", module=module, calibration=x, batch_size=4, num_classes=12, loss=loss)

def good():
    return of(Net())

class Raises(Net):
    def forward(self, x):
        raise KeyError("oops")

def raises():
    return of(Raises())

class Two(Net):
    def forward(self, x, other):
        return super().forward(x)

def two():
    return of(Two())

def several():
    x = torch.zeros(4, 4, dtype=torch.int32)
    return App(name="own", module=Two(), calibration=(x, x[:, :1]), batch_size=4, num_classes=12, loss=next_token)

class Named(Net):
    def forward(self, x):
        return {"logits": super().forward(x)}

def named():
    return of(Named())

def small():
    return of(Net(5))

def flat():
    return of(Net(), lambda y, t: cross_entropy(y.flatten(0, 1), t.flatten().long(), reduction="none"))

def mean():
    return of(Net(), lambda y, t: y.mean())

def empty():
    return of(nn.Identity())

def frozen():
    return of(Net().requires_grad_(False))

def half():
    return of(Net().half())

def mixed():
    net = Net()
    net.head.double()
    return of(net)

def lazy():
    net = Net()
    net.head = nn.LazyLinear(12)
    return of(net)

def meta():
    return of(Net().to("meta"))

def leaves(outputs, targets):
    raise SystemExit(3)

def exits():
    return of(Net(), leaves)
"""
DIFFERS = "got 3 tensors: 1 of another shape or type, such as embed.w"


def error_of(folder: Path, app: str, **model: Path) -> str:
    """Run a job of one rank, and return the error that it stores."""
    (folder / "own.py").write_text(MODULE)
    tokens = np.random.default_rng(0).integers(0, 12, (20, 5)).astype(np.int32)
    tokens[0] = 11
    np.savez(folder / "tokens.npz", x=tokens[:, :-1], y=tokens[:, 1:])
    config = TrainConfig(
        model=ModelSettings(app=f"{folder / 'own.py'}:{app}", **model),
        data=DataSettings(examples=folder / "tokens.npz"),
        training=TrainingSettings(batch_size=20, learning_rate=0.05),
        stop=StopSettings(steps=1),
    )
    (folder / "job").mkdir()
    sys.modules.pop("fanin_app_own", None)
    status = main([str(write_config(config, folder / "job"))])
    error = read_error(folder / "job")
    assert (status == 0) == (error is None)
    return str(error or "")


@pytest.mark.parametrize(
    ("app", "message"),
    [
        ("raises", "its own code raised KeyError at {own}:25: 'oops'; the log of the rank has the traceback"),
        ("exits", "its own code raised SystemExit at {own}:80: 3; the log of the rank has the traceback"),
        (
            "two",
            "App own: calibration data: got the inputs ['x'], expected those of Two.forward(x, other) (missing a re",
        ),
        (
            "several",
            "App own: got a module with the inputs ['x', 'other'] and output '', expected the input x alone and",
        ),
        ("small", "its own code raised IndexError at {own}:14: index out of range in self; the log of the rank"),
        ("named", "model: the module returned dict, expected a tensor; return that tensor alone in forward"),
        (
            "flat",
            "loss: got shape (72,) for 18 samples, expected (18,), one number for each sample; use reduction='none'",
        ),
        ("mean", "loss: got shape () for 18 samples, expected (18,), one number for each sample; use reduction='none'"),
        (
            "empty",
            "App own: no parameter requires a gradient, expected at least one to train; call requires_grad_() on",
        ),
        (
            "frozen",
            "App own: no parameter requires a gradient, expected at least one to train; call requires_grad_() on",
        ),
        ("half", "App own: parameter embed.weight is torch.float16, expected torch.float32, or torch.float64 for"),
        (
            "mixed",
            "App own: parameter head.weight is torch.float64, expected torch.float32, or torch.float64 for all; ca",
        ),
        ("lazy", "App own: parameter head.weight has no shape yet, expected one; call the module once on an example"),
        ("meta", "App own: parameter embed.weight is on the meta device, expected one with values; load its values"),
        ("good", ""),
    ],
)
def test_a_mistake_in_an_app_is_one_sentence(
    app: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of(tmp_path, app)
    expected = message.format(own=tmp_path / "own.py")
    assert expected in error
    assert bool(error) == bool(expected)
    if app == "raises":
        assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "absent.safetensors: no such file, expected a .safetensors file"),
        ("short", "short.safetensors: not a complete safetensors file (Error while deserializing header: "),
        ("type", f"type.safetensors: {DIFFERS}eight: got F16 [12, 4], expected F32 [12, 4]"),
        ("shape", f"shape.safetensors: {DIFFERS}eight: got F32 [5, 4], expected F32 [12, 4]"),
        (
            "names",
            "names.safetensors: got 3 tensors: 3 unknown to the model, 3 missing",
        ),
    ],
)
def test_a_file_of_initial_parameters_of_another_model_is_refused(name: str, message: str, tmp_path: Path) -> None:
    values = {"embed.weight": torch.zeros(12, 4), "head.weight": torch.zeros(12, 4), "head.bias": torch.zeros(12)}
    variants = {
        "type": values | {"embed.weight": torch.zeros(12, 4, dtype=torch.float16)},
        "shape": values | {"embed.weight": torch.zeros(5, 4)},
        "names": {f"model.{key}": value for key, value in values.items()},
    }
    path = tmp_path / f"{name}.safetensors"
    if name != "absent":
        save_file(variants.get(name, values), path)
    if name == "short":
        path.write_bytes(path.read_bytes()[:-8])
    assert message in error_of(tmp_path, "good", initial=path)


def test_a_rank_that_waited_for_a_lost_one_does_not_blame_the_app(tmp_path: Path) -> None:
    path, names = tmp_path / "own.py", dict[str, Callable[..., None]]()
    path.write_text("def forward(call):\n    call()\n\ndef wrong():\n    raise ValueError('mine')\n")
    exec(compile(path.read_text(), path, "exec"), names)
    lost_source = "def lost():\n    raise RuntimeError('peer')\n"
    closed_source = (
        "def closed():\n    raise RuntimeError('[gloo/transport/tcp/pair.cc:553] Connection closed by peer')\n"
    )
    exec(closed_source, names)
    exec(compile(lost_source, "/python/torch/distributed/collectives.py", "exec"), names)
    config = TrainConfig(
        model=ModelSettings(app=f"{path}:app"),
        data=DataSettings(examples=tmp_path / "x.npz"),
        training=TrainingSettings(batch_size=1, learning_rate=0.1),
        stop=StopSettings(steps=1),
    )

    def error_in(call: str) -> str:
        with pytest.raises((RuntimeError, ValueError)) as excinfo:
            names["forward"](names[call])
        return str(_error_of_app(config, excinfo.value) or "")

    assert error_in("lost") == ""
    assert error_in("closed") == "", "also where torch's frames are not below the App's"
    assert f"raised ValueError at {path}:5: mine" in error_in("wrong")


def test_a_forward_that_does_not_fit_is_named_below_the_hooks_of_a_mesh(tmp_path: Path) -> None:
    config = TrainConfig(
        model=ModelSettings(app="own.py:app"),
        data=DataSettings(examples=tmp_path / "x.npz"),
        training=TrainingSettings(batch_size=1, learning_rate=0.1),
        stop=StopSettings(steps=1),
    )
    names = dict[str, Callable[..., None]]()
    stage = str(Path(torch.__file__).parent / "distributed/stage.py")
    exec(compile("def forward(module):\n    module(0)\n", stage, "exec"), names)
    module = torch.nn.Bilinear(2, 2, 2)
    # Sharded modules have hooks, with which torch calls a forward from another function.
    module.register_forward_hook(print)
    with pytest.raises(TypeError) as excinfo:
        names["forward"](module)
    # The test's own frame does not belong to an App.
    traceback = excinfo.value.__traceback__
    assert traceback is not None
    error = _error_of_app(config, excinfo.value.with_traceback(traceback.tb_next))
    assert "own code raised TypeError: Bilinear.forward() missing 1 required positional argument: 'input2'" in str(
        error
    )
