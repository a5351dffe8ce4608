"""A job on any number of ranks equals the job of one process.

The job has 20 steps in uneven parts and evaluations, and resumes on other numbers of ranks. Compressed gradients and
local steps of ranks only come near it.
"""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from parallel.hooks import DENSE_STEPS
from parallel.parity import DEMO_CELLS, HOOKS, NUM_PARTS, NUM_STEPS
from parallel.programs import Programs

from fanin.datacenter.models.cnn import DigitsCnn
from fanin.datacenter.network.collectives import COLLECTIVES, RING

TOLERANCES = {"float32": 1e-5, "float64": 1e-10}
RESULTS = ("losses", "evaluated", "parameters")
LOSS_BYTES = 16
"""Bytes of the loss, and of a flag that it and the gradients are finite."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    """Return the folder with the results of ``parity.py``, which ran with warnings as errors."""
    results_folder = tmp_path_factory.mktemp("parity")
    programs.check("parity", results_folder, "change")
    return results_folder


@pytest.fixture(scope="module")
def night_folder(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    """Return the folder with the results of the demo's other jobs."""
    results_folder = tmp_path_factory.mktemp("parity-night")
    programs.check("parity", results_folder, "night")
    return results_folder


def read(folder: Path, name: str) -> dict[str, np.ndarray]:
    with np.load(folder / f"{name}.npz") as archive:
        return dict(archive)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_equal_one_process(folder: Path, num_ranks: int, dtype: str) -> None:
    reference, actual = read(folder, f"1-{dtype}-0"), read(folder, f"{num_ranks}-{dtype}-0")
    assert len(reference["losses"]) == 20
    # An epoch has three batches, and the end is evaluated, too.
    assert list(reference["evaluated"][:, 0]) == [3, 6, 9, 12, 15, 18, 20]
    assert reference["evaluated"][-1, 2] < reference["evaluated"][0, 2], "something was learnt"
    for name in RESULTS:
        assert np.abs(actual[name] - reference[name]).max() <= TOLERANCES[dtype], name


@pytest.mark.parametrize("name", [*TOLERANCES, "resumed"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_end_with_the_same_bits(folder: Path, num_ranks: int, name: str) -> None:
    first = read(folder, f"{num_ranks}-{name}-0")["parameters"]
    for rank in range(1, num_ranks):
        assert (read(folder, f"{num_ranks}-{name}-{rank}")["parameters"] == first).all()


def test_a_job_on_one_then_two_then_three_ranks_is_the_same_job(folder: Path) -> None:
    reference, actual = read(folder, "1-float64-0"), read(folder, "3-resumed-0")
    assert [len(read(folder, f"{num_ranks}-resumed-0")["losses"]) for num_ranks in (1, 2, 3)] == [11, 12, 20]
    assert np.abs(actual["losses"] - reference["losses"]).max() <= TOLERANCES["float64"]
    assert np.abs(actual["parameters"] - reference["parameters"]).max() <= TOLERANCES["float64"]
    assert np.abs(actual["evaluated"] - reference["evaluated"][:-1]).max() <= TOLERANCES["float64"]


@pytest.mark.parametrize(("name", "dtype"), DEMO_CELLS["change"])
def test_the_demos_models_cut_and_split_equal_one_process(folder: Path, name: str, dtype: str) -> None:
    check_demo(folder, name, dtype)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "dtype"), DEMO_CELLS["night"])
def test_the_demos_other_jobs_equal_one_process(night_folder: Path, name: str, dtype: str) -> None:
    check_demo(night_folder, name, dtype)


def check_demo(folder: Path, name: str, dtype: str) -> None:
    reference, ranks = (
        read(folder, f"1-{name}-{dtype}-0"),
        [read(folder, f"4-{name}-{dtype}-{rank}") for rank in range(4)],
    )
    # Forty samples in batches of 16: evaluations are after each third step, and at the end.
    assert list(reference["evaluated"][:, 0]) == [3, 6, 9, 12, 15, 18, 20]
    assert reference["losses"][-1] < reference["losses"][0], "something was learnt"
    for actual, key in product(ranks, RESULTS):
        assert np.abs(actual[key] - reference[key]).max() <= TOLERANCES[dtype], key


