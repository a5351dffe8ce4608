"""The parts of an App that make an export fail: found after a failure, each with a name and a remedy.

If a format has no form of a graph, the steps of the export run on each single layer, forward and backward, with the
layer's inputs in the model. They also run on each function that a forward calls between its layers. A failure of a
later step, such as a comparison with torch, has the layer that its reason names.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn

from fanin.edge.export.app import App
from fanin.edge.export.diagnosis.calls import FunctionCall, calls_between_layers
from fanin.edge.export.diagnosis.layers import trace_layer
from fanin.edge.export.formats import FORMATS
from fanin.edge.export.inputs.named import call_module
from fanin.edge.export.modules.gradients import output_learns
from fanin.edge.export.prepare import Prepared
from fanin.edge.export.preprocess import encode_preprocess
from fanin.edge.export.quiet import quiet_torch
from fanin.edge.export.refusals import (
    LOSS,
    REPLACE,
    NoForm,
    NoGradient,
    Untraceable,
    first_line_of,
    is_of,
    running_line,
)
from fanin.edge.export.tracing.examples import example_batch
from fanin.edge.export.tracing.traced import Traced
from fanin.edge.runtimes.available import runtimes_of
from fanin.edge.runtimes.models import PREPROCESS
from fanin.protos.errors import InvalidInput, UnsupportedModel

LACKING: Final = (
    "replace it, or give the App a form of it (decompositions, docs/howto/operators.md): not even its forward has one "
    "in this format, so freezing does not help"
)
FREEZE: Final = (
    "replace it, or train only the layers after it: its forward has a form in this format, its gradient has none "
    "(requires_grad_(False) on it and on all layers before it, or a recipe that trains 'head'); or give the App a form "
    "of the gradient's operator (decompositions, docs/howto/operators.md)"
)
REAL: Final = (
    "compute with real numbers, because this format lacks forms of complex ones: frames times a matrix of cosines and "
    "sines are the same spectrum, docs/howto/recipe.md"
)
REWRITE: Final = "replace the part that the reason names: preprocess is exported as a graph, too"
LOOK: Final = "each layer and each call has a form by itself: check the loss and the part that the reason names"
OWN_FORM: Final = (
    "no layer calls this operator by itself: the code of the App's forward or loss does. Replace it there, or give the "
    "App a form of it (decompositions, docs/howto/operators.md)"
)
INSTEAD: Final = MappingProxyType(
    {
        "fft": "frames times a matrix of cosines and sines are the same spectrum, docs/howto/recipe.md",
        "Boolean index": "index by numbers, which you compute once in __init__: mask.nonzero()[:, 0]",
    }
)
"""Replacements that have a form in every format, by a part of the operator's name, or of a reason without one."""
OPERATOR: Final = re.compile(r"(?:aten|prims|torchvision)[.:]+\w+|(?<=no form of )\w+[.:]+\w+")
NODE: Final = re.compile(r"Name:'([^'/]+)/")
"""onnxruntime's name of a node, which begins with that of its module."""


