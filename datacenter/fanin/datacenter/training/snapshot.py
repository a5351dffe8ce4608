"""Snapshots of a rank's parameters and running statistics, in memory."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fanin.datacenter.parallel.engine import Engine


def snapshot(engine: Engine) -> dict[str, Tensor]:
    """Return copies of this rank's parameters and buffers, by stage and name."""
    return {name: value.detach().clone() for name, value in _tensors(engine)}


@torch.no_grad()
def restore(engine: Engine, values: Mapping[str, Tensor]) -> None:
    """Write a snapshot back into the engine."""
    for name, value in _tensors(engine):
        value.copy_(values[name])


def _tensors(engine: Engine) -> list[tuple[str, Tensor]]:
    def of(stage: int, part: nn.Module) -> list[tuple[str, Tensor]]:
        return [(f"{stage}.{name}", value) for name, value in (*part.named_parameters(), *part.named_buffers())]

    return [pair for stage, part in engine.parts.items() for pair in of(stage, part)]
