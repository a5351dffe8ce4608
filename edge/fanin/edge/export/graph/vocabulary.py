"""The number of tokens in a model's vocabulary, read from the lookup table of its inputs.

With it a device reports an unknown token by its position in the data. A runtime would only report that a graph failed.
"""

import copy
from typing import Final

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from fanin.edge.export.graph.examples import MIN_TRACE_BATCH, check_output
from fanin.edge.export.module.kernels import tracing
from fanin.edge.export.module.prepare import Prepared

LOOKUP: Final = torch.ops.aten.embedding.default
SAME: Final = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.aten.detach.default})
"""Operators that leave tokens unchanged."""


def count_tokens(prepared: Prepared) -> dict[str, int]:
    """Return the number of tokens in the smallest table of each input that is looked up as tokens, by name."""
    inputs = prepared.app.examples(MIN_TRACE_BATCH)
    if all(value.is_floating_point() for value in inputs.values()):
        return {}
    # A copy: a pass may change running statistics.
    module = copy.deepcopy(prepared.eager).eval()

    def call(*values: Tensor) -> Tensor:
        output = prepared.app.call(module, dict(zip(inputs, values, strict=True)))
        return prepared.app.predicted(check_output(prepared.app, output))

    with torch.no_grad(), tracing():
        graph = make_fx(call)(*inputs.values()).graph
    names = dict(zip((node for node in graph.nodes if node.op == "placeholder"), inputs, strict=True))
    counts: dict[str, int] = {}
    for node in graph.nodes:
        name = names.get(_source(node)) if node.target is LOOKUP else None
        if name is not None:
            counts[name] = min(_num_rows(node), counts.get(name, _num_rows(node)))
    return {name: counts[name] for name in inputs if name in counts}


def _num_rows(lookup: Node) -> int:
    table = lookup.args[0]
    assert isinstance(table, Node), "the first argument of a lookup is its table"
    return int(table.meta["val"].shape[0])


def _source(lookup: Node) -> Node | None:
    """Return the node of the indices of a lookup, before operators that leave them unchanged."""
    indices = lookup.args[1]
    while isinstance(indices, Node) and indices.target in SAME:
        indices = indices.args[0]
    return indices if isinstance(indices, Node) else None
