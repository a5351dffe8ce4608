"""Operators of the datacenter's own: a graph format has none of them, so each has a form of plain operators."""

import re
from pathlib import Path
from typing import Final

import pytest
import torch
from support.commands import Fanin, fanin_in_process
from support.nightly import in_ci

from fanin import datacenter
from fanin.datacenter.models.decoder import rotations

REGISTRATION: Final = re.compile(r"(?:custom_op|triton_op|Library|define|impl)\(\s*\"([\w:]+)\"")
FORMS: Final = {"fanin::rotations"}
"""Own operators whose form these tests export."""
APP: Final = """
import torch
from torch import Tensor, nn
from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.edge.export import App, next_token

def decoder():
    config = DecoderConfig(vocabulary=13, width=16, num_layers=1, num_heads=4, num_kv_heads=2, feed_forward=8)
    torch.manual_seed(0)
    tokens = torch.randint(0, 13, (16, 6), dtype=torch.int32)
    module = Decoder(config, seed=0)
    return App(name="d", module=module, calibration=tokens, batch_size=4, num_classes=13, loss=next_token)

@torch.library.custom_op("mine::ramp", mutates_args=())
def ramp(num: int) -> Tensor:
    return torch.arange(num) / num

@ramp.register_fake
def _(num: int) -> Tensor:
    return torch.empty(num)

class Ramp(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(x * ramp(x.shape[-1]))

def other():
    return App(name="r", module=Ramp(), calibration=torch.randn(16, 8), batch_size=4, num_classes=3)
"""


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


def test_every_own_operator_is_one_of_these_tests() -> None:
    (folder,) = datacenter.__path__
    names = {name for path in Path(folder).rglob("*.py") for name in REGISTRATION.findall(path.read_text())}
    assert names == FORMS


@pytest.mark.parametrize("graph_format", in_ci(("onnx", "tflite"), ("onnx",)))
def test_a_decoder_is_exported(fanin: Fanin, tmp_path: Path, graph_format: str) -> None:
    (tmp_path / "apps.py").write_text(APP)
    # The export compares losses, predictions and every gradient with torch.
    outcome = fanin("export", f"{tmp_path / 'apps.py'}:decoder", "--check", "--format", graph_format, "--quiet")
    assert outcome.status == 0, outcome


def test_the_operator_equals_its_form() -> None:
    x = torch.zeros(2, 5, 8, dtype=torch.float64)
    operator = torch.ops.fanin.rotations(5, 4, 100.0, torch.float64, x.device)
    assert all(torch.equal(one, other) for one, other in zip(operator, rotations(x, 100.0), strict=True))


def test_an_operator_of_another_package_is_named_with_its_remedy(fanin: Fanin, tmp_path: Path) -> None:
    (tmp_path / "apps.py").write_text(APP)
    outcome = fanin("export", f"{tmp_path / 'apps.py'}:other", "--check", "--format", "onnx", "--quiet")
    first, _, advice = outcome.out.splitlines()
    assert first == "module itself (Ramp) uses mine.ramp, which has no form in onnxruntime"
    assert "no layer calls this operator by itself" in advice and "decompositions, docs/howto/operators.md" in advice
