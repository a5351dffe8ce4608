"""Predicted peaks are within a tenth of what torch's tracker sees, with tensors that are none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from parallel.memory import CELLS
from support.nightly import nightly_but

PROGRAM = Path(__file__).with_name("memory.py")
TOLERANCE = 0.10
Found = dict[str, tuple[int, int]]


def run(which: str) -> Found:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # Not with warnings as errors: the tracker uses what torch has deprecated.
    done = subprocess.run(
        [sys.executable, str(PROGRAM), which], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: (tracked, predicted) for name, (tracked, predicted) in json.loads(done.stdout).items()}


@pytest.mark.parametrize("which", nightly_but(CELLS, ("first",)))
def test_the_formula_is_within_a_tenth_of_the_tracker(which: str) -> None:
    found = run(which)
    assert sorted(found) == sorted(CELLS[which])
    wrong = {
        name: (tracked, predicted)
        for name, (tracked, predicted) in found.items()
        if abs(predicted / tracked - 1) > TOLERANCE
    }
    assert wrong == {}
