"""Trains every cell of the parity matrix on its mesh and in one process, and writes the results as .npz files.

    python tests/parallel/matrix.py FOLDER all|nightly|compiled|NAME...

One pool: as many ranks as the largest cell has are forked once, after torch is imported and before autograd has run.
They share one process group. A cell of fewer ranks uses the first ones while the others wait. One more trains alone.
"""

import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import config as compiler
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parents[1]))

from parallel.cells import BATCH, CELLS, COMPILED, FAULTS, HALF_PRECISION, STATISTICS, WORLD, Cell
from parallel.families import MASKED, PRETRAINED, UNPLANNED, batches, model_of

from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import RankModel, build, build_optimizer
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.parallel.gather import load_full
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.parallel.torch_messages import silence_expected_messages
from fanin.datacenter.parallel.transforms.meta import drop_values
from fanin.datacenter.ranks.mesh import AXES
from fanin.edge.runtimes.graphs import NO_TOKEN

CPU = torch.device("cpu")


def training_of(cell: Cell) -> TrainingSettings:
    # A bias before a batch norm has no gradient except rounding errors. AdamW makes steps of the usual size from them.
    # The gradients of Gemma's norms are sums in float32 (test_norms).
    adaptive = cell.dtype == "float64" and not cell.family.endswith("-batch") and cell.family != "gemma"
    return TrainingSettings(
        batch_size=BATCH,
        learning_rate=0.01 if adaptive else 0.1,
        optimizer="adamw" if adaptive else "sgd",
        weight_decay=0.01,
        accumulate=cell.accumulate,
        clip_norm=cell.clip,
        freeze=cell.freeze,
    )


def parallel_of(cell: Cell) -> ParallelSettings:
    return ParallelSettings(
        mesh=cell.shape,
        schedule=cell.schedule,
        microbatches=cell.microbatches,
        layer_times=cell.layer_times,
        recompute=cell.recompute,
        reshard=cell.reshard,
        replicate=cell.replicate,
        offload=cell.offload,
        precision=cell.precision,
        compile=cell.compile,
        sequence_parallel=cell.sequence,
    )


def train(cell: Cell, engine: Engine) -> dict[str, np.ndarray]:
    """Return the losses of all steps, the loss of an evaluation, and all parameters after the last step."""
    losses, (index, num) = [], engine.share
    for inputs, targets in batches(cell.num_steps, cell.family):
        rank_targets = targets.chunk(num)[index]
        # The mask has at least one token of each sample, and all that have a target. Our own decoder accepts no mask.
        extra = {"attention_mask": (rank_targets != NO_TOKEN).long()} if cell.family in MASKED else {}
        batch = Batch(inputs=inputs.chunk(num)[index], targets=rank_targets, extra=extra)
        # The count is passed if it is known. Otherwise the engine sums it.
        count = None if cell.microbatches > 1 else int((targets != NO_TOKEN).sum())
        if cell.fault == "mean-of-means":
            # Deliberately wrong: each rank divides by its own count, and the means are averaged.
            count = int((batch.targets != NO_TOKEN).sum()) * num
        losses.append(float(engine.step(batch, count).loss))
    # A folded schedule accepts batches of one size only, that of an accumulation step.
    chunks = tuple(batch.chunks(cell.accumulate if parallel_of(cell).folded else 1))
    values = engine.full_parameters()
    names = np.array(sorted(values))
    outcome = {"losses": np.array(losses), "evaluated": mean_loss(engine, chunks), "names": names}
    outcome |= {name: values[name].numpy() for name in names}
    if cell.shape.num_ranks < WORLD and not cell.fault:
        engine.load_parameters({name: value.flip(0) / 2 for name, value in values.items()})
        outcome["reloaded"] = mean_loss(engine, chunks)
    return outcome


def mean_loss(engine: Engine, chunks: Sequence[Batch]) -> np.ndarray:
    """Return the mean loss of a batch that is evaluated in chunks, as a scalar."""
    total, count = np.array([engine.evaluate(chunk) for chunk in chunks]).sum(axis=0)[:2]
    return np.array(total / count)


def rank_model_of(cell: Cell, mesh: DeviceMesh) -> RankModel:
    """Return the cell's model on this rank, correct or deliberately wrong."""
    training, model = training_of(cell), model_of(cell)
    values = {name: value.detach().clone() for name, value in model.module.named_parameters()}
    if cell.dtype == "float64":
        # As in a job of several ranks: the model is split without values, which are loaded afterwards.
        drop_values(model.module)
    rank_model = build(model, parallel_of(cell), training, mesh, CPU)
    if cell.dtype == "float64":
        load_full(rank_model, values)
    if cell.fault == "untied" and cell.shape.pp == 1:
        # As torch leaves it: the head is split over tp, and nothing ties it again.
        part = rank_model.parts[0]
        head = part.get_submodule("head")
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        return dataclasses.replace(rank_model, optimizers=(build_optimizer(part, training),))
    return dataclasses.replace(rank_model, tie=None) if cell.fault == "untied" else rank_model


