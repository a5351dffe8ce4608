"""Trains, saves, and resumes at other meshes and in one process; writes the results as .npz files.

    python tests/parallel/checkpoints.py FOLDER checkpoints|weights 4|8

One pool, as in ``matrix``: four or eight ranks are forked once and share a process group. One process by itself loads
last.
"""

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parents[1]))

from parallel.cells import Cell
from parallel.matrix import CPU, batches, model_of, parallel_of, training_of

from fanin.datacenter.checkpoints.checkpoint import Checkpoints
from fanin.datacenter.checkpoints.progress import Progress
from fanin.datacenter.checkpoints.weights import export_weights, import_weights
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import build
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.parallel.torch_messages import silence_expected_messages
from fanin.datacenter.ranks.mesh import AXES
from fanin.protos.errors import FaninError, StorageFull

SAVE_STEP, NUM_STEPS = 2, 5
# The 97 rows are shared by the ranks of tp and of dp_shard. torch alone would assemble them wrongly.
TRAINING_CELLS = {
    4: {
        "untied": Cell(mesh="pp=2,tp=2", schedule="1F1B", microbatches=2, layers=4),
        "uneven": Cell(mesh="dp_shard=2,tp=2"),
        "tied": Cell(mesh="pp=2,dp_shard=2", schedule="ZBV", microbatches=2, layers=4, tied=True),
    },
    8: {
        "untied": Cell(mesh="pp=2,dp_shard=2,tp=2", schedule="1F1B", microbatches=2, layers=4),
        "uneven": Cell(mesh="dp_shard=4,tp=2"),
        "tied": Cell(mesh="pp=2,dp_shard=4", schedule="ZBV", microbatches=2, layers=4, tied=True),
    },
}
RESUMING_CELLS = {
    4: {
        "untied": (
            Cell(mesh="dp_replicate=2,tp=2", layers=4),
            Cell(mesh="pp=4", schedule="1F1B", microbatches=4, layers=4),
        ),
        "uneven": (Cell(mesh="pp=2,dp_shard=2", microbatches=2),),
        "tied": (
            Cell(mesh="pp=4", schedule="1F1B", microbatches=4, layers=4, tied=True),
            Cell(mesh="pp=2,dp_shard=2", schedule="ZBV", microbatches=2, layers=4, tied=True),
        ),
    },
    8: {
        "untied": (
            Cell(mesh="dp_replicate=2,tp=4", layers=4),
            Cell(mesh="pp=4,tp=2", schedule="1F1B", microbatches=4, layers=4),
        ),
        "uneven": (Cell(mesh="pp=2,dp_shard=4", microbatches=2),),
        "tied": (
            Cell(mesh="pp=4,dp_shard=2", schedule="1F1B", microbatches=4, layers=4, tied=True),
            Cell(mesh="pp=2,dp_shard=4", schedule="ZBV", microbatches=2, layers=4, tied=True),
        ),
    },
}
RETENTION_CELLS = {4: Cell(mesh="dp_shard=4"), 8: Cell(mesh="dp_replicate=2,dp_shard=4")}
OTHER_CELLS = {4: Cell(mesh="pp=2,dp_shard=2", microbatches=2), 8: Cell(mesh="pp=2,dp_shard=4", microbatches=2)}
IMPORT_CELLS = {
    4: Cell(mesh="dp_shard=2,tp=2", layers=4, tied=True),
    8: Cell(mesh="dp_shard=4,tp=2", layers=4, tied=True),
}


def engine_of(cell: Cell) -> Engine:
    """Return an engine with the cell's model on this rank."""
    mesh = None
    if dist.is_initialized():
        mesh = DeviceMesh(
            "cpu", torch.arange(dist.get_world_size()).reshape(*cell.shape.sizes.values()), mesh_dim_names=AXES
        )
    return Engine(build(model_of(cell), parallel_of(cell), training_of(cell), mesh, CPU))


def train(engine: Engine, first: int, last: int) -> Iterator[float]:
    """Yield the losses of steps ``first`` to ``last``."""
    index, num = engine.share
    for inputs, targets in islice(batches(last), first, last):
        yield float(engine.step(Batch(inputs=inputs.chunk(num)[index], targets=targets.chunk(num)[index])).loss)


