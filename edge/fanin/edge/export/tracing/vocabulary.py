"""How many tokens a model knows: found by looking which table its inputs are looked up in.

A device tells a token that is not among them by its place in the data; a runtime would at best say that a graph failed.
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
"""What leaves tokens as they are."""


def count_tokens(prepared: Prepared) -> int:
    """The number of tokens that the model may be given, 0 if its inputs are not tokens, or are not looked up as such.

    The smallest table counts, if there are several.
    """
    if prepared.app.calibration.dtype != torch.int32:
        return 0
    # A copy: a pass may move running statistics.
    module = copy.deepcopy(prepared.eager).eval()

    def call(x: Tensor) -> Tensor:
        found: Tensor = module(x)
        return found

    with torch.no_grad(), plain_kernels():
        graph = make_fx(call)(prepared.app.examples(MIN_TRACE_BATCH)).graph
    return min((_num_rows(node) for node in graph.nodes if node.target is LOOKUP and _is_input(node)), default=0)


def _num_rows(lookup: Node) -> int:
    table = lookup.args[0]
    assert isinstance(table, Node), "a lookup is in a tensor"
    return int(table.meta["val"].shape[0])


def _is_input(lookup: Node) -> bool:
    """Whether it is x itself that is looked up."""
    places = lookup.args[1]
    while isinstance(places, Node) and places.target in SAME:
        places = places.args[0]
    return isinstance(places, Node) and places.op == "placeholder"