def test_averaging_the_ranks_means_is_detected(folder: Path) -> None:
    reference, actual = read(folder, "1-float64-0"), read(folder, "2-averaging-0")
    assert np.abs(actual["parameters"] - reference["parameters"]).max() > 100 * TOLERANCES["float32"]


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("fp16", 1e-8, 1e-3), ("bf16", 1e-6, 1e-2), ("powersgd", 1e-4, 0.2), ("local", 1e-4, 0.2)],
)
def test_copies_that_communicate_less_stay_near_and_end_equal(
    folder: Path, name: str, least: float, most: float
) -> None:
    reference, actual = read(folder, "2-even-0"), read(folder, f"2-{name}-0")
    difference = np.abs(actual["losses"] - reference["losses"]).max()
    assert least < difference < most
    assert actual["evaluated"][-1, 2] < actual["evaluated"][0, 2]
    assert (read(folder, f"2-{name}-1")["parameters"] == actual["parameters"]).all()


def test_powersgd_and_local_steps_begin_exactly(folder: Path) -> None:
    reference = read(folder, "2-even-0")["losses"]
    for name in ("powersgd", "local"):
        assert np.abs(read(folder, f"2-{name}-0")["losses"] - reference)[:5].max() < 1e-6


def test_local_period_1_equals_averaged_gradients(folder: Path) -> None:
    reference, actual = read(folder, "2-even-0"), read(folder, "2-each-0")
    for name in RESULTS:
        assert np.abs(actual[name] - reference[name]).max() <= TOLERANCES["float32"], name


def test_an_overflow_on_one_rank_skips_the_step_on_both(folder: Path) -> None:
    results = [read(folder, f"2-overflow-{rank}") for rank in range(2)]
    for each in results:
        assert list(each["skipped"]) == [True, False]
        before, after, later = each["parameters"]
        assert (after == before).all()
        assert (later != before).any()
        assert (each["parameters"] == results[0]["parameters"]).all()


