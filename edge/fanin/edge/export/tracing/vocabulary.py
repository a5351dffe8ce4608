"""The number of tokens that a model knows, read from the table in which its inputs are looked up.

With it a device reports an unknown token by its position in the data. A runtime would only report that a graph failed.
"""

import copy
from typing import Final

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from fanin.edge.export.prepare import Prepared
from fanin.edge.export.tracing.examples import MIN_TRACE_BATCH
from fanin.edge.export.tracing.kernels import plain_kernels

LOOKUP: Final = torch.ops.aten.embedding.default
SAME: Final = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.aten.detach.default})
"""Operators that leave tokens unchanged."""


def count_tokens(prepared: Prepared) -> int:
    """Return the number of tokens in the smallest table; 0 if the inputs are not looked up as tokens."""
    if prepared.app.calibration.dtype != torch.int32:
        return 0
    # A copy: a pass may change running statistics.
    module = copy.deepcopy(prepared.eager).eval()

    def call(x: Tensor) -> Tensor:
        output: Tensor = module(x)
        return output

    with torch.no_grad(), plain_kernels():
        graph = make_fx(call)(prepared.app.examples(MIN_TRACE_BATCH)).graph
    return min((_num_rows(node) for node in graph.nodes if node.target is LOOKUP and _is_input(node)), default=0)


def _num_rows(lookup: Node) -> int:
    table = lookup.args[0]
    assert isinstance(table, Node), "the first argument of a lookup is its table"
    return int(table.meta["val"].shape[0])


def _is_input(lookup: Node) -> bool:
    """Return whether the indices of a lookup are x itself."""
    indices = lookup.args[1]
    while isinstance(indices, Node) and indices.target in SAME:
        indices = indices.args[0]
    return isinstance(indices, Node) and indices.op == "placeholder"
