"""Builds torch's optimizer for one part of a model, in the form that is cheapest on sharded parameters."""

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from fanin.datacenter.parallel.settings import TrainingSettings


def build_optimizer(part: nn.Module, settings: TrainingSettings) -> Optimizer | None:
    """Build the optimizer of the trainable parameters of a part. Return None if there are none."""
    values = [value for value in part.parameters() if value.requires_grad]
    if not values:
        return None
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "sgd":
        # torch 2.13 has no fused SGD for sharded parameters.
        return SGD(values, lr=rate, momentum=settings.momentum, weight_decay=decay)
    return AdamW(values, lr=rate, betas=settings.betas, eps=settings.epsilon, weight_decay=decay, fused=True)
