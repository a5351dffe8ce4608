"""Where a job's pipeline is cut if its config has that measured: the first rank measures, and all cut alike.

With a folder for checkpoints the numbers are kept there, so that what goes on from it, after a fault or on another
mesh, is cut as before. Values do not depend on the cut, but for how sums are rounded.
"""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from fanin.datacenter.config import TrainConfig
from fanin.datacenter.jobfiles import LAYER_TIMES_FILE, read_layer_times, write_layer_times
from fanin.datacenter.model import Made
from fanin.datacenter.parallel.build import apply_freeze
from fanin.datacenter.parallel.engine import Batch
from fanin.datacenter.parallel.measure import measure_layer_times
from fanin.datacenter.parallel.settings import MEASURE
from fanin.datacenter.places import check_folder
from fanin.datacenter.samples import part_of
from fanin.protos.errors import InvalidInput


def balanced(config: TrainConfig, made: Made, rank: int, device: torch.device) -> TrainConfig:
    """The config with numbers where its ``layer_times`` are to be measured; all ranks call it. Raises InvalidInput."""
    parallel, folder = config.parallel, config.checkpoints.folder
    if parallel.layer_times != MEASURE:
        return config
    # What does not train is measured as such; and what can be wrong is told by all ranks before one of them works.
    apply_freeze(made.model.module, config.training.freeze)
    if folder is not None:
        check_folder(folder, f"checkpoints: got folder {folder}", makes=True)
    kept = () if folder is None else read_layer_times(folder)
    expected = made.model.layout.sizes.num_layers + 2
    if kept and len(kept) != expected:
        raise InvalidInput(
            f"{folder}/{LAYER_TIMES_FILE}: got {len(kept)} times, expected {expected}: inputs, each layer, outputs; it "
            "is of another model, take another folder"
        )
    times = torch.zeros(expected, dtype=torch.float64)
    if rank == 0:
        found = kept or measure_layer_times(made.model, microbatch(config, made), parallel, device)
        if folder is not None and not kept:
            write_layer_times(folder, found)
        times = torch.tensor(found, dtype=torch.float64)
    dist.broadcast(times, 0)
    return replace(config, parallel=replace(parallel, layer_times=tuple(times.tolist())))


def microbatch(config: TrainConfig, made: Made) -> Batch:
    """What a stage is given at once: the first samples, in the shape of every step's."""
    training, parallel, samples = config.training, config.parallel, made.parts.train.of_epoch(0)
    indices = np.arange(min(len(samples), training.batch_size))
    part = part_of(samples, indices, (0, parallel.mesh.num_parts), training.batch_size)
    return next(part.chunks(training.accumulate * parallel.microbatches))
