"""The key of traced graphs. Equal keys mean equal files from a converter.

It covers the operators with their arguments, shapes, dtypes and modules, the constants and the names of the ports. It
also covers the versions of the converting libraries and the source of this package.
"""

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from fanin.edge.export.graph.traced import Traced
from fanin.edge.export.module.origins import origin_of

PACKAGE: Final = Path(__file__).parents[1]
LIBRARIES: Final[Mapping[str, tuple[str, ...]]] = {
    "onnx": ("torch", "onnx", "onnx-ir", "onnxscript"),
    "tflite": ("torch", "litert-torch", "ai-edge-litert", "jax"),
}
"""The distributions that a conversion to each format depends on."""


def digest_of(graph_format: str, signatures: Mapping[str, Traced]) -> str | None:
    """Return the key (hexadecimal SHA-256) of the file of some Signatures.

    Args:
        graph_format: ``"onnx"`` or ``"tflite"``.
        signatures: Traced graphs by Signature name, before their conversion, which may change them.

    Returns:
        The key. None if a graph has a part that cannot be distinguished from others.
    """
    state = hashlib.sha256()
    lines = [graph_format, _source(), *(f"{name} {version(name)}" for name in LIBRARIES[graph_format])]
    for name, traced in signatures.items():
        lines += [name, repr(list(traced.inputs)), repr(list(traced.outputs)), *map(_described, traced.examples)]
        lines += [str(traced.program.graph_signature), str(traced.program.range_constraints)]
        graph, constants = _graph_lines(traced.program.graph_module), _tensors(traced)
        if graph is None:
            return None
        lines += graph
        for key, value in constants:
            lines.append(f"{key} {_described(value)}")
            state.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    state.update("\n".join(lines).encode())
    return state.hexdigest()


@cache
def _source() -> str:
    """Return the digest of this package's own modules, which rewrite graphs before and after their conversion."""
    state = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        state.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    return state.hexdigest()


def _tensors(traced: Traced) -> list[tuple[str, Tensor]]:
    module = traced.program.graph_module
    rows: dict[str, object] = {**traced.program.state_dict, **traced.program.constants}
    rows |= {str(node.target): _attribute(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")}
    return [(name, value) for name, value in sorted(rows.items()) if isinstance(value, Tensor)]


def _graph_lines(module: GraphModule) -> list[str] | None:
    """Return a line for each node, with those of the graphs that it calls; None for an attribute of another kind."""
    lines = []
    for node in module.graph.nodes:
        lines.append(
            f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {origin_of(node)} "
            f"{[_described(value) for value in tree_leaves(node.meta.get('val'))]}"
        )
        if node.op == "get_attr" and not isinstance(value := _attribute(module, str(node.target)), Tensor):
            inner = _graph_lines(value) if isinstance(value, GraphModule) else None
            if inner is None:
                return None
            lines += inner
    return lines


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.dtype} {tuple(value.shape)} {value.stride()}"


def _attribute(module: GraphModule, path: str) -> object:
    value: object = module
    for name in path.split("."):
        value = getattr(value, name)
    return value
