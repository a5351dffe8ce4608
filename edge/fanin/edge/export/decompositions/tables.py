"""Decomposition tables: the form that replaces each operator, for a train step and for ``infer``, by graph format.

``tracing`` passes ``backward_decompositions`` to the tracer of ``train`` and ``evaluate``. ``infer`` is traced without
autograd, as the operators that modules call; ``int8.folding`` applies ``forward_decompositions`` to it.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._ops import OpOverload

from fanin.edge.export.decompositions import elementwise, padding, resampling, selection, sequences
from fanin.edge.export.decompositions.convolution import portable
from fanin.edge.export.decompositions.convolution.layouts import Images
from fanin.edge.export.decompositions.convolution.products import Convolutions
from fanin.edge.export.decompositions.group_norm import group_norm, group_norm_backward
from fanin.edge.export.decompositions.own import Decompositions, with_own
from fanin.edge.export.decompositions.pooling import adaptive, average, forward, max_backward

aten = torch.ops.aten
Table = dict[OpOverload, Callable[..., object]]
"""The form of each operator."""
NO_FORMS: Final[Decompositions] = MappingProxyType({})


def backward_decompositions(graph_format: str, own: Decompositions = NO_FORMS) -> Table:
    """Return the table for graphs that train.

    Args:
        graph_format: Selects the forms of this room, which are on top of torch's core decompositions.
        own: An App's own forms, on top of these.
    """
    table: Table = dict(core_aten_decompositions())
    table[aten.empty_permuted.default] = elementwise.empty_permuted
    formed = table | _common() | adaptive.table(graph_format) | (_tflite() if graph_format == "tflite" else _onnx())
    return with_own(formed, own)


def forward_decompositions(graph_format: str, own: Decompositions = NO_FORMS) -> Table:
    """Return the table for ``infer``, which only runs forward: few operators that modules call lack a form.

    The arguments are those of ``backward_decompositions``.
    """
    pools: Table = {
        aten.adaptive_max_pool1d.default: adaptive.adaptive_max_pool1d,
        aten.adaptive_max_pool2d.default: adaptive.adaptive_max_pool2d,
    }
    if graph_format != "tflite":
        return with_own(pools, own)
    forms = pools | {
        **padding.forward_table(),
        aten.conv_transpose1d.default: portable.conv_transpose,
        aten.conv_transpose2d.input: portable.conv_transpose,
        aten.max_pool2d.default: forward.max_pool2d,
        aten.avg_pool2d.default: forward.avg_pool2d,
    }
    return with_own(forms, own)


def _common() -> Table:
    return {
        **resampling.table(),
        aten.threshold_backward.default: elementwise.threshold_backward,
        aten.avg_pool2d_backward.default: average.avg_pool2d_backward,
        aten._adaptive_avg_pool2d.default: average.adaptive_avg_pool2d,
        aten._adaptive_avg_pool2d_backward.default: average.adaptive_avg_pool2d_backward,
    }


def _onnx() -> Table:
    """Return the ONNX forms. Some forward operators are replaced only because the runtime's kernel is slower."""
    images = Images()
    convolutions = Convolutions(images)
    # The exporter's own gradient of ReLU6 is 1, not 0, where an input is exactly 0 or 6.
    hardtanh_backward = core_aten_decompositions()[aten.hardtanh_backward.default]
    return {
        **{each: images.positionwise(each) for each in (aten.relu.default, aten.hardtanh.default, aten.add.Tensor)},
        aten.hardtanh_backward.default: images.positionwise(hardtanh_backward),
        **sequences.table(),
        aten.threshold_backward.default: images.positionwise(elementwise.threshold_backward),
        aten.detach.default: images.detach,
        aten.convolution.default: convolutions.forward,
        aten.convolution_backward.default: convolutions.backward,
        aten.native_group_norm.default: group_norm,
        aten.native_group_norm_backward.default: group_norm_backward,
        aten.max_pool2d_with_indices_backward.default: max_backward.max_pool2d_backward,
    }


def _tflite() -> Table:
    """Return the TFLite forms. The converter lacks some forward operators and converts others incorrectly."""
    return {
        **_plain_norms(),
        **padding.backward_table(),
        aten.convolution.default: portable.convolution,
        aten.convolution_backward.default: portable.convolution_backward,
        aten.avg_pool2d.default: forward.avg_pool2d,
        aten.max_pool2d_with_indices.default: forward.max_pool2d_with_indices,
        aten.max_pool2d_with_indices_backward.default: max_backward.portable_max_pool2d_backward,
        aten.embedding_dense_backward.default: selection.embedding_backward,
        aten.index_put.default: selection.index_put,
        aten.slice_backward.default: selection.slice_backward,
        aten.select_backward.default: selection.select_backward,
        aten.nll_loss_forward.default: selection.nll_loss,
        aten.nll_loss2d_forward.default: selection.nll_loss,
        aten.nll_loss_backward.default: selection.nll_loss_backward,
        aten.nll_loss2d_backward.default: selection.nll_loss_backward,
    }


def _plain_norms() -> Table:
    """Return torch's decompositions of norms: the converter's layout pass fails on operators with several results."""
    norms = get_decompositions([aten.native_group_norm, aten.native_layer_norm, aten.native_batch_norm])
    return {operator: form for operator, form in norms.items() if isinstance(operator, OpOverload)}
