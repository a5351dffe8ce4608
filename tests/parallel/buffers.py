"""Averages buffers over three ranks, and writes those of the last one.

python tests/parallel/buffers.py FILE
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from parallel.forks import run_ranks

from fanin.datacenter.training.communication import average_statistics

NUM_RANKS = 3


def work(file: Path, rank: int) -> None:
    """Average the buffers of one rank, several times as evaluations do."""
    store = dist.FileStore(str(file.with_suffix(".meet")), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    buffers = {
        "mask": torch.tensor([1.0, -math.inf, math.inf, torch.finfo(torch.float32).min]),
        "table": torch.from_numpy(np.linspace(0.0, 1.0, 1001, dtype=np.float32)),
        "running": torch.tensor([float(rank), 10.0 + rank]),
    }
    for _ in range(5):
        average_statistics(list(buffers.values()), dist.group.WORLD)
    if rank == NUM_RANKS - 1:
        np.savez(file, **{name: value.numpy() for name, value in buffers.items()})
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> int:
    """Return the number of ranks that failed."""
    return run_ranks(work, NUM_RANKS, Path(arguments[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
