"""The memory format of a module: the tensors of an export are stored row by row.

A module may have another memory format, such as ``torch.channels_last``, or tensors that are views: ``w.t()``,
``w.expand(...)``. A graph has no strides, so the memory format changes no result. But torch chooses operators by it.
"""

import torch
from torch import Tensor, nn


def store_by_rows(module: nn.Module) -> None:
    """Let each parameter, buffer and other tensor attribute of a module be contiguous, with the same values."""
    for layer in module.modules():
        attributes = (*layer.parameters(recurse=False), *layer.buffers(recurse=False), *vars(layer).values())
        for value in attributes:
            if isinstance(value, Tensor) and value.layout == torch.strided:
                # The tensor stays the same object: layers may share it.
                value.data = value.data.contiguous()
