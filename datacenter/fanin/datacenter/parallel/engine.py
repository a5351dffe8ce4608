"""Trains a model that is spread over ranks with the results of one process.

Example::

    engine = build_engine(model, parallel, training, mesh)  # mesh None: one process
    index, count = engine.share                             # the part of each global batch that this rank trains on
    result = engine.step(batch)                             # batch: this rank's part
    loss_sum, loss_count = engine.evaluate(batch)           # over the parts of all ranks
    parameters = engine.full_parameters()                   # name to full CPU tensor, on every rank

All ranks must call the same methods in the same order, because most of them are collectives.

Three rules give the results of one process. The loss of a chunk is a sum, divided by the count of the global batch.
Gradients are summed over ranks, accumulation steps and microbatches, never averaged. They are completed, tied and
measured over all axes before they are clipped.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import ParameterEntry, RankModel, TrainableModel, build
from fanin.datacenter.parallel.checks import check_sequence
from fanin.datacenter.parallel.gather import full_gradients, full_parameters, load_full
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.parallel.steps import gradients
from fanin.datacenter.parallel.steps.noise import PartNorms, RateOf
from fanin.datacenter.parallel.steps.passes import LossFactors, Passes
from fanin.datacenter.parallel.steps.scaling import LossScale
from fanin.datacenter.parallel.torch_messages import silence_expected_messages
from fanin.datacenter.parallel.transforms.data import reshard
from fanin.datacenter.ranks.devices import device_type, rank_device


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of an optimizer step, the same on every rank.

    Attributes:
        loss: mean loss over the global batch before the step, a scalar.
        norm: 2-norm of all gradients before clipping, a scalar. With local steps it is the rank's own.
        count: count of the global batch, by which the loss was divided.
        skipped: the loss or the norm was not finite on some rank, so no rank changed its parameters.
        overflowed: the step was skipped because fp16 overflowed, and the loss scale was lowered. This occurs
            occasionally in a normal training.
    """

    loss: Tensor
    norm: Tensor
    count: int
    skipped: bool = False
    overflowed: bool = False


def build_engine(
    model: TrainableModel,
    parallel: ParallelSettings,
    training: TrainingSettings,
    mesh: DeviceMesh | None,
    device: torch.device | None = None,
) -> "Engine":
    """Create the engine that trains a model on this rank.

    Every rank of the mesh calls this function with the same arguments. The model is spread in place: its parameters
    move to the device, split as ``parallel`` describes. Do not use ``model.module`` afterwards.

    Args:
        model: the module, its layout and its objective. The module has all its parameters, identical on every rank. Or
            they are on the meta device, and the caller loads values into the engine before the first step.
        parallel: the distribution of the model over ranks. ``parallel.mesh`` must have as many ranks as ``mesh``.
        training: batch size, optimizer and gradient settings.
        mesh: the ranks, with the axes of ``MeshShape``. None trains in this process alone.
        device: the device of this rank. The default is the rank's device of the mesh's type, or without a mesh the
            device that ``parallel.device`` selects.

    Returns:
        The engine. It is ready for ``step`` and ``evaluate``.

    Raises:
        InvalidInput: the settings do not fit the model, the mesh or the batch size.
        UnsupportedModel: the model cannot be spread over an axis of this mesh.
    """
    silence_expected_messages()
    own_device = device or rank_device(device_type(parallel.device) if mesh is None else mesh.device_type)
    return Engine(build(model, parallel, training, mesh, own_device))


