"""Compares a module on the mesh with the whole module, before the first step of a job.

A layout describes a module by names. If it is wrong, the mesh may compute something else without an error. For
example, a pipeline may skip a function of the forward, or a split may give a head half of the values of two heads.
Therefore the first rank evaluates the whole module on a batch, and the mesh evaluates the same batch. The losses must
be equal.

Apps and families of other packages are compared, on a mesh with ``pp`` or ``tp``. fanin's own families are not: tests
hold them to the numbers of one process. A job that resumes is compared too, because its checkpoint may come from
another mesh.

Not compared are a module that draws random numbers in evaluation, because a mesh draws others, and a family's model
for which one sample is more than ``MAX_PRODUCTS``.
"""

import copy
import math
from contextlib import suppress
from typing import Final

import numpy as np
import torch
from torch import nn

from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.data.samples import batch_share
from fanin.datacenter.families.known import FAMILIES
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.parallel.gather import whole_buffers, whole_parameters
from fanin.datacenter.parallel.layout import styles_remedy
from fanin.datacenter.parallel.settings import ParallelSettings
from fanin.datacenter.parallel.transforms.data import HALF
from fanin.datacenter.parallel.transforms.meta import materialize
from fanin.datacenter.ranks.elastic import is_lost_connection
from fanin.datacenter.ranks.first import on_first_rank
from fanin.datacenter.training.model import JobModel
from fanin.edge.tensors import Int64s
from fanin.protos.errors import InvalidInput

TOLERANCE: Final = 1e-4
"""Largest relative difference of the mean losses in single or double precision on a CPU."""
GPU_TOLERANCE: Final = 1e-3
"""The same on a GPU, whose convolutions use TF32 and differ from those of the first rank's CPU."""
HALF_TOLERANCE: Final = 1e-2
"""The same in half precision."""
MAX_PRODUCTS: Final = 2 * 10**11
"""Tokens times parameters of a family's model that the first rank evaluates: about 10 seconds of one CPU core."""


class Comparison:
    """The comparison of one job. All ranks create one before the engine, which takes the module apart.

    Args:
        config: The job.
        job: Its model, without values, and its data.
        rank: This rank's number. The first rank keeps a copy of the module.
    """

    def __init__(self, config: TrainConfig, job: JobModel, rank: int) -> None:
        self._config = config
        self._job = job
        self._indices = _indices(config, job)
        self._whole: nn.Module | None = None
        if rank == 0 and len(self._indices):
            # Errors of any kind: the module is the user's code, and a mesh may not need a copy of it.
            with suppress(Exception):
                self._whole = copy.deepcopy(job.model.module)

    def check(self, engine: Engine) -> None:
        """Check that the mesh computes the loss of the whole module. A collective.

        Args:
            engine: The model on this rank, with the values that the job starts from.

        Raises:
            InvalidInput: The losses differ, or the mesh fails, where the whole module did not.
        """
        if not len(self._indices):
            return
        self._load_whole(engine)
        expected = on_first_rank(lambda _: self._whole_loss())
        self._whole = None
        if expected is not None:
            self._check_loss(expected, engine)

    @torch.no_grad()
    def _load_whole(self, engine: Engine) -> None:
        """Give the copy of the module the values of the engine. A collective."""
        if self._whole is not None:
            materialize(self._whole, torch.device("cpu"))
        for name, value in whole_parameters(engine.rank_model):
            if self._whole is not None:
                self._whole.get_parameter(name).copy_(value)
        for name, value in whole_buffers(engine.rank_model).items():
            if self._whole is not None:
                self._whole.get_buffer(name).copy_(value)

    @torch.no_grad()
    def _whole_loss(self) -> float | None:
        """Return the mean loss of the whole module on the samples, in evaluation mode.

        None if there is nothing to compare: the module draws random numbers, its loss is not finite, it cannot be
        copied, or it raises. The training names such an error with its line.
        """
        if self._whole is None:
            return None
        objective = self._job.model.objective
        batch = batch_share(self._job.data.held_out, self._indices, (0, 1), 1)
        self._whole.eval()
        loss = math.nan
        with torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            # Errors of any kind: the module is the user's code.
            with suppress(Exception):
                outputs = self._whole(batch.inputs)
                loss = float(objective.loss_sum(outputs, batch.targets)) / max(1, int(objective.count(batch.targets)))
            draws = not torch.equal(before, torch.get_rng_state())
        return None if draws or not math.isfinite(loss) else loss

    def _check_loss(self, expected: float, engine: Engine) -> None:
        parallel = self._config.parallel
        pieces = parallel.mesh.batch_multiple(self._config.training.accumulate, parallel.microbatches)
        multiple = self._config.evaluation_size if parallel.pipelined else pieces
        batch = batch_share(self._job.data.held_out, self._indices, engine.share, multiple)
        try:
            loss_sum, count = engine.evaluate(batch)
        except RuntimeError as exc:  # torch's error for shapes that do not fit
            if is_lost_connection(exc):
                # The rank that failed has the reason.
                raise
            raise InvalidInput(
                f"model: layout: on mesh {parallel.mesh} the forward fails ({str(exc).partition(chr(10))[0]}), but not "
                f"in one process; {_remedy(parallel)}"
            ) from exc
        # The score of this evaluation is not one of the training's.
        self._job.scored.take()
        loss = loss_sum / max(1, count)
        tolerance = TOLERANCE if engine.rank_model.device.type == "cpu" else GPU_TOLERANCE
        if parallel.precision in HALF:
            tolerance = HALF_TOLERANCE
        if not math.isclose(loss, expected, rel_tol=tolerance, abs_tol=tolerance):
            raise InvalidInput(
                f"model: layout: for the same {len(self._indices)} samples got the loss {loss:.7g} on mesh "
                f"{parallel.mesh} and {expected:.7g} in one process, expected the same; {_remedy(parallel)}"
            )


def _indices(config: TrainConfig, job: JobModel) -> Int64s:
    """Return the numbers of the held-out samples to compare on; none if the job is not compared."""
    mesh, family, held_out = config.parallel.mesh, config.model.family, job.data.held_out
    num_samples = min(len(held_out), config.evaluation_size) if mesh.pp > 1 or mesh.tp > 1 else 0
    if family is not None and num_samples:
        inputs, _ = held_out.take(np.arange(1))
        num_values = sum(value.numel() for value in job.model.module.parameters())
        limit = 0 if family.name in FAMILIES else MAX_PRODUCTS // max(1, num_values * inputs.numel())
        num_samples = min(num_samples, limit)
    return np.arange(num_samples)


def _remedy(parallel: ParallelSettings) -> str:
    remedies = []
    if parallel.mesh.pp > 1:
        remedies.append("name every module of the forward in inputs, layers and outputs")
    if parallel.mesh.tp > 1:
        remedies.append(styles_remedy(sequence=parallel.sequence_parallel))
    return f"{'; '.join(remedies)}; or use another axis"
