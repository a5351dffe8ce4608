"""Keeps the buffers of a pipeline stage unchanged while torch infers the shapes of its activations."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn


class ShapeInferringStage(Protocol):
    """The members of torch's ``PipelineStage`` that ``keep_buffers`` replaces: the start and the end of inference."""

    submod: nn.Module
    _prepare_forward_infra: Callable[..., object]
    _post_metadata_inference_cleanup: Callable[[], None]


def keep_buffers(stage: ShapeInferringStage) -> None:
    """Restore the buffers of a stage after torch has inferred the shapes of its outputs.

    For the inference torch 2.13 runs the stage in train mode on uninitialized memory. Running statistics would count
    these values: those of a BatchNorm became NaN, or differed from the statistics of a single process.
    """
    begin, end = stage._prepare_forward_infra, stage._post_metadata_inference_cleanup
    saved: list[torch.Tensor] = []

    def begin_inference(*args: object, **kwargs: object) -> object:
        saved[:] = [value.clone() for value in stage.submod.buffers()]
        return begin(*args, **kwargs)

    def end_inference() -> None:
        end()
        with torch.no_grad():
            for value, old in zip(stage.submod.buffers(), saved, strict=True):
                value.copy_(old)
        saved.clear()

    stage._prepare_forward_infra, stage._post_metadata_inference_cleanup = begin_inference, end_inference
