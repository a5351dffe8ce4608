"""Where a job's pipeline is cut if its config has that measured: the first rank measures, and all cut alike.

With a folder for checkpoints the numbers are kept there, so that what goes on from it, after a fault or on another
mesh, is cut as before. Values do not depend on the cut, but for how sums are rounded.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from fanin.datacenter.data.samples import batch_share
from fanin.datacenter.jobs.config import TrainConfig
from fanin.datacenter.jobs.folders import check_folder
from fanin.datacenter.jobs.jobfiles import LAYER_TIMES_FILE, read_layer_times, write_layer_times
from fanin.datacenter.parallel.build import apply_freeze
from fanin.datacenter.parallel.engine import Batch
from fanin.datacenter.parallel.pipelines.measure import Beside, measure_layer_times
from fanin.datacenter.parallel.settings import MEASURE
from fanin.datacenter.training.model import JobModel
from fanin.protos.errors import FaninError, InvalidInput

Times = tuple[float, ...]


def balanced(config: TrainConfig, job: JobModel, rank: int, device: torch.device) -> TrainConfig:
    """The config with numbers where its ``layer_times`` are to be measured; all ranks call it. Raises InvalidInput."""
    parallel, folder = config.parallel, config.checkpoints.folder
    if parallel.layer_times != MEASURE:
        return config
    # What does not train is measured as such; and what can be wrong is told by all ranks before one of them works.
    apply_freeze(job.model.module, config.training.freeze)
    if folder is not None:
        check_folder(folder, f"checkpoints: got folder {folder}", create=True)
    kept = () if folder is None else read_layer_times(folder)
    expected = job.model.layout.sizes.num_layers + 2
    if kept and len(kept) != expected:
        raise InvalidInput(
            f"{folder}/{LAYER_TIMES_FILE}: got {len(kept)} times, expected {expected}: inputs, each layer, outputs; it "
            "is of another model, take another folder"
        )

    def found(after_part: Callable[[], object]) -> Times:
        beside = Beside(after_part=after_part)
        times = kept or measure_layer_times(job.model, microbatch(config, job), parallel, device, beside)
        if folder is not None and not kept:
            write_layer_times(folder, times)
        return times

    return replace(config, parallel=replace(parallel, layer_times=_told(found, rank)))


def _told(find: Callable[[Callable[[], object]], Times], rank: int) -> Times:
    """What the first rank finds, on all of them; and what it fails with, in its words.

    A message comes after each part: the others wait for no more than one at a time, as a group's timeout is that of a
    step.
    """

    def say(word: Times | FaninError | None) -> Times | FaninError | None:
        words = [word]
        dist.broadcast_object_list(words, 0)
        return words[0]

    word: Times | FaninError | None = None
    if rank == 0:
        try:
            word = find(lambda: say(None))
        except FaninError as exc:
            word = exc
        say(word)
    while word is None:
        word = say(None)
    if isinstance(word, FaninError):
        raise word
    return word


def microbatch(config: TrainConfig, job: JobModel) -> Batch:
    """What a stage is given at once: the first samples, in the shape of every step's."""
    training, parallel, samples = config.training, config.parallel, job.data.train.of_epoch(0)
    indices = np.arange(min(len(samples), training.batch_size))
    part = batch_share(samples, indices, (0, parallel.mesh.num_parts), training.batch_size)
    return next(part.chunks(training.accumulate * parallel.microbatches))
