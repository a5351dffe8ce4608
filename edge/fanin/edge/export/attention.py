"""Scaled dot-product attention as plain products, for graphs that are not traced through autograd.

``torch.export`` keeps it as one operator, which ONNX has for 4-D tensors only and TFLite not at all. Here it is
computed in its own terms (Vaswani et al. 2017, arXiv 1706.03762, equation 1), for any number of leading dimensions.
"""

import math

import torch
from torch import Tensor
from torch.export import ExportedProgram

from fanin.edge.export.quiet import quiet_torch

fused = torch.ops.aten.scaled_dot_product_attention.default


def with_plain_attention(program: ExportedProgram) -> ExportedProgram:
    """The program with its attention, if it has any, as products and a softmax."""
    if all(node.target is not fused for node in program.graph.nodes):
        return program
    with quiet_torch():
        plain: ExportedProgram = program.run_decompositions({fused: plain_attention})
    return plain


def plain_attention(query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` (..., T, E), whose arguments these are."""
    given = dict(zip(("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"), rest, strict=False)) | options
    if given.get("enable_gqa"):
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scale = given.get("scale")
    factor = float(scale) if isinstance(scale, int | float) else 1.0 / math.sqrt(query.size(-1))
    scores = (query * factor) @ key.transpose(-2, -1)
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril()
    if isinstance(mask, Tensor):
        # A finite floor: minus infinity has no int8 form, and a row without any place would be NaN.
        floor = torch.finfo(torch.float32).min / 2
        scores = scores + (torch.where(mask, 0.0, floor) if mask.dtype == torch.bool else mask.clamp(min=floor))
    found: Tensor = torch.softmax(scores, dim=-1) @ value
    return found
