"""Any number of ranks trains as one process does: 20 steps and a fit, with uneven shards and empty ones."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).with_name("parity.py")
TOLERANCES = {"float32": 1e-5, "float64": 1e-10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``parity.py`` left, its warnings being errors."""
    made = tmp_path_factory.mktemp("parity")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "error", str(PROGRAM), str(made)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return made


def read(folder: Path, name: str) -> dict[str, np.ndarray]:
    with np.load(folder / f"{name}.npz") as archive:
        return dict(archive)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_equal_one_process(folder: Path, num_ranks: int, dtype: str) -> None:
    alone = read(folder, f"1-{dtype}-0")
    assert len(alone["losses"]) == 20
    assert alone["losses"][-3] < alone["losses"][0], "something was learnt"
    together = [read(folder, f"{num_ranks}-{dtype}-{rank}") for rank in range(num_ranks)]
    for name, expected in alone.items():
        assert np.abs(together[0][name] - expected).max() <= TOLERANCES[dtype], name


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_end_with_the_same_bits(folder: Path, num_ranks: int, dtype: str) -> None:
    first = read(folder, f"{num_ranks}-{dtype}-0")
    for rank in range(1, num_ranks):
        other = read(folder, f"{num_ranks}-{dtype}-{rank}")
        assert all((first[name] == other[name]).all() for name in first)


def test_averaging_the_ranks_means_would_be_caught(folder: Path) -> None:
    alone, averaged = read(folder, "1-float64-0"), read(folder, "averaging-0")
    assert np.abs(averaged["after_steps"] - alone["after_steps"]).max() > 100 * TOLERANCES["float32"]