def num_ranks_of(cells: Sequence[Cell]) -> int:
    """Return the number of ranks of a pool."""
    return max(cell.shape.num_ranks for cell in cells)


def canary(world: int) -> dict[str, np.ndarray]:
    """Return gloo's mean over all ranks, the mean of a shard, and the sum.

    Builds of 2025 returned the sum for both means.
    """
    results = {"world": np.array(world)}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        values = (torch.arange(2 * world) + dist.get_rank()).to(dtype)
        means, total, piece = values.clone(), values.clone(), torch.empty(2, dtype=dtype)
        dist.all_reduce(means, dist.ReduceOp.AVG)
        dist.all_reduce(total)
        dist.reduce_scatter_single(piece, values, dist.ReduceOp.AVG)
        for name, value in (("means", means), ("total", total), ("piece", piece)):
            results[f"{dtype}-{name}"] = value.double().numpy()
    return results


def work(folder: Path, rank: int, cells: list[Cell]) -> None:
    """Train some cells on one rank."""
    torch.set_num_threads(1)
    silence_expected_messages()
    meet = f"file://{folder}/{cells[0].name}.meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=num_ranks_of(cells))
    averages = canary(num_ranks_of(cells))
    if rank == 0:
        np.savez(folder / "canary.npz", **averages)
    meshes: dict[str, DeviceMesh] = {}
    for cell in cells:
        started_s = time.monotonic()
        num_ranks = cell.shape.num_ranks
        if cell.mesh not in meshes:
            # Every rank of the world takes part in creating the groups, even if it only waits afterwards.
            ranks = torch.arange(num_ranks).reshape(*cell.shape.sizes.values())
            meshes[cell.mesh] = DeviceMesh("cpu", ranks, mesh_dim_names=AXES)
        if rank < num_ranks:
            outcome = train(cell, Engine(rank_model_of(cell, meshes[cell.mesh])))
            seconds, graphs = time.monotonic() - started_s, counters["stats"]["unique_graphs"]
            if rank == 0:
                np.savez(folder / f"{cell.name}.npz", seconds=seconds, graphs=graphs, **outcome)
        dist.barrier()
    dist.destroy_process_group()


def run_references(folder: Path, cells: list[Cell]) -> None:
    """Train each variant once in one process."""
    torch.set_num_threads(1)
    for cell in {cell.reference: cell for cell in cells}.values():
        fields = ("layers", "tied", "dtype", "clip", "freeze", "family", "nightly", "long")
        reference = Cell(mesh="none", **{name: getattr(cell, name) for name in fields})
        engine = Engine(build(model_of(reference), parallel_of(reference), training_of(reference), None, CPU))
        np.savez(folder / f"{cell.reference}.npz", **train(reference, engine))


def main(arguments: Sequence[str]) -> int:
    """Train the requested cells; return the number of processes that failed."""
    folder, names = Path(arguments[0]), arguments[1:]
    known = (*CELLS, *HALF_PRECISION, *FAULTS, *STATISTICS, *COMPILED)
    selection = [cell for cell in known if cell.name in names or _group(cell) in names]
    for family in {cell.family for cell in selection} & {*PRETRAINED, *UNPLANNED}:
        # Their modules load at first use: once here, and not on every rank.
        model_of(Cell(mesh="none", family=family))
    # Each compiled cell has its own processes, as a job has. torch 2.13 keeps state between compilations, which makes
    # the compilation of another model fail. It also stops compiling code that it has compiled often.
    pools = [[cell for cell in selection if not cell.compile], *([cell] for cell in selection if cell.compile)]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run_references, args=(folder, selection))]
    processes[0].start()
    for cells in filter(None, pools):
        # The C++ compiler takes up to half a minute for a cell. Elsewhere, compiled graphs call torch's operators.
        is_native = "compiled" in names and num_ranks_of(cells) == 2 and cells[0].recompute == "none"
        compiler.fallback_by_default = not is_native
        ranks = [fork.Process(target=work, args=(folder, rank, cells)) for rank in range(num_ranks_of(cells))]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        processes += ranks
    processes[0].join()
    return sum(process.exitcode != 0 for process in processes)


def _group(cell: Cell) -> str:
    return "compiled" if cell.compile else "nightly" if cell.nightly else "all"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
