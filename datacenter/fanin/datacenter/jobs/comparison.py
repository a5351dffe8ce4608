"""Compares a module on the mesh with the complete module, before the first step of a job.

A layout describes a module by names. With a wrong layout, the mesh may compute a wrong result without an error. For
example, a pipeline may skip a function of the forward, or a split may give a head half of the values of two heads.
Therefore the first rank evaluates the complete module on a batch, and the mesh evaluates the same batch. The losses
must be equal.

A model that draws random numbers is compared in training mode, too: it must draw the same ones on the mesh, as in the
first step of the training.

With ``tp`` the gradients of these losses must be equal too. A parameter that is not split, but is used between a column
and a row layer, leaves the loss correct. Each rank then has a part of its gradient, and no collective adds the parts.

Apps and families of other packages are compared on a mesh with ``pp`` or ``tp``. fanin's own families are not, because
tests compare them with one process. A resumed job is compared, too, because its checkpoint may come from another mesh.

A family's model is not compared if one sample needs more than ``MAX_PRODUCTS``. A gradient is not compared if it, or
the difference, is far smaller than the gradients of all parameters together. Rounding changes it as much.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from fanin.datacenter.config.train_config import TrainConfig
from fanin.datacenter.data.samples import batch_share
from fanin.datacenter.families.known import FAMILIES
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import apply_freeze
from fanin.datacenter.parallel.draws.sites import LOSS
from fanin.datacenter.parallel.draws.step import RankDraws
from fanin.datacenter.parallel.engine import Engine
from fanin.datacenter.parallel.gather import full_buffers, full_parameters
from fanin.datacenter.parallel.layout import styles_remedy
from fanin.datacenter.parallel.settings import ParallelSettings
from fanin.datacenter.parallel.transforms.data import HALF
from fanin.datacenter.parallel.transforms.meta import materialize
from fanin.datacenter.parallel.transforms.tensor import SPLIT_KINDS, style_of_module
from fanin.datacenter.ranks.elastic import is_lost_connection
from fanin.datacenter.ranks.first import on_first_rank
from fanin.datacenter.training.model import JobModel
from fanin.edge.tensors import Int64s
from fanin.protos.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The largest differences between a mesh and one process that rounding explains.

    Attributes:
        loss: of the mean losses, relative to the loss.
        gradient: 2-norm of the difference of a parameter's gradient, relative to the 2-norm of that gradient.
        total: the same, relative to the 2-norm of the gradients of all parameters.
    """

    loss: float
    gradient: float
    total: float