class Engine:
    """A model on one rank of a mesh, and the steps that train it. Create it with ``build_engine``."""

    def __init__(self, rank_model: RankModel) -> None:
        self.rank_model = rank_model
        self._passes = Passes(rank_model)
        parts = rank_model.parts.values()
        self._trainable = [value for part in parts for value in part.parameters() if value.requires_grad]
        copied = None if rank_model.tie is None else rank_model.tie.copied
        # Both ends of a tie hold the summed gradient, and its norm counts once.
        self._measured = [value for value in self._trainable if value is not copied]
        # Only fp16, and jobs that may skip steps, continue after a step that changes nothing.
        skips = rank_model.training.max_skips > 0 or rank_model.parallel.precision == "fp16"
        self._statistics = [value for part in parts for value in _statistics(part)] if skips else []
        self.axes = rank_model.axes
        self._scale = LossScale() if rank_model.parallel.precision == "fp16" else None
        self._noise: PartNorms | None = None

    @property
    def parts(self) -> Mapping[int, nn.Module]:
        """This rank's modules by the index of their stage."""
        return self.rank_model.parts

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """One optimizer for each part that has trainable parameters."""
        return self.rank_model.optimizers

    @property
    def table(self) -> Mapping[str, ParameterEntry]:
        """The stage, shape and dtype of every parameter of the model, by name."""
        return self.rank_model.table

    @property
    def share(self) -> tuple[int, int]:
        """(index, count): the part of each global batch that this rank trains on, and the number of parts."""
        return self.axes.share

    def step(self, batch: Batch, count: int | None = None, draws: int = 0) -> StepResult:
        """Run one optimizer step.

        If the loss or a gradient is not finite on some rank, no rank changes its parameters or running statistics.

        Args:
            batch: this rank's part of the global batch.
            count: count of the global batch, if the caller knows it. Otherwise it is summed over the ranks.
            draws: key of the random numbers of this step (``step_key``). Steps with one key draw the same numbers.

        Raises:
            InvalidInput: the ranks of tp cannot split the sequences of the batch evenly.
            UnsupportedModel: the loss did not use a parameter of a model that dp_replicate copies, or the model draws
                random numbers that ``TrainableModel.draws`` does not list.
            ValueError: the inputs of a pipeline have another shape than in the first step.
        """
        batch = self._on_device(batch)
        total = self._total_count(batch.targets) if count is None else count
        self._set_mode(training=True)
        self._drop_gradients()
        old_statistics = [value.clone() for value in self._statistics]
        with self.rank_model.draws.only(self.rank_model.device):
            share = self._passes.train(batch, self._loss_scale(total), self._noise, draws)
        if self._noise is not None:
            self.set_learning_rate(self._noise.rate())
        norm = self._complete_gradients()
        loss, finite = self._agree(share, norm)
        # In half precision the loss itself may overflow, too.
        overflowed = not finite and self._scale is not None and self._scale.overflowed()
        if finite:
            self._update_parameters(norm)
        else:
            # The forward pass has already updated the running statistics.
            for value, old in zip(self._statistics, old_statistics, strict=True):
                value.copy_(old)
        return StepResult(loss=loss, norm=norm, count=total, skipped=not finite, overflowed=overflowed)

    @torch.no_grad()
    def evaluate(self, batch: Batch, draws: int = 0) -> tuple[float, int]:
        """Evaluate the parts of all ranks together, without training.

        The objective's observer receives the scores of this rank's outputs.

        Args:
            batch: this rank's part of the samples.
            draws: key of the random numbers, for a model that draws in evaluation (``evaluation_key``).

        Returns:
            (sum of the losses, their count), over all ranks.

        Raises:
            UnsupportedModel: the model draws random numbers that ``TrainableModel.draws`` does not list.
        """
        batch = self._on_device(batch)
        self._set_mode(training=False)
        with self.rank_model.draws.only(self.rank_model.device):
            loss, scores = self._passes.evaluate(batch, draws)
        for part in self.parts.values():
            reshard(part)
        observer = self.rank_model.objective.observer
        if observer is not None:
            for score in scores:
                observer.add(score)
        return float(self._sum_over_ranks(loss, pipeline=True)), self._total_count(batch.targets)

    def gradients(self, batch: Batch, *, training: bool = False) -> tuple[float, Iterator[tuple[str, Tensor]]]:
        """Compute the gradients of the mean loss. Nothing is trained, and running statistics keep their values.

        A collective: all ranks must iterate to the end together.

        Args:
            batch: this rank's part of the samples. A pipeline needs the shape of the training's batches.
            training: whether the model is in training mode. It draws the random numbers of the key 0.

        Returns:
            (the mean loss, each full gradient with its name; zeros for a parameter without a gradient).
        """
        batch = self._on_device(batch)
        total = self._total_count(batch.targets)
        self._set_mode(training=training)
        self._drop_gradients()
        values = [value for part in self.parts.values() for value in _statistics(part)]
        old_values = [value.clone() for value in values]
        with self.rank_model.draws.only(self.rank_model.device):
            share = self._passes.train(batch, self._loss_scale(total), None, 0)
        for value, old in zip(values, old_values, strict=True):
            value.copy_(old)
        self._complete_gradients()
        return float(self._sum_over_ranks(share, pipeline=True)), self._full_gradients()

    def _full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        yield from full_gradients(self.rank_model)
        self._drop_gradients()

    def _loss_scale(self, count: int) -> LossFactors:
        return LossFactors(count=max(1, count), factor=1.0 if self._scale is None else self._scale.factor)

    @property
    def scale_state(self) -> dict[str, float]:
        """The state of fp16's loss scale by name, for a checkpoint. Empty in other precisions."""
        return {} if self._scale is None else self._scale.state

    def load_scale_state(self, values: Mapping[str, float]) -> None:
        """Restore fp16's loss scale from ``values``, if they contain one. Other precisions ignore them."""
        if self._scale is not None:
            self._scale.load(values)

    def measure_noise(self, rate_of: RateOf) -> None:
        """Set the learning rate of each following step from the gradient noise between the parts of its batch.

        Supported for one process, and for copies that DistributedDataParallel synchronizes.
        """
        self._noise = PartNorms(self.rank_model.runners[0], self.rank_model.training.accumulate, rate_of)

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the following steps."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def full_parameters(self) -> dict[str, Tensor]:
        """Gather all parameters on the CPU of every rank, by name and in the order of one process. A collective."""
        return dict(full_parameters(self.rank_model))

    def load_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Load full parameters into this rank's shards.

        Raises:
            ValueError: names or shapes differ from those of the model. Nothing is changed.
        """
        load_full(self.rank_model, values)

    def _on_device(self, batch: Batch) -> Batch:
        """Return a batch on this rank's device. Raises InvalidInput if tp cannot split its sequences evenly."""
        if self.rank_model.parallel.sequence_parallel:
            check_sequence(self.rank_model.parallel, batch.inputs.shape[1])
        return batch.to(self.rank_model.device)

    def _drop_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _complete_gradients(self) -> Tensor:
        """Settle, tie and unscale the gradients. Return their norm over all ranks, before clipping."""
        gradients.check_copies(self.rank_model.runners.values())
        gradients.settle(self._trainable)
        if self.rank_model.tie is not None:
            self.rank_model.tie.add_gradients()
        if self._scale is not None:
            gradients.scale(self._trainable, 1.0 / self._scale.factor)
        return gradients.total_norm(self._measured, self.axes.pipeline, self.rank_model.device)

    def _agree(self, share: Tensor, norm: Tensor) -> tuple[Tensor, bool]:
        """Return (the mean loss, whether the loss and the gradients are finite), the same on all ranks.

        Ranks of ``tp`` exchange no message: each has the full loss and the norm of all of them. Copies that run local
        steps have different norms, so whether a norm is finite is sent together with the loss.
        """
        values = torch.stack([share, norm.isfinite().logical_not().to(share)])
        loss, num_not_finite = self._sum_over_ranks(values, pipeline=True)
        return loss, bool(loss.isfinite()) and not bool(num_not_finite)

    def _update_parameters(self, norm: Tensor) -> None:
        """Clip the gradients and run the optimizers."""
        limit = self.rank_model.training.clip_norm
        if limit is not None:
            gradients.clip(self._trainable, norm, limit)
        for optimizer in self.optimizers:
            optimizer.step()
        if self._scale is not None:
            self._scale.succeeded()

    def _set_mode(self, *, training: bool) -> None:
        for runner in self.rank_model.runners.values():
            if runner.training != training:
                runner.train(training)

    def _total_count(self, targets: Tensor) -> int:
        """Return the count over all parts of the global batch."""
        return int(self._sum_over_ranks(self.rank_model.objective.count(targets).double(), pipeline=False))

    def _sum_over_ranks(self, value: Tensor, *, pipeline: bool) -> Tensor:
        """Sum in place over the ranks with other samples and, with ``pipeline``, over the stages.

        Only the last stage has a loss; the others contribute zero.
        """
        for group in self.axes.loss_groups if pipeline else self.axes.sample_groups:
            dist.all_reduce(value, group=group)
        return value


def _statistics(part: nn.Module) -> list[Tensor]:
    """Return the buffers of a part that belong to its state."""
    names = part.state_dict().keys()
    return [value for name, value in part.named_buffers() if name in names]
