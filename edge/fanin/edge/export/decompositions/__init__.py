"""Backward operators that no inference runtime has, written as operators that all have.

torch decomposes most of its backward operators itself; these it does not. Each form is exact up to the order of
additions, and held to torch's own kernel in float64 (``tests/unit/test_export_decompositions.py``).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._ops import OpOverload

from fanin.edge.export.decompositions import adaptive, padding, portable, resampling, selection, sequences
from fanin.edge.export.decompositions.convolution import Convolutions
from fanin.edge.export.decompositions.forward_pools import avg_pool2d, max_pool2d_with_indices
from fanin.edge.export.decompositions.indexing import index_put
from fanin.edge.export.decompositions.layouts import Images
from fanin.edge.export.decompositions.norms import group_norm, group_norm_backward
from fanin.edge.export.decompositions.pooling import max_pool2d_backward

aten = torch.ops.aten


def backward_decompositions(graph_format: str) -> dict[OpOverload, Callable[..., object]]:
    """The decomposition table for what is trained in a graph format: torch's core one and ours."""
    table: dict[OpOverload, Callable[..., object]] = dict(core_aten_decompositions())
    table[aten.empty_permuted.default] = empty_permuted
    return table | _common() | adaptive.table(graph_format) | (_portable() if graph_format == "tflite" else _onnx())


def _common() -> dict[OpOverload, Callable[..., object]]:
    return {
        **resampling.table(),
        aten.threshold_backward.default: portable.threshold_backward,
        aten.avg_pool2d_backward.default: portable.avg_pool2d_backward,
        aten._adaptive_avg_pool2d.default: portable.adaptive_avg_pool2d,
        aten._adaptive_avg_pool2d_backward.default: portable.adaptive_avg_pool2d_backward,
    }


def _onnx() -> dict[OpOverload, Callable[..., object]]:
    """Some forward operators are here for speed: a runtime's own kernel is slower than another form."""
    images = Images()
    convolutions = Convolutions(images)
    # The exporter's own form of ReLU6's gradient lets it through where an input is exactly 0 or 6.
    hardtanh_backward = core_aten_decompositions()[aten.hardtanh_backward.default]
    return {
        **{each: images.place_by_place(each) for each in (aten.relu.default, aten.hardtanh.default, aten.add.Tensor)},
        aten.hardtanh_backward.default: images.place_by_place(hardtanh_backward),
        **sequences.table(),
        aten.threshold_backward.default: images.place_by_place(portable.threshold_backward),
        aten.detach.default: images.detach,
        aten.convolution.default: convolutions.forward,
        aten.convolution_backward.default: convolutions.backward,
        aten.native_group_norm.default: group_norm,
        aten.native_group_norm_backward.default: group_norm_backward,
        aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
    }


def _plain_norms() -> dict[OpOverload, Callable[..., object]]:
    """The converter's layout pass fails on operators with several results."""
    norms = get_decompositions([aten.native_group_norm, aten.native_layer_norm, aten.native_batch_norm])
    return {operator: form for operator, form in norms.items() if isinstance(operator, OpOverload)}


def _portable() -> dict[OpOverload, Callable[..., object]]:
    """In this format some forward operators need another form, too: its converter has none, or a wrong one."""
    return {
        **_plain_norms(),
        **padding.backward_table(),
        aten.convolution.default: portable.convolution,
        aten.convolution_backward.default: portable.convolution_backward,
        aten.avg_pool2d.default: avg_pool2d,
        aten.max_pool2d_with_indices.default: max_pool2d_with_indices,
        aten.max_pool2d_with_indices_backward.default: portable.max_pool2d_backward,
        aten.embedding_dense_backward.default: selection.embedding_backward,
        aten.index_put.default: index_put,
        aten.slice_backward.default: selection.slice_backward,
        aten.select_backward.default: selection.select_backward,
        aten.nll_loss_forward.default: selection.nll_loss,
        aten.nll_loss2d_forward.default: selection.nll_loss,
        aten.nll_loss_backward.default: selection.nll_loss_backward,
        aten.nll_loss2d_backward.default: selection.nll_loss_backward,
    }


def empty_permuted(size: Sequence[int], _physical: Sequence[int], *, dtype: torch.dtype, **_: object) -> Tensor:
    """``aten.empty_permuted``: only its shape is ever read, for ``full_like``."""
    return torch.zeros(size, dtype=dtype)
