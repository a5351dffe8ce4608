"""A job on any number of ranks is the job of one process: 20 steps in uneven parts, evaluations, going on elsewhere;
and what is near it only, gradients that travel in fewer bits and steps that ranks take by themselves, is near it."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).with_name("parity.py")
TOLERANCES = {"float32": 1e-5, "float64": 1e-10}
RESULTS = ("losses", "evaluated", "parameters")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``parity.py`` left, its warnings being errors."""
    made = tmp_path_factory.mktemp("parity")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "error", str(PROGRAM), str(made)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return made


def read(folder: Path, name: str) -> dict[str, np.ndarray]:
    with np.load(folder / f"{name}.npz") as archive:
        return dict(archive)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_equal_one_process(folder: Path, num_ranks: int, dtype: str) -> None:
    alone, together = read(folder, f"1-{dtype}-0"), read(folder, f"{num_ranks}-{dtype}-0")
    assert len(alone["losses"]) == 20
    # An epoch has three batches, and the end is looked at, too.
    assert list(alone["evaluated"][:, 0]) == [3, 6, 9, 12, 15, 18, 20]
    assert alone["evaluated"][-1, 2] < alone["evaluated"][0, 2], "something was learnt"
    for name in RESULTS:
        assert np.abs(together[name] - alone[name]).max() <= TOLERANCES[dtype], name


@pytest.mark.parametrize("name", [*TOLERANCES, "resumed"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_end_with_the_same_bits(folder: Path, num_ranks: int, name: str) -> None:
    first = read(folder, f"{num_ranks}-{name}-0")["parameters"]
    for rank in range(1, num_ranks):
        assert (read(folder, f"{num_ranks}-{name}-{rank}")["parameters"] == first).all()


def test_a_job_that_one_two_and_three_ranks_did_in_turn_is_the_same_job(folder: Path) -> None:
    alone, resumed = read(folder, "1-float64-0"), read(folder, "3-resumed-0")
    assert [len(read(folder, f"{num_ranks}-resumed-0")["losses"]) for num_ranks in (1, 2, 3)] == [11, 12, 20]
    assert np.abs(resumed["losses"] - alone["losses"]).max() <= TOLERANCES["float64"]
    assert np.abs(resumed["parameters"] - alone["parameters"]).max() <= TOLERANCES["float64"]
    assert np.abs(resumed["evaluated"] - alone["evaluated"][:-1]).max() <= TOLERANCES["float64"]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ["digits", "fashion-mnist"])
def test_the_demos_models_cut_and_split_equal_one_process(folder: Path, name: str, dtype: str) -> None:
    alone, ranks = read(folder, f"1-{name}-{dtype}-0"), [read(folder, f"4-{name}-{dtype}-{rank}") for rank in range(4)]
    # Forty samples in batches of 16: an evaluation after each third step, and at the end.
    assert list(alone["evaluated"][:, 0]) == [3, 6, 9, 12, 15, 18, 20]
    assert alone["losses"][-1] < alone["losses"][0], "something was learnt"
    for together, result in product(ranks, RESULTS):
        assert np.abs(together[result] - alone[result]).max() <= TOLERANCES[dtype], result


def test_averaging_the_ranks_means_would_be_caught(folder: Path) -> None:
    alone, averaged = read(folder, "1-float64-0"), read(folder, "2-averaging-0")
    assert np.abs(averaged["parameters"] - alone["parameters"]).max() > 100 * TOLERANCES["float32"]


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("fp16", 1e-8, 1e-3), ("bf16", 1e-6, 1e-2), ("powersgd", 1e-4, 0.2), ("local", 1e-4, 0.2)],
)
def test_copies_that_speak_less_stay_near_and_end_alike(folder: Path, name: str, least: float, most: float) -> None:
    exact, found = read(folder, "2-even-0"), read(folder, f"2-{name}-0")
    away = np.abs(found["losses"] - exact["losses"]).max()
    assert least < away < most
    assert found["evaluated"][-1, 2] < found["evaluated"][0, 2]
    assert (read(folder, f"2-{name}-1")["parameters"] == found["parameters"]).all()


def test_powersgd_and_local_steps_begin_exactly(folder: Path) -> None:
    exact = read(folder, "2-even-0")["losses"]
    for name in ("powersgd", "local"):
        assert np.abs(read(folder, f"2-{name}-0")["losses"] - exact)[:5].max() < 1e-6


def test_a_local_step_at_a_time_is_what_gradients_that_meet_come_to(folder: Path) -> None:
    exact, found = read(folder, "2-even-0"), read(folder, "2-each-0")
    for name in RESULTS:
        assert np.abs(found[name] - exact[name]).max() <= TOLERANCES["float32"], name


def test_an_overflow_on_one_rank_leaves_the_step_out_on_both(folder: Path) -> None:
    found = [read(folder, f"2-overflow-{rank}") for rank in range(2)]
    for each in found:
        assert list(each["skipped"]) == [True, False]
        begun, after, later = each["parameters"]
        assert (after == begun).all()
        assert (later != begun).any()
        assert (each["parameters"] == found[0]["parameters"]).all()
