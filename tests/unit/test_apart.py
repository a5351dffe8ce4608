"""An export converts graph formats in parallel, in a forked process. Errors equal those of a sequential export."""

import subprocess
import sys
from pathlib import Path

import pytest

from fanin.commands.console.terminal import publisher_key
from fanin.edge.bundles.bundle import open_folder
from fanin.edge.export import export, load_app

APP = """
import torch
from fanin.edge.export import App
from torch import nn

class Wrong(nn.Module):
    def forward(self, x):
        return torch.lgamma(x * x + 1.0)

def normed():
    torch.manual_seed(0)
    norms = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4).eval(), nn.ReLU()
    module = nn.Sequential(*norms, nn.Flatten(), nn.Linear(16, 3))
    return App(name="normed", module=module, calibration=torch.randn(8, 1, 4, 4), batch_size=4, num_classes=3)

def wrong():
    module = nn.Sequential(nn.Linear(4, 4), Wrong(), nn.Linear(4, 3))
    return App(name="wrong", module=module, calibration=torch.randn(8, 4), batch_size=4, num_classes=3)
"""
CODE = """
import os, sys
from fanin.commands.main import main
from fanin.edge.export.formats import apart
apart.os.sched_getaffinity = lambda pid: {0, 1}
status = main(sys.argv[1:])
print("converter here:", "litert_torch" in sys.modules)
sys.exit(status)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "own_app.py").write_text(APP)
    command = [sys.executable, "-c", CODE, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.nightly
def test_an_export_converts_in_a_fork_and_its_bundle_is_that_of_one_process(tmp_path: Path) -> None:
    completed = run(tmp_path, "export", "own_app.py:normed", "--out", "bundle", "--key", "key")
    assert completed.returncode == 0, completed.stderr
    # Otherwise the fork failed, and this process converted the graphs.
    assert "converter here: False" in completed.stdout
    key = publisher_key(tmp_path / "key")
    sequential = export(load_app(f"{tmp_path / 'own_app.py'}:normed"), tmp_path / "alone", key).bundle
    assert open_folder(tmp_path / "bundle", trusted=[key.public]).manifest == sequential.manifest


@pytest.mark.nightly
def test_an_operator_that_both_formats_lack_is_reported_for_both(tmp_path: Path) -> None:
    completed = run(tmp_path, "export", "own_app.py:wrong", "--check")
    assert completed.returncode == 1, completed.stderr
    assert completed.stdout.count("module 1 (Wrong)") == 2, completed.stdout
    assert "converter here: False" in completed.stdout


@pytest.mark.nightly
def test_an_error_of_a_fork_is_that_of_the_export(tmp_path: Path) -> None:
    completed = run(tmp_path, "export", "own_app.py:wrong", "--out", "bundle", "--key", "key")
    assert completed.returncode == 1
    assert "lgamma" in completed.stderr
    assert "Traceback" not in completed.stderr
    assert not (tmp_path / "bundle").exists()
