"""Runs a batch through the model of one rank, forward and backward, with or without a pipeline.

``Passes`` computes gradients and losses; it changes no parameter. Each loss is a sum divided by a count that the caller
gives, so results add up over gradient accumulation steps, microbatches and ranks.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import RankModel
from fanin.datacenter.parallel.steps.noise import PartNorms


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFactors:
    """The scale of the loss in a training pass.

    Attributes:
        count: count of the global batch, by which the loss is divided.
        factor: factor of the loss in the backward pass. A pipeline ignores it.
    """

    count: int
    factor: float = 1.0


class Passes:
    """Forward and backward passes of one rank.

    A pipeline infers the shapes of its activations in its first pass. All later batches must have the shape of the
    first one, separately for training and for evaluation.
    """

    def __init__(self, model: RankModel) -> None:
        self._model = model
        self._pipeline_shapes: dict[bool, torch.Size] = {}

    def train(self, batch: Batch, scale: LossFactors, noise: PartNorms | None, draws: int) -> Tensor:
        """Add the gradients of a batch to the parameters.

        Args:
            batch: this rank's part of the global batch.
            scale: the numbers by which the loss is divided and multiplied.
            noise: measures the gradients of each accumulation step, if the learning rate depends on them.
            draws: key of the random numbers of the step.

        Returns:
            This rank's share of the mean loss, a float64 scalar.
        """
        accumulate, microbatches = self._model.training.accumulate, self._model.parallel.microbatches
        loss = torch.zeros((), dtype=torch.float64, device=self._model.device)
        if self._model.schedule is not None:
            for index, chunk in enumerate(batch.chunks(accumulate)):
                losses: list[Tensor] = []
                self._begin_draws(draws, batch, len(chunk.inputs) * index, accumulate * microbatches)
                self._run_pipeline(chunk, float(scale.count), losses)
                loss = sum((each.detach() for each in losses), loss)
            return loss
        num_chunks = accumulate * microbatches
        if noise is not None:
            noise.begin()
        for index, chunk in enumerate(batch.chunks(num_chunks)):
            last = index == num_chunks - 1
            self._begin_draws(draws, batch, len(chunk.inputs) * index, num_chunks)
            with self._synchronization(last=last):
                outputs = self._model.runners[0](chunk.inputs, **chunk.extra)
                share = self._model.objective.loss_sum(outputs, chunk.targets) / scale.count
                torch.autograd.backward(share * (self._ddp_copies * scale.factor))
            if noise is not None:
                noise.add_accumulation_step(last=last)
            loss = loss + share.detach()
        return loss

    def evaluate(self, batch: Batch, draws: int) -> tuple[Tensor, list[Tensor]]:
        """Run a batch forward.

        Args:
            batch: this rank's part of the samples.
            draws: key of the random numbers, for a model that draws in evaluation.

        Returns:
            (sum of this rank's losses as a float64 scalar, the observer's score of each microbatch).
        """
        loss = torch.zeros((), dtype=torch.float64, device=self._model.device)
        scores: list[Tensor] = []
        observer, microbatches = self._model.objective.observer, self._model.parallel.microbatches
        if self._model.schedule is not None:
            losses: list[Tensor] = []
            self._begin_draws(draws, batch, 0, microbatches)
            # torch 2.13 cannot run a folded schedule forward only. It runs backward too, and the gradients are dropped.
            with torch.set_grad_enabled(self._model.parallel.folded):
                self._run_pipeline(batch, 1.0, losses, scores)
            for optimizer in self._model.optimizers:
                optimizer.zero_grad(set_to_none=True)
            # Shape inference may have scored uninitialized values first.
            return sum((each.detach() for each in losses), loss), scores[-microbatches:]
        for index, chunk in enumerate(batch.chunks(microbatches)):
            self._begin_draws(draws, batch, len(chunk.inputs) * index, microbatches)
            outputs = self._model.parts[0](chunk.inputs, **chunk.extra)
            loss = loss + self._model.objective.loss_sum(outputs, chunk.targets)
            if observer is not None:
                scores.append(observer.score(self._model.objective.predict(outputs), chunk.targets))
        return loss, scores

    def _begin_draws(self, key: int, batch: Batch, first: int, num_chunks: int) -> None:
        """Begin the draws of the chunk from example ``first`` of this rank's part on, one of ``num_chunks``."""
        size = len(batch.inputs)
        # All parts of a global batch have one size.
        start = self._model.axes.share[0] * size + first
        training = self._model.runners[next(iter(self._model.runners))].training
        self._model.draws.begin(key, range(start, start + size // num_chunks), training=training)

    @property
    def _ddp_copies(self) -> int:
        """Copies over which DistributedDataParallel averages gradients. The loss is multiplied by it to get the sum."""
        parallel = self._model.parallel
        return 1 if parallel.sharded else parallel.mesh.dp_replicate

    def _synchronization(self, *, last: bool) -> AbstractContextManager[None]:
        """Let gradients be summed over the ranks in the last chunk only."""
        runner = self._model.runners[0]
        if isinstance(runner, FSDPModule):
            runner.set_requires_gradient_sync(last)
        if isinstance(runner, DistributedDataParallel) and not last:
            no_sync: AbstractContextManager[None] = runner.no_sync()
            return no_sync
        return nullcontext()

    def _run_pipeline(
        self, batch: Batch, divisor: float, losses: list[Tensor], scores: list[Tensor] | None = None
    ) -> None:
        """Run the schedule once; with gradients enabled it trains.

        On the last stage the divided loss of each microbatch is appended to ``losses``. In an evaluation the observer's
        scores are appended to ``scores``.
        """
        schedule, parts = self._model.schedule, self._model.parts
        assert schedule is not None
        training = torch.is_grad_enabled()
        first_shape = self._pipeline_shapes.setdefault(training, batch.inputs.shape)
        if first_shape != batch.inputs.shape:
            # torch receives into buffers of the first shape, without an error.
            raise ValueError(
                f"got inputs of {list(batch.inputs.shape)} for a pipeline that began with {list(first_shape)}, "
                "expected the same in each step; pad them"
            )
        num_stages = self._model.parallel.pipeline().num_stages
        inputs = (batch.inputs,) if 0 in parts else ()
        target, outputs = (batch.targets, losses) if num_stages - 1 in parts else (None, None)
        run = schedule.step if training else schedule.eval
        arguments = {"divisor": divisor, "scores": scores}
        run(*inputs, target=target, losses=outputs, return_outputs=False, loss_kwargs=arguments, **batch.extra)
