"""Any mix of DP, TP and PP trains as one process does.

CI has each pair of axes on four ranks, and every schedule. The nightly suite has every mesh of four and of eight ranks.
Three axes on eight ranks are also in test_char_decoder, in CI.

In float64, losses and all parameters must agree to 1e-10, which detects every wrong factor and lost term. In float32,
sums over ranks use another code path of torch, and the losses must agree to 1e-5. All cells run in one pool of
processes that the first test starts. The pool checks gloo's own averaging first.
"""

from pathlib import Path

import numpy as np
import pytest
from parallel.cells import (
    CELLS,
    COMPILED,
    FAULTS,
    HALF_PRECISION,
    NUM_LONG_STEPS,
    NUM_NIGHTLY_STEPS,
    NUM_STEPS,
    STATISTICS,
    WORLD,
    Cell,
    factorisations,
    num_axes,
)
from parallel.programs import Programs

LOSS = {"float32": 1e-5, "float64": 1e-10}
# The norms of Gemma sum the gradients of their weights in float32, whatever the model's type (test_norms).
SINGLE_NORMS = 1e-5
# Loss of the last step on the first step's batch, as a share of the first loss.
LOSS_SHARES = {NUM_STEPS: 0.99, NUM_NIGHTLY_STEPS: 0.99, NUM_LONG_STEPS: 0.9}
PARAMETERS = {"float32": 1e-5, "float64": 1e-10}
# The cells of CI take half a minute on two quiet cores, those of the nightly suite ten. The first test waits for them.
LIMIT_S = 3600
pytestmark = pytest.mark.timeout(LIMIT_S)


def outcomes(programs: Programs, folder: Path, names: str, warning_action: str = "error") -> Path:
    """Run ``matrix.py``, with warnings as errors, and return the folder with its results.

    A failed cell leaves no file, and the log has the reason.
    """
    (folder / "log").write_text(programs.run("matrix", folder, names, warning_action=warning_action, timeout_s=LIMIT_S))
    return folder


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    return outcomes(programs, tmp_path_factory.mktemp("matrix"), "all")


