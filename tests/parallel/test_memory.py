"""Predicted peaks are within a tenth of the peaks that torch's tracker measures with fake tensors."""

import json
from pathlib import Path

import pytest
from parallel.memory import CELLS
from parallel.programs import Programs
from support.nightly import in_ci

TOLERANCE = 0.10
Peaks = dict[str, tuple[int, int]]


def run(programs: Programs, file: Path, size: str) -> Peaks:
    # Warnings are no errors, because the tracker uses deprecated functions of torch.
    programs.check("memory", file, size, warning_action="default", timeout_s=1200.0)
    return {
        name: (tracked_bytes, predicted_bytes)
        for name, (tracked_bytes, predicted_bytes) in json.loads(file.read_text()).items()
    }


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("size", in_ci(CELLS, ("first",)))
def test_the_formula_is_within_a_tenth_of_the_tracker(programs: Programs, tmp_path: Path, size: str) -> None:
    peaks = run(programs, tmp_path / "peaks.json", size)
    assert sorted(peaks) == sorted(CELLS[size])
    outliers = {
        name: (tracked_bytes, predicted_bytes)
        for name, (tracked_bytes, predicted_bytes) in peaks.items()
        if abs(predicted_bytes / tracked_bytes - 1) > TOLERANCE
    }
    assert outliers == {}
