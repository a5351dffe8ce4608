"""What torch's finding out of shapes may not leave behind in a pipeline's stages."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn


class Prepared(Protocol):
    """What is replaced of a stage: how it begins to find out shapes, and how it ends."""

    submod: nn.Module
    _prepare_forward_infra: Callable[..., object]
    _post_metadata_inference_cleanup: Callable[[], None]


def keep_buffers(stage: Prepared) -> None:
    """Have a stage leave its buffers as they are while torch finds out the shapes of what it hands on.

    For that torch 2.13 runs it in training on values that are nobody's, memory as it lies there, and running statistics
    would count them: a BatchNorm's were NaN, or another model's than one process has.
    """
    begin, end = stage._prepare_forward_infra, stage._post_metadata_inference_cleanup
    before: list[torch.Tensor] = []

    def begun(*args: object, **kwargs: object) -> object:
        before[:] = [value.clone() for value in stage.submod.buffers()]
        return begin(*args, **kwargs)

    def ended() -> None:
        end()
        with torch.no_grad():
            for value, old in zip(stage.submod.buffers(), before, strict=True):
                value.copy_(old)
        before.clear()

    stage._prepare_forward_infra, stage._post_metadata_inference_cleanup = begun, ended
