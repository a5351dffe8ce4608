"""Memory and time of the start of a job: until every rank has its own slices of the initial parameters.

    python benchmarks/start_memory.py --layers 19 --mesh dp_shard=4 --json start.json

Each rank is a process. It builds the model of a config, the engine and the initial values as a rank of ``fanin train``
does, and reports its peak resident memory and its seconds. The mesh computes on the CPU. Nothing is trained.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fanin.datacenter.config.settings import DataSettings, ModelSettings, StopSettings
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.families.known import family_model
from fanin.datacenter.jobs.initial import initial_values
from fanin.datacenter.models.decoder import DecoderConfig
from fanin.datacenter.parallel.engine import build_engine
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.devices import build_mesh
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.training.model import build_job_model

KIB = 1024
SAMPLES = 8


def config_of(folder: Path, num_layers: int, mesh: MeshShape) -> TrainConfig:
    """The job: a decoder of about 47 M parameters a layer, and 131 M outside of the layers."""
    text = folder / "text.txt"
    text.write_text("abcdefgh" * 100)
    sizes = DecoderConfig(
        vocabulary=32_000, width=2048, num_layers=num_layers, num_heads=16, num_kv_heads=8, feed_forward=5632
    )
    return TrainConfig(
        model=ModelSettings(family=family_model("decoder", sizes)),
        data=DataSettings(text=str(text), length=16),
        training=TrainingSettings(batch_size=SAMPLES, learning_rate=0.1, optimizer="sgd"),
        stop=StopSettings(steps=1),
        parallel=ParallelSettings(mesh=mesh, schedule="GPipe", microbatches=2 if mesh.pp > 1 else 1),
    )


def start(folder: Path, rank: int, num_layers: int, mesh: MeshShape) -> None:
    """Start one rank, and write its memory and time."""
    torch.set_num_threads(1)
    config, began_s = config_of(folder, num_layers, mesh), time.perf_counter()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=mesh.num_ranks)
    before = peak_bytes()
    job = build_job_model(config, rank=rank, num_ranks=mesh.num_ranks)
    values = initial_values(config, job, mesh.num_ranks, folder)
    ranks = build_mesh(mesh, mesh.num_ranks, "cpu")
    engine = build_engine(job.model, config.parallel, config.training, ranks, torch.device("cpu"))
    values.load(engine)
    row = {
        "rank": rank,
        "parameters": sum(entry.shape.numel() for entry in engine.table.values()),
        "seconds": time.perf_counter() - began_s,
        "peak_bytes": peak_bytes(),
        "bytes_before": before,
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def main() -> int:
    """Start all ranks and print their rows as one JSON object. Return the number of ranks that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=19)
    parser.add_argument("--mesh", default="dp_shard=4")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    mesh = MeshShape.parse(options.mesh)
    with tempfile.TemporaryDirectory(prefix="fanin-start-") as name:
        folder = Path(name)
        # Spawned: a fork would begin with the pages of this process.
        spawn = multiprocessing.get_context("spawn")
        ranks = [
            spawn.Process(target=start, args=(folder, rank, options.layers, mesh)) for rank in range(mesh.num_ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        rows = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    text = json.dumps({"mesh": str(mesh), "layers": options.layers, "ranks": rows}, indent=1)
    sys.stdout.write(text + "\n")
    if options.json is not None:
        options.json.write_text(text + "\n")
    return mesh.num_ranks - len(rows)


if __name__ == "__main__":
    sys.exit(main())