TOLERANCE: Final = Tolerance(loss=1e-4, gradient=1e-2, total=1e-5)
"""In single or double precision on a CPU."""
GPU_TOLERANCE: Final = Tolerance(loss=1e-3, gradient=5e-2, total=1e-3)
"""On a GPU, whose convolutions use TF32 and differ from those of the first rank's CPU."""
HALF_TOLERANCE: Final = Tolerance(loss=1e-2, gradient=0.1, total=1e-2)
"""In half precision."""
MAX_PRODUCTS: Final = 2 * 10**11
"""Tokens times parameters of a family's model that the first rank evaluates: about 10 seconds of one CPU core, and 30
with gradients."""


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
        self._full_model: nn.Module | None = None
        self._gradients: dict[str, Tensor] = {}
        self._draws = RankDraws(job.model.draws)
        if rank == 0 and len(self._indices):
            # Any error: the module is the user's code, and a mesh may not need a copy of it.
            with suppress(Exception):
                self._full_model = copy.deepcopy(job.model.module)
                self._draws.wrap(self._full_model)

    def check(self, engine: Engine) -> None:
        """Check that the mesh computes the loss and the gradients of the complete module. A collective.

        Args:
            engine: The model on this rank, with the values that the job starts from.

        Raises:
            InvalidInput: The losses or gradients differ, or the mesh fails and the complete module does not.
        """
        if not len(self._indices):
            return
        self._load_full_model(engine)
        for training in (False, True) if self._job.model.draws.sites else (False,):
            expected = on_first_rank(partial(self._full_model_loss, training=training))
            if expected is not None:
                self._check(expected, engine, training=training)
        self._full_model = None

    @torch.no_grad()
    def _load_full_model(self, engine: Engine) -> None:
        """Give the copy of the module the values of the engine. A collective."""
        if self._full_model is not None:
            materialize(self._full_model, torch.device("cpu"))
        for name, value in full_parameters(engine.rank_model):
            if self._full_model is not None:
                self._full_model.get_parameter(name).copy_(value)
        for name, value in full_buffers(engine.rank_model).items():
            if self._full_model is not None:
                self._full_model.get_buffer(name).copy_(value)

    def _full_model_loss(self, _: object, *, training: bool) -> float | None:
        """Return the mean loss of the complete module on the samples, and keep its gradients.

        None if there is nothing to compare: the module draws unknown random numbers, its loss is not finite, it cannot
        be copied, or it raises. The training names such an error with its line.

        Args:
            training: whether the module is in training mode. It then computes the chunks of the mesh one by one,
                because a norm may depend on the other samples of a chunk.
        """
        if self._full_model is None:
            return None
        self._full_model.train(training)
        self._full_model.zero_grad()
        mean = torch.tensor(math.nan)
        with torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            # Any error: the module is the user's code.
            with suppress(Exception), torch.set_grad_enabled(self._config.parallel.mesh.tp > 1):
                mean = self._full_pass(self._full_model, training=training)
                self._keep_gradients(self._full_model, mean)
            unknown = not torch.equal(before, torch.get_rng_state())
        loss = float(mean)
        return None if unknown or not math.isfinite(loss) else loss

    def _full_pass(self, full_model: nn.Module, *, training: bool) -> Tensor:
        """Return the mean loss of the complete module."""
        objective, size = self._job.model.objective, self._config.training.batch_size
        batch = batch_share(self._job.data.held_out, self._indices, (0, 1), self._multiple(size))
        loss_sum = self._draws.of(LOSS, objective.loss_sum)
        total = torch.zeros((), dtype=torch.float64)
        for index, chunk in enumerate(batch.chunks(self._num_chunks if training else 1)):
            num = len(chunk.inputs)
            self._draws.begin(0, range(index * num, (index + 1) * num), training=training)
            total = total + loss_sum(full_model(chunk.inputs), chunk.targets)
        return total / max(1, int(objective.count(batch.targets)))

    def _keep_gradients(self, full_model: nn.Module, loss: Tensor) -> None:
        """Keep the gradients of a loss by the parameter's name; none if they are not needed or not finite."""
        self._gradients = {}
        if loss.requires_grad:
            apply_freeze(full_model, self._config.training.freeze)
            torch.autograd.backward(loss)
            values = full_model.named_parameters()
            gradients = {name: value.grad for name, value in values if value.requires_grad and value.grad is not None}
            finite = all(bool(each.isfinite().all()) for each in gradients.values())
            self._gradients = gradients if finite else {}

    def _check(self, expected: float, engine: Engine, *, training: bool) -> None:
        """Compare the loss, and the gradients if the first rank has some. A collective."""
        has_gradients = on_first_rank(lambda _: bool(self._gradients))
        with _forward_errors(self._config.parallel):
            if not training:
                self._check_loss(expected, self._evaluated(engine), engine, training=False)
            if training or has_gradients:
                batch = self._batch(engine, self._config.training.batch_size)
                loss, gradients = engine.gradients(batch, training=training)
                differing = self._differing(gradients, engine)
                if training:
                    self._check_loss(expected, loss, engine, training=True)
                on_first_rank(lambda _: self._refuse(differing))

    def _evaluated(self, engine: Engine) -> float:
        loss_sum, count = engine.evaluate(self._batch(engine, self._config.evaluation_size))
        # The score of this evaluation is not one of the training's.
        self._job.scored.take()
        return loss_sum / max(1, count)

    def _check_loss(self, expected: float, loss: float, engine: Engine, *, training: bool) -> None:
        parallel, tolerance = self._config.parallel, _tolerance(engine).loss
        if not math.isclose(loss, expected, rel_tol=tolerance, abs_tol=tolerance):
            mode = " in training mode, with its random numbers," if training else ""
            raise InvalidInput(
                f"model: layout: for the same {len(self._indices)} samples{mode} got the loss {loss:.7g} on mesh "
                f"{parallel.mesh} and {expected:.7g} in one process, expected the same; {_remedy(parallel)}",
                code="FN-1292",
            )

    def _differing(self, gradients: Iterator[tuple[str, Tensor]], engine: Engine) -> dict[str, float]:
        """Return the relative difference of each gradient that rounding does not explain, on the first rank.

        Empty if a gradient of the mesh is not finite. The training reports it.
        """
        tolerance, finite, differing = _tolerance(engine), True, {}
        squares = (float(value.double().square().sum()) for value in self._gradients.values())
        total = math.sqrt(sum(squares))
        for name, value in gradients:
            expected = self._gradients.pop(name, None)
            if expected is None:
                continue
            error, norm = float((value - expected).double().norm()), float(expected.double().norm())
            finite = finite and math.isfinite(error)
            if error > tolerance.gradient * norm + tolerance.total * total:
                differing[name] = error / max(norm, tolerance.total * total)
        return differing if finite else {}

    def _refuse(self, differing: Mapping[str, float]) -> None:
        """Raise InvalidInput if a gradient differs."""
        if not differing:
            return
        parallel, plan = self._config.parallel, self._job.model.layout.plan
        unsplit = [name for name in differing if style_of_module(name.rpartition(".")[0], plan) not in SPLIT_KINDS]
        first, num_more = (unsplit or [*differing])[0], len(differing) - 1
        more = f" and {num_more} more parameter{'s' if num_more > 1 else ''}" if num_more else ""
        remedy = _remedy(parallel)
        if unsplit:
            remedy = (
                f"{first} is not split, so each rank must have its whole gradient: do not use it, nor another tensor "
                "that all ranks have whole, between a column and a row layer (use it after the row layer), or remove "
                "these styles from the plan; or use another axis"
            )
        raise InvalidInput(
            f"model: layout: for the same {len(self._indices)} samples the gradient of {first}{more} on mesh "
            f"{parallel.mesh} differs from that in one process (by {differing[first]:.2g} of its norm), expected the "
            f"same; {remedy}",
            code="FN-1292",
        )

    def _batch(self, engine: Engine, size: int) -> Batch:
        """Return this rank's share of the samples. A pipeline pads them to ``size``, the shape of its batches."""
        return batch_share(self._job.data.held_out, self._indices, engine.share, self._multiple(size))

    def _multiple(self, size: int) -> int:
        """Return the number of which the samples are padded to a multiple."""
        return size if self._config.parallel.pipelined else self._num_chunks

    @property
    def _num_chunks(self) -> int:
        parallel = self._config.parallel
        return parallel.mesh.batch_multiple(self._config.training.accumulate, parallel.microbatches)


@contextmanager
def _forward_errors(parallel: ParallelSettings) -> Iterator[None]:
    """Map torch's error for shapes that do not fit to InvalidInput."""
    try:
        yield
    except RuntimeError as exc:
        if is_lost_connection(exc):
            # The rank that failed has the reason.
            raise
        raise InvalidInput(
            f"model: layout: on mesh {parallel.mesh} the forward fails ({str(exc).partition(chr(10))[0]}), but not "
            f"in one process; {_remedy(parallel)}",
            code="FN-1292",
        ) from exc


def _tolerance(engine: Engine) -> Tolerance:
    if engine.rank_model.parallel.precision in HALF:
        return HALF_TOLERANCE
    return TOLERANCE if engine.rank_model.device.type == "cpu" else GPU_TOLERANCE


def _indices(config: TrainConfig, job: JobModel) -> Int64s:
    """Return the numbers of the held-out samples to compare on; none if the job is not compared."""
    mesh, family, held_out = config.parallel.mesh, config.model.family, job.data.held_out
    size = min(config.evaluation_size, config.training.batch_size)
    num_samples = min(len(held_out), size) if mesh.pp > 1 or mesh.tp > 1 else 0
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
