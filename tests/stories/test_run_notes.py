"""The notes that ``fanin run`` prints about the export of an App, with a coordinator behind real gRPC and TLS."""

from pathlib import Path

import pytest
from support import federations as f
from support.commands import fanin_in_process
from support.hosted import Hosted

PLAN = """
app = "{app}"
name = "story"
[cohort]
concurrency = 3
[training]
learning_rate = 0.1
[int8]
ranges = "{ranges}"
"""
UNMEASURED = """
import torch
from fanin.edge.export import App

def app():
    x = torch.linspace(-1, 1, 40)[:, None]
    return App(name="line", module=torch.nn.Linear(1, 2), calibration=x, batch_size=4, num_classes=2)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("ranges", "is_advised"), [("export", True), ("devices", False)])
def test_run_advises_other_ranges_only_to_a_plan_without_them(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ranges: str,
    is_advised: bool,
) -> None:
    (tmp_path / "unmeasured.py").write_text(UNMEASURED)
    (tmp_path / "plan.toml").write_text(PLAN.format(app=tmp_path / "unmeasured.py:app", ranges=ranges))
    (tmp_path / "publisher.key").write_text(f.PUBLISHER.private_bytes().hex())
    host = Hosted(tmp_path / "coordinator").start()
    try:
        (host.state / "tokens").mkdir()
        (host.state / "tokens" / "operator.token").write_text(host.operator_token)
        (host.state / "address").write_text(host.address)
        words = ("run", tmp_path / "plan.toml", "--key", tmp_path / "publisher.key", "--state", host.state)
        outcome = fanin_in_process(capsys, monkeypatch)(*words)
    finally:
        host.stop()
    assert outcome.status == 0, outcome.err
    assert "the cost of int8 is not measured" in outcome.err
    assert ("int8.ranges" in outcome.err) is is_advised