def outcome(engine: Engine, losses: list[float]) -> dict[str, np.ndarray]:
    """Return the losses and all parameters."""
    return {"losses": np.array(losses), **{name: value.numpy() for name, value in engine.full_parameters().items()}}


def save_and_continue(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Train some steps, and write a checkpoint while the next steps run."""
    engine = engine_of(TRAINING_CELLS[dist.get_world_size()][name])
    with Checkpoints(folder / name, engine) as checkpoints:
        assert checkpoints.load() is None
        losses = list(train(engine, 0, SAVE_STEP))
        checkpoints.save(Progress(step=SAVE_STEP, epoch=1, position=48, seed=7, measures={"best": 0.1}))
        losses += train(engine, SAVE_STEP, NUM_STEPS)
    return outcome(engine, losses)


def resume(folder: Path, name: str, cell: Cell) -> dict[str, np.ndarray]:
    """Resume at another mesh, and train the last steps."""
    engine = engine_of(cell)
    with Checkpoints(folder / name, engine) as checkpoints:
        progress = checkpoints.load()
        assert progress == Progress(step=SAVE_STEP, epoch=1, position=48, seed=7, measures={"best": 0.1})
    return outcome(engine, list(train(engine, progress.step, NUM_STEPS)))


def export_and_step(folder: Path) -> dict[str, np.ndarray]:
    """Export the weights after one step; return the parameters and the loss of the next step."""
    engine = engine_of(TRAINING_CELLS[dist.get_world_size()]["tied"])
    losses = list(train(engine, 0, 1))
    export_weights(engine, folder / "tied.safetensors", {"made_by": "a test"})
    return {**outcome(engine, losses), "losses": np.array(list(train(engine, 1, 2)))}


def import_and_step(folder: Path, cell: Cell) -> dict[str, np.ndarray]:
    """Import the weights at another mesh; return the parameters and the loss of the next step."""
    engine = engine_of(cell)
    import_weights(engine, folder / "tied.safetensors")
    return {**outcome(engine, []), "losses": np.array(list(train(engine, 1, 2)))}


def keep_last(folder: Path) -> dict[str, np.ndarray]:
    """Save at five steps, of which two checkpoints are kept."""
    cell = RETENTION_CELLS[dist.get_world_size()]
    engine = engine_of(cell)
    leftover = folder / "kept" / "step-00000002"
    leftover.mkdir(parents=True, exist_ok=True)
    (leftover / "__9_0.distcp").write_bytes(b"of a save that was interrupted")
    with Checkpoints(folder / "kept", engine, keep=2) as checkpoints:
        for step in (0, 1, 2, 4, 7):
            checkpoints.save(Progress(step=step))
            checkpoints.finish()
        names = sorted(path.name for path in (folder / "kept").iterdir())
        # A checkpoint from before the first step has no optimizer state. The engine that loads it must have none
        # either.
        fresh = checkpoints.load()
        assert fresh == Progress(step=7)
    _save_results(folder, "kept-fresh", {"losses": np.array(list(train(engine_of(cell), 0, 2)))})
    return {"names": np.array(names), "losses": np.array(list(train(engine, 0, 2)))}


def resume_older(folder: Path) -> dict[str, np.ndarray]:
    """Change one byte of the newest checkpoint.

    Return the step that each rank resumes from, and why it skips the newest.
    """
    path = folder / "kept" / "step-00000007" / "__3_0.distcp"
    if dist.get_rank() == 0:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    dist.barrier()
    with Checkpoints(folder / "kept", engine_of(RETENTION_CELLS[dist.get_world_size()])) as checkpoints:
        progress = checkpoints.load()
        report = [None if progress is None else progress.step, checkpoints.skipped]
    rows: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, report)
    return {"told": np.array([json.dumps(row) for row in rows])}


def storage_errors(folder: Path) -> dict[str, np.ndarray]:
    """Return the errors of each rank if the last one loses its trace, and if the first one's disk is full."""
    engine, errors = engine_of(RETENTION_CELLS[dist.get_world_size()]), []
    full_folder = folder / "full"
    full_folder.mkdir(exist_ok=True)
    dist.barrier()
    trace_error = StorageFull("the trace of the last rank") if dist.get_rank() == dist.get_world_size() - 1 else None
    with Checkpoints(full_folder, engine) as checkpoints:
        errors.append(_error(lambda: checkpoints.save(Progress(step=1), trace_error)))
        if dist.get_rank() == 0:
            # The marker is drafted at this path.
            (full_folder / "LATEST.new").mkdir()
        checkpoints.save(Progress(step=2))
        errors.append(_error(checkpoints.finish))
        if dist.get_rank() == 0:
            (full_folder / "step-00000003").write_text("in the way")
        errors.append(_error(lambda: checkpoints.save(Progress(step=3))))
    rows: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, errors)
    return {"told": np.array([json.dumps(row) for row in rows])}


