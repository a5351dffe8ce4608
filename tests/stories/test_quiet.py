"""Nothing that a library says of itself reaches the user, and nothing else is swallowed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from fanin.edge.export.tflite import to_tflite
from fanin.edge.export.trace import Traced

CODE = """
import os, re, sys
from fanin.edge.runtimes.quiet import quiet_stderr
for turn in range(2):
    with quiet_stderr(re.compile(rb"INFO: ")):
        os.write(2, b"INFO: noise\\nmine %d\\n" % turn)
        sys.stderr.write("python's\\n")
os.write(2, b"INFO: after\\n")
"""


def test_lines_of_others_come_through_and_stderr_is_what_it_was() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60)
    assert sorted(done.stderr.splitlines()) == ["INFO: after", "mine 0", "mine 1", "python's", "python's"]
    assert done.stderr.endswith("INFO: after\n")


def test_litert_says_nothing_of_its_delegate(tmp_path: Path) -> None:
    module, x = torch.nn.Linear(3, 2).eval(), torch.ones(1, 3)
    traced = Traced(program=torch.export.export(module, (x,)), examples=[x], inputs=["x"], outputs=["y"])
    (tmp_path / "linear.tflite").write_bytes(to_tflite({"infer": traced}, "linear"))
    np.save(tmp_path / "x.npy", x.numpy())
    command = [sys.executable, "-m", "fanin.commands.main", "infer", "linear.tflite", "--runtime", "litert"]
    command += ["--data", "x.npy"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("y  float32 (1, 2)")