def test_half_precision_sends_half_the_bytes_with_accumulation_too(folder: Path) -> None:
    reference = read(folder, "2-even-0")
    size = 4 * reference["parameters"].size
    # A bucket and the loss. In the second step torch also agrees on new buckets.
    assert reference["sent"][0].tolist() == [2, size + LOSS_BYTES]
    assert (reference["sent"][2:] == [2, size + LOSS_BYTES]).all()
    for name in ("fp16", "fp16-turns", "bf16"):
        results = read(folder, f"2-{name}-0")
        assert (results["sent"][2:] == [2, size // 2 + LOSS_BYTES]).all()
        assert (results["recorded"] == results["sent"]).all(), "fanin's counter has what torch has recorded"
    accumulated_results, single_results = read(folder, "2-fp16-turns-0"), read(folder, "2-fp16-0")
    assert 0 < np.abs(accumulated_results["losses"] - single_results["losses"]).max() < 1e-3


def test_powersgd_sends_two_factors_of_matrices_that_shrink(folder: Path) -> None:
    results = read(folder, "2-powersgd-0")
    rank, sizes = HOOKS["powersgd"].rank, [value.shape for value in DigitsCnn(1, channels=(4, 4)).parameters()]
    matrices = [(shape[0], math.prod(shape[1:])) for shape in sizes]
    # torch does not factor a matrix that would not shrink to less than half.
    factored_shapes = [(n, m) for n, m in matrices if 2 * rank * (n + m) < n * m]
    assert factored_shapes
    assert len(factored_shapes) < len(sizes)
    num_dense = sum(n * m for n, m in matrices if (n, m) not in factored_shapes)
    expected = 4 * (num_dense + sum(rank * (n + m) for n, m in factored_shapes)) + LOSS_BYTES
    # torch's own record is used, because a hook sends the second factor from another thread. It has the rest, two
    # factors and a loss.
    dense_steps = HOOKS["powersgd"].dense_steps
    assert (results["recorded"][dense_steps:] == [4, expected]).all()
    assert (results["recorded"][2:dense_steps, 1] == 4 * results["parameters"].size + LOSS_BYTES).all()


def test_powersgd_keeps_a_residual_and_sends_it_later(folder: Path) -> None:
    ranks = [read(folder, f"2-kept-powersgd-{rank}") for rank in range(2)]
    local_gradients, mean_gradients, residuals = (
        np.array([rank[name] for rank in ranks]) for name in ("own", "given", "kept")
    )
    assert (mean_gradients[0] == mean_gradients[1]).all()
    previous = np.concatenate([np.zeros_like(residuals[:, :1]), residuals[:, :-1]], axis=1)
    dense = slice(0, DENSE_STEPS)
    assert (residuals[:, dense] == 0).all()
    assert np.abs(mean_gradients[0, dense] - local_gradients[:, dense].mean(axis=0)).max() < 1e-12, "exact until then"
    later = slice(DENSE_STEPS, None)
    assert (
        np.abs(local_gradients[:, later] + previous[:, later] - mean_gradients[:, later] - residuals[:, later]).max()
        < 1e-12
    )
    assert np.abs(residuals[:, later].mean(axis=0)).max() > 0.01, "something was not sent at once"
    # The sum of the sent values and the residual equals the sum of all gradients.
    total = mean_gradients[0].sum(axis=0) + residuals[:, -1].mean(axis=0)
    assert np.abs(local_gradients.mean(axis=0).sum(axis=0) - total).max() < 1e-12


def test_powersgd_of_full_rank_is_the_exact_mean(folder: Path) -> None:
    ranks = [read(folder, f"2-kept-full-{rank}") for rank in range(2)]
    mean = np.mean([rank["own"] for rank in ranks], axis=0)
    assert np.abs(ranks[0]["kept"][DENSE_STEPS:]).max() > 0.01, "factors were sent, and each rank's own kept"
    assert np.abs(ranks[0]["given"] - mean).max() < 1e-12


def test_local_steps_send_once_in_a_period(folder: Path) -> None:
    results, settings = read(folder, "2-local-0"), HOOKS["local"]
    size, counts = 4 * results["parameters"].size, results["sent"]
    assert (results["recorded"] == counts).all()
    local = counts[settings.dense_steps :, 1] - LOSS_BYTES
    assert local.tolist() == ([0] * (settings.local_period - 1) + [size]) * (len(local) // settings.local_period)
    assert local.sum() * settings.local_period == (counts[2, 1] - LOSS_BYTES) * len(local)


def test_adascale_has_the_same_gains_with_accumulation_and_with_copies(folder: Path) -> None:
    reference = read(folder, "1-adascale-0")
    assert ((reference["gains"] > 1) & (reference["gains"] <= NUM_PARTS)).all()
    # The job takes as many steps of the small batch as configured, in fewer steps of the large one.
    num_steps = len(reference["losses"])
    assert reference["gains"][:-1].sum() < NUM_STEPS <= reference["gains"].sum()
    assert NUM_STEPS / NUM_PARTS < num_steps < NUM_STEPS
    for num_ranks, rank in ((2, 0), (2, 1), (3, 0), (3, 2)):
        actual = read(folder, f"{num_ranks}-adascale-{rank}")
        for name in (*RESULTS, "gains"):
            assert np.abs(actual[name] - reference[name]).max() <= TOLERANCES["float64"], name


def test_all_ranks_report_the_checkpoint_error_of_one(folder: Path) -> None:
    first, second = (list(read(folder, f"2-apart-{rank}")["told"]) for rank in range(2))
    assert first[0] == second[0]
    assert "InvalidInput: checkpoints: got folder /dev/null/apart, expected a place that can be written" in first[0]
    # Each error names the rank's own folder.
    message = "got checkpoints after the steps [[0], []] (one list for each rank), expected the same ones"
    for error in (*first[1:], *second[1:]):
        assert error.startswith("InvalidInput: ")
        assert message in error
    for error in (first[2], second[2]):
        assert "apart-1/LATEST: not JSON" in error


def test_a_process_whose_parameters_are_on_the_cpu_is_the_same_job(folder: Path) -> None:
    results = read(folder, "1-offloaded-0")
    reference, cpu_losses, resumed_losses = results["losses"]
    assert (cpu_losses[:6] == reference[:6]).all()
    assert (resumed_losses == reference).all()
    assert reference[-1] < reference[0]
    assert not results["left"], "the group that it needed is gone with it"


def test_collectives_match_numpy_and_send_the_predicted_bytes(folder: Path) -> None:
    num_ranks = 3
    for rank in range(num_ranks):
        results = read(folder, f"{num_ranks}-spoken-{rank}")
        # There are ten types. Five collectives have one result for each type, and the two that reduce have more.
        assert results["checked"].tolist() == [5 * 10 + 2 * (10 + 5 + 3 * 9), 0]
        # A sum in place of the mean is reported for each type that has a mean.
        assert len(results["told"]) == 5
        assert all(error.startswith("reduce_scatter (AVG) of ") for error in results["told"])
        sizes = dict(zip(COLLECTIVES, results["sizes"].tolist(), strict=True))
        assert all(counted == expected for _, _, counted, expected, _ in sizes.values())
        total = 2 * (num_ranks - 1) / num_ranks * 1200
        assert sizes["all_reduce"] == [1200, 1, 1200, 1200, total]
        assert sizes[RING] == [1200, 2 * (num_ranks - 1), total, total, total]