def refusals(attempt_of: Callable[[Engine], Callable[[], object]]) -> dict[str, np.ndarray]:
    """Return the error of each rank for the file of another model, and whether its own parameters are unchanged."""
    engine = engine_of(OTHER_CELLS[dist.get_world_size()])
    before = outcome(engine, [])
    error = _error(attempt_of(engine))
    after = outcome(engine, [])
    unchanged = all((before[name] == after[name]).all() for name in before)
    rows: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, [error, unchanged])
    return {"told": np.array([json.dumps(row) for row in rows])}


def _error(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except FaninError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "nothing"


def work(folder: Path, part: str, num_ranks: int, rank: int) -> None:
    """Run all of a part on one rank."""
    torch.set_num_threads(1)
    silence_expected_messages()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num_ranks)
    (checkpoints if part == "checkpoints" else weights)(folder)
    dist.destroy_process_group()


def checkpoints(folder: Path) -> None:
    """Write the results of checkpoints between meshes: those that are kept, skipped and refused."""
    for name, others in RESUMING_CELLS[dist.get_world_size()].items():
        _save_results(folder, f"{name}-saved", save_and_continue(folder, name))
        for other in others:
            _save_results(folder, f"{name}-{other.mesh}", resume(folder, name, other))
    _save_results(folder, "kept", keep_last(folder))
    _save_results(folder, "damaged", resume_older(folder))
    _save_results(folder, "refused", refusals(lambda engine: Checkpoints(folder / "untied", engine).load))
    _save_results(folder, "full", storage_errors(folder))


def weights(folder: Path) -> None:
    """Export weights at one mesh, import them at another, and refuse those of another model."""
    _save_results(folder, "given", export_and_step(folder))
    _save_results(folder, "taken", import_and_step(folder, IMPORT_CELLS[dist.get_world_size()]))
    _save_results(
        folder, "refused", refusals(lambda engine: lambda: import_weights(engine, folder / "tied.safetensors"))
    )


def run_alone(folder: Path, num_ranks: int) -> None:
    """Resume in one process, without a process group."""
    torch.set_num_threads(1)
    for name, cells in RESUMING_CELLS[num_ranks].items():
        cell = Cell(mesh="none", layers=cells[0].layers, tied=cells[0].tied, clip=cells[0].clip)
        np.savez(folder / f"{name}-none.npz", **resume(folder, name, cell))


def _save_results(folder: Path, name: str, results: dict[str, np.ndarray]) -> None:
    if dist.get_rank() == 0:
        np.savez(folder / f"{name}.npz", **results)
    dist.barrier()


def main(arguments: Sequence[str]) -> int:
    """Run the ranks, and for checkpoints also the one process; return the number of processes that failed."""
    folder, part, num_ranks = Path(arguments[0]), arguments[1], int(arguments[2])
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=work, args=(folder, part, num_ranks, rank)) for rank in range(num_ranks)]
    num_failed = 0
    one = [fork.Process(target=run_alone, args=(folder, num_ranks))] if part == "checkpoints" else []
    for processes in (ranks, one):
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            num_failed += process.exitcode != 0
    return num_failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
