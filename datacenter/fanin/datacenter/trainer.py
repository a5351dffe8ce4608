"""Data-parallel training that is the same on any number of ranks.

Three things make it so: the order of the global batches comes from (seed, epoch) and knows no ranks; a rank's loss
is the *sum* over its samples divided by the *global* number of samples, so uneven shards stay exact; and gradients
are summed over the ranks, never averaged. What is left between one process and many is the order of additions.

SGD with momentum as on the devices. Training stops when the loss on the validation part is flat, and keeps the
parameters that were best there. The test set is nowhere near.
"""

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fanin.clients.data import Examples, Int64s
from fanin.datacenter.jobfiles import Epoch, Trained, TrainSettings
from fanin.datacenter.mesh import REPLICATE
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.protos.errors import InvalidInput

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits (B, num_classes), labels (B,)) -> the loss of each sample (B,)."""

EVALUATE_BATCH: Final = 256
"""Samples a rank evaluates at once: a few MB of activations for the models at hand."""


class Trainer:
    """A module, its loss and its optimizer on one rank of a mesh; ``mesh`` None is one process by itself."""

    def __init__(self, module: torch.nn.Module, loss: Loss, settings: TrainSettings, mesh: DeviceMesh | None) -> None:
        self.module = module
        self._loss = loss
        self._group = None if mesh is None else mesh.get_group(REPLICATE)
        self._rank = dist.get_rank(self._group) if self._group is not None else 0
        self._num_ranks = dist.get_world_size(self._group) if self._group is not None else 1
        # Wrapping also gives every rank the parameters of rank 0.
        self._forward = module if self._group is None else DistributedDataParallel(module, process_group=self._group)
        trainable = [value for value in module.parameters() if value.requires_grad]
        self._dtype = trainable[0].dtype
        self._optimizer = torch.optim.SGD(trainable, lr=settings.learning_rate, momentum=settings.momentum)

    def step(self, batch: Examples) -> Tensor:
        """One optimizer step on a global batch; returns this rank's share of its mean loss.

        The shares of all ranks add up to the mean.
        """
        self._optimizer.zero_grad(set_to_none=True)
        losses = self._losses(batch)
        share = losses.sum() / len(batch)
        # DistributedDataParallel divides by the number of ranks; the global count has done all the dividing.
        torch.autograd.backward(share * self._num_ranks)
        self._optimizer.step()
        return share.detach().double()

    def add_up(self, values: Tensor) -> Tensor:
        """The sum of each rank's values, the same bits on every rank."""
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        return values

    @torch.no_grad()
    def evaluate(self, examples: Examples) -> tuple[float, float]:
        """(mean loss, accuracy) over all examples, each rank taking its part; a model of values has accuracy 0."""
        modes = {layer: layer.training for layer in self.module.modules()}
        # Norms that train and dropout are for the steps.
        self.module.eval()
        try:
            sums = self.add_up(self._evaluated(examples))
        finally:
            for layer, training in modes.items():
                layer.training = training
        return float(sums[0]) / len(examples), float(sums[1] / sums[2].clamp(min=1.0))

    def _evaluated(self, examples: Examples) -> Tensor:
        """(loss sum, labels found, labels asked for) of this rank's part."""
        loss_sum, num_correct, num_asked = 0.0, 0, 0
        for start in range(self._rank * EVALUATE_BATCH, len(examples), self._num_ranks * EVALUATE_BATCH):
            x, y = self._tensors(examples, np.arange(start, min(start + EVALUATE_BATCH, len(examples))))
            logits = self.module(x)
            loss_sum += float(self._loss(logits, y).sum())
            if y.is_floating_point():
                continue
            asked = y != NO_TOKEN
            num_correct += int((logits.argmax(dim=-1) == y)[asked].sum())
            num_asked += int(asked.sum())
        return torch.tensor([loss_sum, num_correct, num_asked], dtype=torch.float64)

    def _losses(self, batch: Examples) -> Tensor:
        """The losses of this rank's samples, 0 for padding."""
        mine = np.arange(self._rank, len(batch), self._num_ranks)
        # A rank without a sample takes a real one and counts it as nothing: it must join the collectives, and
        # not every module accepts an empty batch.
        x, y = self._tensors(batch, mine if len(mine) else np.arange(1))
        losses: Tensor = self._loss(self._forward(x), y)
        return losses if len(mine) else losses * 0.0

    def _tensors(self, examples: Examples, indices: Int64s) -> tuple[Tensor, Tensor]:
        x, y = torch.from_numpy(examples.x[indices]), torch.from_numpy(examples.y[indices])
        # Tokens stay integers; a loss is given int64 labels, which torch's own insist on.
        return x.to(self._dtype) if x.is_floating_point() else x, y if y.is_floating_point() else y.long()


def fit(trainer: Trainer, train: Examples, validation: Examples, settings: TrainSettings) -> Trained:
    """Train until the validation loss is flat; the module ends with its best parameters.

    Raises InvalidInput if a loss is not finite any more.
    """
    epochs: list[Epoch] = []
    best_loss, best_epoch, best = math.inf, 0, _snapshot(trainer.module)
    while len(epochs) < settings.max_epochs and len(epochs) - best_epoch < settings.patience:
        rng = np.random.default_rng([settings.seed, len(epochs)])
        train_loss = _train_epoch(trainer, train, rng.permutation(len(train)), settings.batch_size)
        loss, accuracy = trainer.evaluate(validation)
        if not math.isfinite(train_loss) or not math.isfinite(loss):
            raise InvalidInput(
                f"training: the loss became {train_loss:g} (validation {loss:g}) in epoch {len(epochs) + 1}, expected "
                f"a finite one; lower the learning rate ({settings.learning_rate:g})"
            )
        epochs.append(Epoch(train_loss=train_loss, validation_loss=loss, validation_accuracy=accuracy))
        if loss < best_loss - settings.min_delta:
            best_loss, best_epoch, best = loss, len(epochs), _snapshot(trainer.module)
    trainer.module.load_state_dict(best)
    flat = len(epochs) - best_epoch >= settings.patience
    return Trained(epochs=tuple(epochs), best_epoch=best_epoch, flat=flat)


def _train_epoch(trainer: Trainer, train: Examples, order: Int64s, batch_size: int) -> float:
    """The mean loss over the epoch's samples, each taken before its batch's step."""
    share = torch.zeros(1, dtype=torch.float64)
    for start in range(0, len(order), batch_size):
        batch = train.take(order[start : start + batch_size])
        share += trainer.step(batch) * len(batch)
    return float(trainer.add_up(share)) / len(train)


def _snapshot(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
