"""One training step on two ranks of ``tp``, compared with one process. It is part of ``check_family``.

The ranks are processes of this machine, on the CPU, with gloo. They compute in float64.
"""

import multiprocessing
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from fanin.datacenter.families.family import FamilyModel
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.draws.recording import find_draws
from fanin.datacenter.parallel.engine import build_engine
from fanin.datacenter.parallel.layout import styles_remedy
from fanin.datacenter.parallel.objective import TOKENS
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.devices import BACKENDS, build_mesh
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.protos.errors import FaninError

NUM_RANKS: Final = 2
TOLERANCE: Final = 1e-4
"""Largest 2-norm of a parameter's error, relative to the 2-norm of its change."""
RATE: Final = 1.0
STDERR: Final = 2
TIMEOUT_S: Final = 120.0
VALUES: Final = "values.pt"
ERROR: Final = "error.txt"


def check_two_ranks(model: FamilyModel, inputs: Tensor) -> None:
    """Check that two ranks of ``tp`` compute the step of one process, with split sequences too if the layout has them.

    Args:
        model: a model of the family.
        inputs: tokens (n, T), T even.

    Raises:
        AssertionError: the ranks fail, or have other parameters after the step.
    """
    before = {name: value.detach().double() for name, value in model.build(3).named_parameters()}
    expected = _step(model, inputs, None)
    for sequence in (False, True) if model.layout.sequence else (False,):
        parallel = ParallelSettings(mesh=MeshShape(tp=NUM_RANKS), precision="double", sequence_parallel=sequence)
        what = f"layout: on tp={NUM_RANKS}{' with sequence_parallel' if sequence else ''}"
        actual = _on_ranks(model, inputs, parallel, what)
        for name, value in expected.items():
            error = (actual[name] - value).norm() / (value - before[name]).norm().clamp(min=1e-12)
            assert error < TOLERANCE, (
                f"{what} a training step changes {name} by other values than one process (relative error {error:.2g}); "
                f"{styles_remedy(sequence=sequence)}"
            )


def _on_ranks(model: FamilyModel, inputs: Tensor, parallel: ParallelSettings, what: str) -> dict[str, Tensor]:
    """Return the parameters after a step on several ranks. Raises AssertionError."""
    # A fork needs no name by which to find the functions of the family again. CUDA forbids forks.
    fork = sys.platform == "linux" and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    context = multiprocessing.get_context("fork") if fork else multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(model, inputs, rank, parallel, Path(folder)) for rank in range(NUM_RANKS)]
        ranks = [context.Process(target=_run_rank, args=each) for each in arguments]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(TIMEOUT_S)
        for each in ranks:
            if each.is_alive():
                each.kill()
                each.join()
        error, values = Path(folder) / ERROR, Path(folder) / VALUES
        reason = (
            error.read_text(encoding="utf-8")
            if error.exists()
            else f"the ranks ended with {[each.exitcode for each in ranks]}"
        )
        assert values.exists(), (
            f"{what} a training step fails, but not in one process: {reason}; "
            f"{styles_remedy(sequence=parallel.sequence_parallel)}"
        )
        parameters: dict[str, Tensor] = torch.load(values, weights_only=True)
        return parameters


def _run_rank(model: FamilyModel, inputs: Tensor, rank: int, parallel: ParallelSettings, folder: Path) -> None:
    # The threads of the parent do not exist in a fork.
    torch.set_num_threads(1)
    # torch logs an error of its shapes by a traceback of each rank. The check names the first line of one.
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
    try:
        dist.init_process_group(BACKENDS["cpu"], f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
        values = _step(model, inputs, parallel)
    except Exception as exc:
        text = str(exc).partition("\n")[0]
        # The first error is the reason: the other rank then loses its connection.
        with suppress(FileExistsError), (folder / ERROR).open("x", encoding="utf-8") as file:
            file.write(text if isinstance(exc, FaninError) else f"{type(exc).__name__}: {text}")
        raise
    if rank == 0:
        torch.save(values, folder / VALUES)
    dist.destroy_process_group()


def _step(model: FamilyModel, inputs: Tensor, parallel: ParallelSettings | None) -> dict[str, Tensor]:
    """Return the parameters after a step of plain SGD, on this rank or, without ``parallel``, in one process."""
    training = TrainingSettings(batch_size=len(inputs), learning_rate=RATE, optimizer="sgd", momentum=0.0)
    mesh = None if parallel is None else build_mesh(parallel.mesh, NUM_RANKS, "cpu")
    settings = parallel or ParallelSettings(precision="double")
    module, batch = model.build(3), Batch(inputs=inputs, targets=inputs)
    trainable = TrainableModel(module=module, layout=model.layout, draws=find_draws(module, TOKENS, batch))
    engine = build_engine(trainable, settings, training, mesh, torch.device("cpu"))
    engine.step(batch)
    return engine.full_parameters()
