"""Compares an App's module on the mesh with the whole module, before the first step.

A layout describes a module by names. If it is wrong, the mesh may compute something else without an error: a pipeline
that skips a function of the forward, or a split that gives a head half of the values of two heads. Therefore the first
rank evaluates the whole module on a batch, and the mesh evaluates the same batch. The losses must be equal.

A module that draws random numbers in evaluation is not compared: on a mesh it draws others. Nor is a job that resumes
from a checkpoint.
"""

import math
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import torch

from fanin.datacenter.checkpoints.weights import load_weights
from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.data.samples import batch_share
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.parallel.settings import ParallelSettings
from fanin.datacenter.parallel.transforms.data import HALF
from fanin.datacenter.training.model import JobModel
from fanin.edge.tensors import Int64s
from fanin.protos.errors import InvalidInput

TOLERANCE: Final = 1e-4
"""Largest relative difference of the mean losses in single or double precision on a CPU."""
GPU_TOLERANCE: Final = 1e-3
"""The same on a GPU, whose convolutions use TF32 and differ from those of the first rank's CPU."""
HALF_TOLERANCE: Final = 1e-2
"""The same in half precision."""


@torch.no_grad()
def whole_loss(config: TrainConfig, job: JobModel, values: Path) -> float | None:
    """Return the mean loss of an App's whole module on the first held-out samples, in evaluation mode.

    Args:
        config: The job.
        job: Its model and data. The values of the module are overwritten.
        values: The safetensors file with the initial parameters.

    Returns:
        The loss, or None if there is nothing to compare: the module draws random numbers, the loss is not finite, or
        the module raises. The training names such an error with its line.

    Raises:
        InvalidInput: The file is damaged or belongs to another model.
    """
    module, objective = job.model.module, job.model.objective
    batch = batch_share(job.data.held_out, _indices(config, job), (0, 1), 1)
    load_weights(module, values)
    modes = {part: part.training for part in module.modules()}
    module.eval()
    loss = math.nan
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        # Errors of any kind: the module is the user's code.
        with suppress(Exception):
            outputs = module(batch.inputs)
            loss = float(objective.loss_sum(outputs, batch.targets)) / max(1, int(objective.count(batch.targets)))
        draws = not torch.equal(before, torch.get_rng_state())
    for part, mode in modes.items():
        part.training = mode
    return None if draws or not math.isfinite(loss) else loss


def check_loss(expected: float, config: TrainConfig, job: JobModel, engine: Engine) -> None:
    """Check that the mesh computes the loss of the whole module. A collective.

    Args:
        expected: The loss, from ``whole_loss``.
        config: The job.
        job: Its model and data.
        engine: The model on this rank, with its initial values.

    Raises:
        InvalidInput: The losses differ, or the mesh fails, where the whole module did not.
    """
    parallel, indices = config.parallel, _indices(config, job)
    pieces = parallel.mesh.batch_multiple(config.training.accumulate, parallel.microbatches)
    multiple = config.evaluation_size if parallel.pipelined else pieces
    batch = batch_share(job.data.held_out, indices, engine.share, multiple)
    try:
        loss_sum, count = engine.evaluate(batch)
    except RuntimeError as exc:  # torch's error for shapes that do not fit
        raise InvalidInput(
            f"model: layout: on mesh {parallel.mesh} the forward fails ({str(exc).partition(chr(10))[0]}), but not in "
            f"one process; {_remedy(parallel)}"
        ) from exc
    # The score of this evaluation is not one of the training's.
    job.scored.take()
    loss = loss_sum / max(1, count)
    tolerance = TOLERANCE if engine.rank_model.device.type == "cpu" else GPU_TOLERANCE
    if parallel.precision in HALF:
        tolerance = HALF_TOLERANCE
    if not math.isclose(loss, expected, rel_tol=tolerance, abs_tol=tolerance):
        raise InvalidInput(
            f"model: layout: for the same {len(indices)} samples got the loss {loss:.7g} on mesh {parallel.mesh} and "
            f"{expected:.7g} in one process, expected the same; {_remedy(parallel)}"
        )


def _indices(config: TrainConfig, job: JobModel) -> Int64s:
    return np.arange(min(len(job.data.held_out), config.evaluation_size))


def _remedy(parallel: ParallelSettings) -> str:
    remedies = []
    if parallel.mesh.pp > 1:
        remedies.append("name every module of the forward in inputs, layers and outputs")
    if parallel.mesh.tp > 1:
        remedies.append("correct the styles in plan, and let the forward take the number of heads from its tensors")
    return f"{'; '.join(remedies)}; or use another axis"
