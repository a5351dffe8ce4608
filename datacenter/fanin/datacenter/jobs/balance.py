"""Balances a job's pipeline by measured layer times: the first rank measures, and all ranks make the same cut.

The times are stored in the checkpoint folder, if there is one. A job that resumes from it, after a fault or on another
mesh, makes the same cut. The cut changes results only by the rounding of sums.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.data.samples import batch_share
from fanin.datacenter.files.folders import check_folder
from fanin.datacenter.files.jobfiles import LAYER_TIMES_FILE, read_layer_times, write_layer_times
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import apply_freeze
from fanin.datacenter.parallel.layer_times import MeasurementHooks, measure_layer_times
from fanin.datacenter.parallel.settings import MEASURE
from fanin.datacenter.ranks.first import on_first_rank
from fanin.datacenter.training.model import JobModel
from fanin.protos.errors import InvalidInput

Times = tuple[float, ...]


def balance_pipeline(config: TrainConfig, job: JobModel, device: torch.device) -> TrainConfig:
    """Replace ``layer_times = "measure"`` in a config by measured times. All ranks call this function.

    Args:
        config: the job. A config whose times are known is returned unchanged.
        job: the model and its samples.
        device: the device of this rank.

    Raises:
        InvalidInput: a freeze pattern is wrong, the checkpoint folder is not usable, or it has times of another model.
    """
    parallel, folder = config.parallel, config.checkpoints.folder
    if parallel.layer_times != MEASURE:
        return config
    # Frozen parameters are measured as frozen. All ranks report a wrong setting before the first one starts to measure.
    apply_freeze(job.model.module, config.training.freeze)
    if folder is not None:
        check_folder(folder, f"checkpoints: got folder {folder}", create=True)
    stored = () if folder is None else read_layer_times(folder)
    expected = job.model.layout.sizes.num_layers + 2
    if stored and len(stored) != expected:
        raise InvalidInput(
            f"{folder}/{LAYER_TIMES_FILE}: got {len(stored)} times, expected {expected}: inputs, each layer, outputs; "
            "the file belongs to another model, use another folder",
            code="FN-1276",
        )

    def measure(after_part: Callable[[], None]) -> Times:
        hooks = MeasurementHooks(after_part=after_part)
        times = stored or measure_layer_times(job.model, microbatch(config, job), parallel, device, hooks)
        if folder is not None and not stored:
            write_layer_times(folder, times)
        return times

    return replace(config, parallel=replace(parallel, layer_times=on_first_rank(measure)))


def microbatch(config: TrainConfig, job: JobModel) -> Batch:
    """Return one microbatch of the first samples, in the shape of every step."""
    training, parallel, samples = config.training, config.parallel, job.data.train.of_epoch(0)
    indices = np.arange(min(len(samples), training.batch_size))
    part = batch_share(samples, indices, (0, parallel.mesh.num_parts), training.batch_size)
    return next(part.chunks(training.accumulate * parallel.microbatches))
