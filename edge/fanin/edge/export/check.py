"""Preflight: which part of a module has no form in which graph format, before anything is exported.

The module as a whole is put through what an export does, in memory. If that fails, its layers are put through it one
by one, with the inputs that they had and backwards too, so that the reason gets a name. What fails as a whole while all
of its layers pass is in the code between them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn

from fanin.edge.export.app import App
from fanin.edge.export.formats import FORMATS
from fanin.edge.export.prepare import Prepared, prepare
from fanin.edge.export.preprocess import ENCODERS
from fanin.edge.export.trace import example_batch, trace_layer
from fanin.edge.runtimes.models import PREPROCESS
from fanin.protos.errors import UnsupportedModel

RUNTIMES: Final = MappingProxyType({"onnx": ("onnxruntime",), "tflite": ("LiteRT", "tflite-runtime")})
"""The runtimes of each graph format, as people know them."""
OPERATOR: Final = re.compile(r"(?:aten|prims|torchvision)[.:]+\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A part of the module that a graph format has no form for.

    ``module`` is its name in the App's module ("": the code between layers), ``kind`` its class, ``operator`` what is
    lacking where that could be told ("" elsewhere), ``reason`` the whole story.
    """

    module: str
    kind: str
    graph_format: str
    operator: str
    reason: str

    @property
    def runtimes(self) -> tuple[str, ...]:
        """Which runtimes cannot run it."""
        return RUNTIMES[self.graph_format]


def check_app(app: App, formats: Sequence[str]) -> tuple[Finding, ...]:
    """What stands in the way of exporting the App in these formats; empty if nothing does.

    Raises UnsupportedModel for what is wrong in every format: dtypes, names, nothing to train.
    """
    prepared = prepare(app)
    example_batch(prepared)
    findings: list[Finding] = []
    for name in formats:
        try:
            FORMATS[name].make(prepared)
        except UnsupportedModel as exc:
            layers = _failing_layers(prepared, name)
            whole = _finding("", type(app.module).__name__, name, str(exc))
            findings += layers or [whole]
        if app.preprocess is not None:
            try:
                ENCODERS[name](app, f"{prepared.what}: the {PREPROCESS} graph")
            except UnsupportedModel as exc:
                findings.append(_finding(PREPROCESS, type(app.preprocess).__name__, name, str(exc)))
    return tuple(findings)


def _failing_layers(prepared: Prepared, graph_format: str) -> list[Finding]:
    findings = []
    known: dict[str, UnsupportedModel | None] = {}
    for name, layer, inputs in _calls(prepared):
        # Layers that are set alike and are given the same fail alike.
        shapes = [tuple(value.shape) for value in inputs]
        key = f"{layer!r} {shapes} {[value.requires_grad for value in layer.parameters()]}"
        if key not in known:
            known[key] = _failure(layer, inputs, graph_format)
        failure = known[key]
        if failure is not None:
            findings.append(_finding(name, type(layer).__name__, graph_format, str(failure)))
    return findings


def _failure(layer: nn.Module, inputs: Sequence[Tensor], graph_format: str) -> UnsupportedModel | None:
    try:
        FORMATS[graph_format].convert(trace_layer(layer, inputs, graph_format), type(layer).__name__)
    except UnsupportedModel as exc:
        return exc
    return None


def _calls(prepared: Prepared) -> list[tuple[str, nn.Module, tuple[Tensor, ...]]]:
    """Each layer without layers in it, and the tensors that it was given in a pass over the example batch."""
    calls: list[tuple[str, nn.Module, tuple[Tensor, ...]]] = []
    hooks = []
    for name, layer in prepared.module.named_modules():
        if not name or any(True for _ in layer.children()):
            continue

        def note(found: nn.Module, given: tuple[object, ...], name: str = name) -> None:
            if all(isinstance(value, Tensor) for value in given):
                tensors = tuple(value.detach().clone() for value in given if isinstance(value, Tensor))
                calls.append((name, found, tensors))

        hooks.append(layer.register_forward_pre_hook(note))
    x, _, mask = example_batch(prepared)
    try:
        with torch.no_grad():
            prepared.with_mask(mask)(x)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _finding(module: str, kind: str, graph_format: str, reason: str) -> Finding:
    found = OPERATOR.search(reason)
    return Finding(
        module=module, kind=kind, graph_format=graph_format, operator=found.group() if found else "", reason=reason
    )
