"""The program of docs/howto/local.md that trains a Bundle without a coordinator, from outside the package."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from house.tree import ROOT
from support import federations as f
from support import linear
from support.outside import python_blocks

from fanin.edge.assembly.assemble import assemble

_, PROGRAM, _ = python_blocks((ROOT / "docs/howto/local.md").read_text())
NO_TORCH = "import sys\nsys.modules['torch'] = None\n"


def test_the_program_of_the_document_learns_without_torch(tmp_path: Path) -> None:
    assemble(linear.linear_graphs(), tmp_path / "bundle", f.PUBLISHER)
    x = np.random.default_rng(1).standard_normal((50, linear.NUM_INPUTS)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=x[:, : linear.NUM_CLASSES].argmax(1).astype(np.int32))
    command = [sys.executable, "-c", NO_TORCH + PROGRAM]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert completed.returncode == 0, completed.stderr
    losses = [float(loss) for loss in re.findall(r"loss of the last batch (\d\.\d{3})", completed.stdout)]
    assert len(losses) == 5 and losses[-1] < 0.7 * losses[0]
    (accuracy,) = re.findall(r"accuracy in int8 (\d\.\d{2})\n", completed.stdout)
    assert float(accuracy) > 0.85
