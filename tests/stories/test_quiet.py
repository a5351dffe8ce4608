"""An export hides the converter's noise and nothing else, and a runtime leaves standard error alone."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from support.tflite_file import small_file

CODE = """
import os, re, sys
from fanin.edge.export.quiet import quiet_stderr
for turn in range(2):
    with quiet_stderr(re.compile(rb"INFO: ")):
        os.write(2, b"INFO: noise\\nmine %d\\n" % turn)
        sys.stderr.write("python's\\n")
os.write(2, b"INFO: after\\n")
"""
DELEGATE = "INFO: Created TensorFlow Lite XNNPACK delegate for CPU."


def test_other_lines_are_printed_and_stderr_is_restored() -> None:
    completed = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60)
    assert sorted(completed.stderr.splitlines()) == ["INFO: after", "mine 0", "mine 1", "python's", "python's"]
    assert completed.stderr.endswith("INFO: after\n")


def test_litert_prints_one_line_at_most(tmp_path: Path) -> None:
    (tmp_path / "small.tflite").write_bytes(small_file())
    np.save(tmp_path / "x.npy", np.ones(2, np.float32))
    command = [sys.executable, "-m", "fanin.commands.main", "infer", "small.tflite", "--runtime", "litert"]
    command += ["--data", "x.npy"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    assert (completed.returncode, set(completed.stderr.splitlines()) - {DELEGATE}) == (0, set())
    assert len(completed.stderr.splitlines()) <= 1
    assert completed.stdout.startswith("y  float32 (2,)")