FORM: Final = "form"
RUN: Final = "run"
INT8: Final = "int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A part of the module that cannot be exported.

    Args:
        module: Name of the part in the App's module; "" is the module itself.
        kind: Class of that part; ``LOSS`` if the part is the loss of the App.
        graph_format: The format that lacks a form of it; "" if no graph can be traced at all.
        operator: The operator that has no form; "" if unknown.
        reason: The full error message.
        advice: The remedy; "" if the reason has it.
        call: The function that the forward of ``module`` calls between its layers; "" for a layer, or if unknown.
        line: ``file:line`` of the App's code that calls the operator or the layer; "" if unknown.
        step: The step of the export that fails: ``FORM`` if there is no graph, ``RUN`` if a runtime does not run the
            graph or does not compute what torch computes, ``INT8`` if int8 costs too much.
    """

    module: str
    kind: str
    graph_format: str
    operator: str
    reason: str
    advice: str
    call: str = ""
    line: str = ""
    step: str = FORM

    @property
    def runtimes(self) -> tuple[str, ...]:
        """The runtimes that cannot run the part; empty if the problem does not depend on a runtime."""
        return runtimes_of(self.graph_format) if self.graph_format else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFailure:
    """The failure of an export in one format.

    Attributes:
        reason: The error message of the export, with the parts.
        findings: One or more parts that make it fail.
    """

    reason: str
    findings: tuple[Finding, ...]


def failure_of_graphs(prepared: Prepared, graph_format: str, exc: UnsupportedModel) -> FormatFailure:
    """Return the failure of a format that cannot express a graph.

    Raises:
        Untraceable: The error does not depend on the format.
    """
    if isinstance(exc, Untraceable) and not isinstance(exc, NoForm):
        raise exc
    app, reason, rows = prepared.app, str(exc), _failing_parts(prepared, graph_format)
    if isinstance(exc, NoForm):
        rows = rows or [finding_of(app, graph_format, exc, LOOK)]
    else:
        module, kind = _named_in(prepared, reason)
        row = _finding(module, kind, graph_format, reason, LOOK)
        rows = rows or [replace(row, advice=OWN_FORM) if row.operator else row]
        if reason.endswith(REPLACE):
            names = ", ".join(
                f"module {part.module or 'itself'} ({part.kind}){f' at {part.line}' if part.line else ''}"
                for part in rows
            )
            reason = f"{reason.removesuffix(REPLACE)}{names}: {rows[0].advice}"
    try:
        if app.preprocess is not None:
            encode_preprocess(app, graph_format, prepared.what)
    except UnsupportedModel as exc_of_preprocess:
        rows = [*rows, *failure_of_preprocess(app, graph_format, exc_of_preprocess).findings]
    return FormatFailure(reason=reason, findings=tuple(rows))


def failure_of_preprocess(app: App, graph_format: str, exc: UnsupportedModel) -> FormatFailure:
    """Return the failure of a format that cannot express ``preprocess``."""
    reason, advice = (exc.reason, exc.advice) if isinstance(exc, Untraceable) else (str(exc), REWRITE)
    row = _finding(PREPROCESS, type(app.preprocess).__name__, graph_format, reason, advice or REWRITE)
    return FormatFailure(reason=str(exc), findings=(row,))


def failure_of_step(prepared: Prepared, graph_format: str, exc: InvalidInput | ValueError, step: str) -> FormatFailure:
    """Return the failure of a later step, ``RUN`` or ``INT8``, whose error has the remedy."""
    reason = str(exc) if isinstance(exc, UnsupportedModel) else f"{prepared.what}: {exc}"
    module, kind = _named_in(prepared, reason)
    row = Finding(module=module, kind=kind, graph_format=graph_format, operator="", reason=reason, advice="", step=step)
    return FormatFailure(reason=reason, findings=(row,))


def _named_in(prepared: Prepared, reason: str) -> tuple[str, str]:
    """Return name and class of the module of the node that an error of onnxruntime names, or of the App's module."""
    node = NODE.search(reason)
    layers = dict(prepared.eager.named_modules())
    module = node[1] if node and node[1] in layers else ""
    return module, type(layers[module]).__name__


def finding_of(app: App, graph_format: str, exc: Untraceable, advice: str) -> Finding:
    """Return the finding of an error, with this advice if it has none."""
    if is_of(exc, app.loss) or (isinstance(exc, NoGradient) and output_learns(app.module, _output_of(app))):
        finding = _finding("", LOSS, graph_format, exc.reason, exc.advice or advice)
        return replace(finding, line=exc.place.line or first_line_of(app.loss))
    kind = exc.place.kind or type(app.module).__name__
    finding = _finding(exc.place.module, kind, graph_format, exc.reason, exc.advice or advice)
    return replace(finding, line=exc.place.line)


def _output_of(app: App) -> Callable[[nn.Module], object]:
    """Return a function of a module that returns the output of the App for the loss."""
    return lambda module: app.call(module, app.examples(app.batch_size))


def _failing_parts(prepared: Prepared, graph_format: str) -> list[Finding]:
    """Return a finding for each layer and each call between layers that fails alone."""
    layers, calls = _failing_layers(prepared, graph_format), _failing_calls(prepared, graph_format)
    # The first call of a layer of the App's own that fails has the line of its operator.
    lines = {call.module: call.line for call in reversed(calls)}
    names = {layer.module for layer in layers}
    return [
        *(replace(layer, line=lines.get(layer.module) or layer.line) for layer in layers),
        *(call for call in calls if call.module not in names),
    ]


def _failing_layers(prepared: Prepared, graph_format: str) -> list[Finding]:
    findings = []
    known: dict[str, tuple[str, str]] = {}
    for name, layer, inputs, line in _calls(prepared):
        # Layers with equal settings and equal input shapes fail in the same way.
        key = f"{_key(layer, inputs)} {[value.requires_grad for value in layer.parameters()]}"
        if key not in known:
            known[key] = _failure(prepared, layer, inputs, (graph_format, type(layer).__name__))
        reason, advice = known[key]
        if reason:
            finding = _finding(name, type(layer).__name__, graph_format, reason, advice)
            findings.append(replace(finding, line=line))
    return findings


