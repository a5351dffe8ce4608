"""Measures the memory that a start, an export and an import of weights add on each of four ranks.

python tests/parallel/peak.py FOLDER
"""

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from parallel.forks import run_ranks

from fanin.datacenter.checkpoints.seeds import write_seed_file
from fanin.datacenter.checkpoints.weights import export_weights, import_weights
from fanin.datacenter.families.decoders import decoder_layout
from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import Engine, build_engine
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.parallel.transforms.meta import parameters_on_meta
from fanin.datacenter.ranks.devices import build_mesh
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.training.model import Start

NUM_RANKS = 4
SHAPE = MeshShape(dp_shard=NUM_RANKS)
CONFIG = DecoderConfig(
    vocabulary=64, width=512, num_layers=16, num_heads=8, num_kv_heads=8, feed_forward=2048, tied=False
)
KIB = 1024


def memory_growth(action: Callable[[], object], kind: str = "RssAnon") -> int:
    """Return the bytes by which an action raises this process's memory at its peak.

    The default excludes pages of files.
    """
    before, samples, done = process_bytes(kind), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            samples.append(process_bytes(kind))

    watcher = threading.Thread(target=watch)
    watcher.start()
    action()
    done.set()
    watcher.join()
    return max(samples) - before


def process_bytes(kind: str = "RssAnon") -> int:
    """Return the kernel's number for this process. ``VmRSS`` also counts mapped pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith(f"{kind}:"))


def work(folder: Path, rank: int) -> None:
    """Run one rank: start, export the weights and import them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=NUM_RANKS)
    mesh = build_mesh(SHAPE, NUM_RANKS)
    with parameters_on_meta():
        model = TrainableModel(module=Decoder(CONFIG), layout=decoder_layout(CONFIG))
    training = TrainingSettings(batch_size=NUM_RANKS, learning_rate=0.1)
    seed_file, engines, seed_bytes = folder / "seed.safetensors", list[Engine](), 0
    start = Start(build=lambda: Decoder(CONFIG), repeatable=True)
    if rank == 0:
        seed_bytes = memory_growth(lambda: write_seed_file(seed_file, start, "digest"), "VmRSS")
    dist.barrier()

    def begin() -> None:
        engines.append(build_engine(model, ParallelSettings(mesh=SHAPE), training, mesh))
        import_weights(engines[0], seed_file)

    start_bytes = memory_growth(begin, "VmRSS")
    (engine,) = engines
    sizes = [entry.shape.numel() * entry.dtype.itemsize for entry in engine.table.values()]
    path = folder / "weights.safetensors"
    row = {
        "model_bytes": sum(sizes),
        "largest_bytes": max(sizes),
        "shard_bytes": sum(sizes) // NUM_RANKS,
        "seed_bytes": seed_bytes,
        "start_bytes": start_bytes,
        "export_bytes": memory_growth(lambda: export_weights(engine, path)),
        "import_bytes": memory_growth(lambda: import_weights(engine, path)),
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path) -> int:
    """Run all ranks, and return the number that failed."""
    return run_ranks(work, NUM_RANKS, folder)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
