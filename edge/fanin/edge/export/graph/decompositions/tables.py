"""Decomposition tables: the form that replaces each operator, for a train step and for ``infer``, by graph format.

``ONNX`` and ``TFLITE`` are the forms of the two formats. ``tracing`` passes those for training to the tracer of
``train`` and ``evaluate``. ``infer`` is traced without autograd, as the operators that modules call; ``int8.folding``
applies the forms for inference to it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._ops import OpOverload

from fanin.edge.export.app.decompositions import Decompositions, with_own
from fanin.edge.export.graph.decompositions import elementwise, ordering, padding, resampling, selection, sequences
from fanin.edge.export.graph.decompositions.convolution import portable
from fanin.edge.export.graph.decompositions.convolution.layouts import Images
from fanin.edge.export.graph.decompositions.convolution.products import Convolutions
from fanin.edge.export.graph.decompositions.norms import group_norm, group_norm_backward, weight_norm_backward
from fanin.edge.export.graph.decompositions.pooling import adaptive, average, forward, max_backward
from fanin.edge.export.graph.decompositions.programs.recorder import counterpart

aten = torch.ops.aten
Table = dict[OpOverload, Callable[..., object]]
"""The form of each operator."""
WRITES: Final[Mapping[OpOverload, Callable[..., object]]] = MappingProxyType(
    {
        aten.copy.default: elementwise.copied,
        aten.diagonal_scatter.default: selection.diagonal_scatter,
        aten.slice_scatter.default: selection.slice_scatter,
    }
)
"""Forms of the operators that replace writes into a part of a tensor."""
POSITIONWISE: Final = (aten.relu.default, aten.hardtanh.default, aten.add.Tensor)
"""Operators that compute in the layout of their images, which a write into one ends."""
NO_FORMS: Final[Decompositions] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """The forms of one graph format. Each call builds a new table, because the forms of one trace share a state.

    Attributes:
        graph_format: Name of the format.
        backward: Builds the forms for graphs that train, which are on top of torch's core decompositions.
        forward: Builds the forms for ``infer``, which only runs forward: few operators that modules call lack one.
    """

    graph_format: str
    backward: Callable[[], Table]
    forward: Callable[[], Table]

    def for_training(self, own: Decompositions = NO_FORMS) -> Table:
        """Return the decomposition table for graphs that train, with an App's own forms on top."""
        return with_own(dict(_core()) | self.backward(), own)

    def for_inference(self, own: Decompositions = NO_FORMS) -> Table:
        """Return the decomposition table for ``infer``, with an App's own forms on top."""
        return with_own(self.forward(), own)


@cache
def _core() -> Mapping[OpOverload, Callable[..., object]]:
    """Return torch's core decompositions, which take longer to collect than a small graph to trace."""
    return MappingProxyType(dict(core_aten_decompositions()))


def with_writes(table: Table) -> Table:
    """Return a table in which each operator in place has the form of its plain operator, too."""
    writes: Table = {}
    for operator, form in table.items():
        write = None if operator in POSITIONWISE else _in_place(operator)
        # An operator that changes only the shape of its input has nothing to write.
        if write is not None and write not in table and torch.Tag.inplace_view not in write.tags:
            writes[write] = _written(form)
    return table | writes


@cache
def _in_place(operator: OpOverload) -> OpOverload | None:
    return counterpart(operator, operator._schema.name.partition("::")[2] + "_")


def _written(form: Callable[..., object]) -> Callable[..., object]:
    def into(x: Tensor, *args: object, **kwargs: object) -> object:
        result = form(x, *args, **kwargs)
        return x.copy_(result) if isinstance(result, Tensor) else NotImplemented

    return into


def _common() -> Table:
    return {
        **resampling.table(),
        aten.diagonal_backward.default: selection.diagonal_backward,
        aten.unfold_backward.default: selection.unfold_backward,
        aten.logcumsumexp.default: ordering.logcumsumexp,
        aten.empty_permuted.default: elementwise.empty_permuted,
        aten.new_empty_strided.default: elementwise.new_empty_strided,
        aten.threshold_backward.default: elementwise.threshold_backward,
        aten.avg_pool2d_backward.default: average.avg_pool2d_backward,
        aten._adaptive_avg_pool2d.default: average.adaptive_avg_pool2d,
        aten._adaptive_avg_pool2d_backward.default: average.adaptive_avg_pool2d_backward,
        aten._weight_norm_interface_backward.default: weight_norm_backward,
    }


def _onnx_backward() -> Table:
    """Return the ONNX forms. Some forward operators are replaced only because the runtime's kernel is slower."""
    images = Images()
    convolutions = Convolutions(images)
    # The exporter's own gradient of ReLU6 is 1, not 0, where an input is exactly 0 or 6.
    hardtanh_backward = get_decompositions([aten.hardtanh_backward])[aten.hardtanh_backward.default]
    return {
        **_common(),
        **adaptive.table(max_backward.max_pool2d_backward),
        **{each: images.positionwise(each) for each in POSITIONWISE},
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


def _tflite_backward() -> Table:
    """Return the TFLite forms. The converter lacks some forward operators and converts others incorrectly."""
    return {
        **_common(),
        **adaptive.table(max_backward.portable_max_pool2d_backward),
        **_plain_norms(),
        **padding.backward_table(),
        **ordering.table(),
        **resampling.single_channel_table(),
        aten.convolution.default: portable.convolution,
        aten.convolution_backward.default: portable.convolution_backward,
        aten.avg_pool2d.default: forward.avg_pool2d,
        aten.max_pool2d_with_indices.default: forward.max_pool2d_with_indices,
        aten.max_pool2d_with_indices_backward.default: max_backward.portable_max_pool2d_backward,
        aten.embedding_dense_backward.default: selection.embedding_backward,
        aten.index.Tensor: selection.index,
        aten.index_put.default: selection.index_put,
        aten.index_put_.default: selection.index_put_into,
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


def _onnx_forward() -> Table:
    return {
        aten.adaptive_max_pool1d.default: adaptive.adaptive_max_pool1d,
        aten.adaptive_max_pool2d.default: adaptive.adaptive_max_pool2d,
        aten.logcumsumexp.default: ordering.logcumsumexp,
    }


def _tflite_forward() -> Table:
    return {
        **_onnx_forward(),
        **padding.forward_table(),
        **ordering.forward_table(),
        **resampling.single_channel_forward_table(),
        aten.index.Tensor: selection.index,
        aten.index_put.default: selection.index_put,
        aten.index_put_.default: selection.index_put_into,
        aten.conv_transpose1d.default: portable.conv_transpose,
        aten.conv_transpose2d.input: portable.conv_transpose,
        aten.max_pool2d.default: forward.max_pool2d,
        aten.avg_pool1d.default: forward.avg_pool1d,
        aten.avg_pool2d.default: forward.avg_pool2d,
    }


ONNX: Final = Forms(graph_format="onnx", backward=_onnx_backward, forward=_onnx_forward)
TFLITE: Final = Forms(graph_format="tflite", backward=_tflite_backward, forward=_tflite_forward)