@pytest.fixture(scope="module")
def nightly_matrix(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    return outcomes(programs, tmp_path_factory.mktemp("nightly"), "nightly")


@pytest.fixture(scope="module")
def compiled_cell(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    return outcomes(programs, tmp_path_factory.mktemp("compiled-cell"), COMPILED[0].name, "ignore")


@pytest.fixture(scope="module")
def compiled_matrix(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    # torch 2.13 warns of what its own compiler does.
    return outcomes(programs, tmp_path_factory.mktemp("compiled"), "compiled", "ignore")


def read(folder: Path, name: str) -> dict[str, np.ndarray]:
    assert (folder / f"{name}.npz").exists(), (folder / "log").read_text()
    with np.load(folder / f"{name}.npz") as archive:
        return dict(archive)


def differences(folder: Path, cell: Cell) -> tuple[float, float]:
    """Return (largest difference of the losses, largest of the parameters) between a cell and one process."""
    actual, expected = read(folder, cell.name), read(folder, cell.reference)
    names = list(expected["names"])
    assert list(actual["names"]) == names
    assert len(expected["losses"]) == cell.num_steps
    # The steps alternate between two batches.
    last_on_first_batch = expected["losses"][(cell.num_steps - 1) // 2 * 2]
    assert last_on_first_batch < LOSS_SHARES[cell.num_steps] * expected["losses"][0], "something was learnt"
    losses = max(
        np.abs(actual[name] - expected[name]).max() for name in ("losses", "evaluated", "reloaded") if name in actual
    )
    return float(losses), max(float(np.abs(actual[name] - expected[name]).max()) for name in names)


def has_parity(folder: Path, cell: Cell) -> bool:
    """Whether a cell has parity."""
    losses, parameters = differences(folder, cell)
    if cell.family == "gemma":
        return max(losses, parameters) <= SINGLE_NORMS
    return losses <= LOSS[cell.dtype] and parameters <= PARAMETERS[cell.dtype]


def test_gloo_averages_and_not_only_sums(matrix: Path) -> None:
    averages = read(matrix, "canary")
    world = int(averages["world"])
    assert world == max(cell.shape.num_ranks for cell in CELLS if not cell.nightly)
    for dtype in ("float32", "float64", "bfloat16"):
        total = averages[f"torch.{dtype}-total"]
        assert (total == world * np.arange(2 * world) + sum(range(world))).all()
        assert (averages[f"torch.{dtype}-means"] == total / world).all()
        assert (averages[f"torch.{dtype}-piece"] == total[:2] / world).all()


def test_the_matrix_has_every_mesh_of_eight_ranks() -> None:
    shapes = {str(shape) for shape in factorisations()}
    assert len(shapes) == 20
    assert shapes <= {cell.mesh for cell in CELLS if cell.dtype == "float64"}


def test_all_pairs_of_axes_meet_in_ci() -> None:
    cells = [cell for cell in CELLS if cell.dtype == "float64"]
    in_ci = {cell.shape for cell in cells if not cell.nightly}
    assert len({shape for shape in in_ci if shape.num_ranks == 4 and num_axes(shape) == 2}) == 6
    assert set(factorisations(4)) <= {cell.shape for cell in cells}


@pytest.mark.parametrize("cell", [cell for cell in CELLS if not cell.nightly], ids=lambda cell: cell.name)
def test_a_mesh_equals_one_process(matrix: Path, cell: Cell) -> None:
    assert has_parity(matrix, cell), differences(matrix, cell)


@pytest.mark.nightly
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.nightly], ids=lambda cell: cell.name)
def test_a_nightly_mesh_equals_one_process(nightly_matrix: Path, cell: Cell) -> None:
    assert has_parity(nightly_matrix, cell), differences(nightly_matrix, cell)


def check_compiled(folder: Path, cell: Cell) -> None:
    assert has_parity(folder, cell), differences(folder, cell)
    # All layers share one graph for steps and one for evaluations.
    assert read(folder, cell.name)["graphs"] == 2


def test_a_compiled_mesh_equals_one_process(compiled_cell: Path) -> None:
    check_compiled(compiled_cell, COMPILED[0])


@pytest.mark.nightly
@pytest.mark.parametrize("cell", COMPILED, ids=lambda cell: cell.name)
def test_a_nightly_compiled_mesh_equals_one_process(compiled_matrix: Path, cell: Cell) -> None:
    check_compiled(compiled_matrix, cell)


@pytest.mark.nightly
@pytest.mark.parametrize("cell", STATISTICS, ids=lambda cell: cell.name)
def test_a_batch_norm_depends_on_the_microbatch(nightly_matrix: Path, cell: Cell) -> None:
    losses, _ = differences(nightly_matrix, cell)
    assert losses > 100 * LOSS[cell.dtype]


@pytest.mark.parametrize("cell", HALF_PRECISION, ids=lambda cell: cell.name)
def test_half_precision_learns_as_well(matrix: Path, cell: Cell) -> None:
    losses, _ = differences(matrix, cell)
    assert LOSS["float64"] < losses < 0.05


def test_ranks_evaluate_the_parameters_that_they_load(matrix: Path) -> None:
    small_cells = [cell for cell in CELLS if cell.shape.num_ranks < WORLD and not cell.nightly]
    assert {cell.shape.pp for cell in small_cells} == {1, 2}
    for cell in small_cells:
        actual, expected = read(matrix, cell.name), read(matrix, cell.reference)
        assert np.abs(actual["reloaded"] - expected["reloaded"]) <= LOSS[cell.dtype], cell.name
        assert np.abs(actual["reloaded"] - actual["evaluated"]) > 1e-3, f"{cell.name}: other parameters, another loss"


@pytest.mark.parametrize("cell", FAULTS, ids=lambda cell: cell.name)
def test_deliberate_errors_are_detected(matrix: Path, cell: Cell) -> None:
    losses, parameters = differences(matrix, cell)
    assert losses > 100 * LOSS[cell.dtype]
    assert parameters > 100 * PARAMETERS[cell.dtype]