def _failing_calls(prepared: Prepared, graph_format: str) -> list[Finding]:
    """Return a finding for each function between layers that fails alone and names an operator."""
    inputs, _, mask = example_batch(prepared)
    findings: dict[tuple[str, str], Finding] = {}
    known: dict[str, tuple[str, str]] = {}
    calls = calls_between_layers(prepared.with_mask(mask), inputs)
    for call in calls:
        if call.is_complex:
            continue
        key = _key(call.layer, call.inputs)
        if key not in known:
            known[key] = _failure(prepared, call.layer, call.inputs, (graph_format, call.function))
        reason, advice = known[key]
        finding = _finding(call.module, call.kind, graph_format, reason, advice)
        if finding.operator:
            findings.setdefault((call.module, call.function), replace(finding, call=call.function, line=call.line))
    return list(findings.values()) or _complex_calls(calls, graph_format)


def _complex_calls(calls: Sequence[FunctionCall], graph_format: str) -> list[Finding]:
    """Return a finding for the first function that returns complex numbers, which cannot be tested by themselves."""
    return [
        Finding(
            module=call.module,
            kind=call.kind,
            graph_format=graph_format,
            operator=call.function,
            reason=f"{call.function} returns complex numbers, expected real ones",
            advice=REAL,
            call=call.function,
            line=call.line,
        )
        for call in calls
        if call.is_complex
    ][:1]


def _key(layer: nn.Module, inputs: Sequence[Tensor]) -> str:
    return f"{layer!r} {[tuple(value.shape) for value in inputs]}"


def _failure(prepared: Prepared, layer: nn.Module, inputs: Sequence[Tensor], where: tuple[str, str]) -> tuple[str, str]:
    """Return why a layer has no form with its gradient, and the remedy; two empty strings if it has one.

    Args:
        prepared: The App.
        layer: The layer.
        inputs: Its inputs in the model.
        where: The graph format, and the name of the layer in messages.
    """
    graph_format, what = where
    row = FORMATS[graph_format]
    try:
        row.encode(what, trace_layer(layer, inputs, row.forms, what, prepared.app.decompositions), what)
    except UnsupportedModel as exc:
        reason = str(exc)
    else:
        return "", ""
    try:
        with torch.no_grad(), quiet_torch():
            program = torch.export.export(layer, tuple(inputs), strict=False)
            if prepared.app.decompositions:
                program = program.run_decompositions(row.forms.for_inference(prepared.app.decompositions))
        names = [f"in.{index}" for index in range(len(inputs))]
        outputs = [f"out.{index}" for index in range(len(program.graph_signature.user_outputs))]
        row.encode(what, Traced(program=program, examples=list(inputs), inputs=names, outputs=outputs), what)
    except (UnsupportedModel, RuntimeError, TypeError, ValueError):
        return reason, LACKING
    return reason, FREEZE


def _calls(prepared: Prepared) -> list[tuple[str, nn.Module, tuple[Tensor, ...], str]]:
    """Return each layer without layers inside, the tensors that it received for the example batch, and the line."""
    calls: list[tuple[str, nn.Module, tuple[Tensor, ...], str]] = []
    hooks = []
    for name, layer in prepared.module.named_modules():
        if not name or any(True for _ in layer.children()):
            continue

        def record(layer: nn.Module, inputs: tuple[object, ...], name: str = name) -> None:
            if all(isinstance(value, Tensor) for value in inputs):
                tensors = tuple(value.detach().clone() for value in inputs if isinstance(value, Tensor))
                calls.append((name, layer, tensors, running_line()))

        hooks.append(layer.register_forward_pre_hook(record))
    inputs, _, mask = example_batch(prepared)
    try:
        with torch.no_grad():
            call_module(prepared.with_mask(mask), inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _finding(module: str, kind: str, graph_format: str, reason: str, advice: str) -> Finding:
    match = OPERATOR.search(reason)
    operator = match.group() if match else ""
    replacement = next((words for part, words in INSTEAD.items() if part in (operator or reason)), "")
    return Finding(
        module=module,
        kind=kind,
        graph_format=graph_format,
        operator=operator,
        # The advice replaces the general remedy, because it depends on the layer.
        reason=reason.removesuffix(f"; {REPLACE}"),
        advice=f"{advice} ({replacement})" if replacement else advice,
    )
