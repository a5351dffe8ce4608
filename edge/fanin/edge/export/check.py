"""Preflight: which part of a module has no form in which graph format, before anything is exported.

The module as a whole is put through what an export does, in memory. If that fails, its layers are put through it one
by one, with the inputs that they had and backwards too, so that the reason gets a name; and so is what a forward calls
between them. Each finding has an advice of its own.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn

from fanin.edge.export.app import App, check_recipe
from fanin.edge.export.formats import FORMATS
from fanin.edge.export.prepare import Prepared, prepare
from fanin.edge.export.preprocess import ENCODERS
from fanin.edge.export.quiet import quiet_torch
from fanin.edge.export.refusals import REPLACE, NoForm, Untraceable
from fanin.edge.export.tracing.calls import calls_between_layers
from fanin.edge.export.tracing.examples import check_kept, example_batch
from fanin.edge.export.tracing.trace import Traced, trace_layer
from fanin.edge.runtimes.models import PREPROCESS
from fanin.protos.errors import UnsupportedModel

RUNTIMES: Final = MappingProxyType({"onnx": ("onnxruntime",), "tflite": ("LiteRT", "tflite-runtime")})
"""The runtimes of each graph format, as people know them."""
LACKING: Final = "replace it: not even its forward has a form there, so freezing does not help"
FREEZE: Final = (
    "replace it, or let only learn what comes after it: its forward has a form there, its gradient has none "
    "(requires_grad_(False) on it and on all before it, or a recipe that trains 'head')"
)
MEND: Final = "mend what the reason names: the App's own code fails, or does not fit its own data"
REWRITE: Final = "replace what the reason names: what stands before the model travels as a graph too"
LOOK: Final = "each layer and each call has a form by itself: look at the loss, and at what the reason names"
INSTEAD: Final = MappingProxyType(
    {
        "bicubic": "mode 'bilinear' and 'nearest' have forms",
        "fft": "frames times a matrix of cosines and sines are the same spectrum, docs/edge.md",
        "grid_sampler": "Upsample and strided convolutions have forms",
    }
)
"""What does about the same and has a form in every format, by a part of the operator's name."""
OPERATOR: Final = re.compile(r"(?:aten|prims|torchvision)[.:]+\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A part of the module that a graph format has no form for, or that no graph can be made of (format "").

    ``module`` is its name in the App's module ("": that one itself), ``kind`` its class. ``call`` is the function that
    its forward calls between its layers; "" where the module is a layer, or where that could not be told. ``operator``
    is what is lacking ("": not told), ``reason`` the whole story, ``advice`` what to do.
    """

    module: str
    kind: str
    graph_format: str
    operator: str
    reason: str
    advice: str
    call: str = ""

    @property
    def runtimes(self) -> tuple[str, ...]:
        """Which runtimes cannot run it; none where that is no matter of a runtime."""
        return RUNTIMES[self.graph_format] if self.graph_format else ()


def check_app(app: App, formats: Sequence[str]) -> tuple[Finding, ...]:
    """What stands in the way of exporting the App in these formats; empty if nothing does.

    Raises UnsupportedModel for what is wrong in every format: dtypes, names, nothing to train.
    """
    check_recipe(app)
    try:
        prepared = prepare(app)
        check_kept(prepared)
        findings = [found for name in formats for found in _of_format(prepared, name)]
    except Untraceable as exc:
        kind = exc.kind or type(app.module).__name__
        return (_finding(exc.module, kind, "", exc.reason, exc.advice or MEND),)
    able = [name for name in formats if all(found.graph_format != name for found in findings)]
    other = f"; or leave {{}} out: --format {able[0]}" if able else ""
    return tuple(replace(found, advice=found.advice + other.format(" and ".join(found.runtimes))) for found in findings)


def _of_format(prepared: Prepared, name: str) -> list[Finding]:
    """What stands in the way of one format. Raises Untraceable for what is no matter of a format."""
    app, findings = prepared.app, []
    try:
        FORMATS[name].make(prepared)
    except UnsupportedModel as exc:
        whole = _finding("", type(app.module).__name__, name, str(exc), LOOK)
        if isinstance(exc, NoForm):
            whole = _finding(exc.module, exc.kind or whole.kind, name, exc.reason, exc.advice)
        elif isinstance(exc, Untraceable):
            raise
        findings += [*_failing_layers(prepared, name), *_failing_calls(prepared, name)] or [whole]
    if app.preprocess is not None:
        try:
            ENCODERS[name](app, f"{prepared.what}: the {PREPROCESS} graph")
        except UnsupportedModel as exc:
            findings.append(_finding(PREPROCESS, type(app.preprocess).__name__, name, str(exc), REWRITE))
    return findings


def _failing_layers(prepared: Prepared, graph_format: str) -> list[Finding]:
    findings = []
    known: dict[str, tuple[str, str]] = {}
    for name, layer, inputs in _calls(prepared):
        # Layers that are set alike and are given the same fail alike.
        key = f"{_key(layer, inputs)} {[value.requires_grad for value in layer.parameters()]}"
        if key not in known:
            known[key] = _failure(layer, inputs, graph_format, type(layer).__name__)
        reason, advice = known[key]
        if reason:
            findings.append(_finding(name, type(layer).__name__, graph_format, reason, advice))
    return findings


def _failing_calls(prepared: Prepared, graph_format: str) -> list[Finding]:
    """What is called between layers and fails by itself, and says by which operator: each function once a module."""
    x, _, mask = example_batch(prepared)
    found: dict[tuple[str, str], Finding] = {}
    known: dict[str, tuple[str, str]] = {}
    for call in calls_between_layers(prepared.with_mask(mask), x):
        key = _key(call.layer, call.inputs)
        if key not in known:
            known[key] = _failure(call.layer, call.inputs, graph_format, call.function)
        reason, advice = known[key]
        finding = _finding(call.module, call.kind, graph_format, reason, advice)
        if finding.operator:
            found.setdefault((call.module, call.function), replace(finding, call=call.function))
    return list(found.values())


def _key(layer: nn.Module, inputs: Sequence[Tensor]) -> str:
    return f"{layer!r} {[tuple(value.shape) for value in inputs]}"


def _failure(layer: nn.Module, inputs: Sequence[Tensor], graph_format: str, what: str) -> tuple[str, str]:
    """(why a layer has no form with its gradient, what to do about it); ("", "") if it has one."""
    convert = FORMATS[graph_format].convert
    try:
        convert(trace_layer(layer, inputs, graph_format, what), what)
    except UnsupportedModel as exc:
        reason = str(exc)
    else:
        return "", ""
    try:
        with torch.no_grad(), quiet_torch():
            program = torch.export.export(layer, tuple(inputs), strict=False)
        names = [f"in.{index}" for index in range(len(inputs))]
        num_said = len(program.graph_signature.user_outputs)
        outputs = [f"out.{index}" for index in range(num_said)]
        convert(Traced(program=program, examples=list(inputs), inputs=names, outputs=outputs), what)
    except (UnsupportedModel, RuntimeError, TypeError, ValueError):
        return reason, LACKING
    return reason, FREEZE


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


def _finding(module: str, kind: str, graph_format: str, reason: str, advice: str) -> Finding:
    found = OPERATOR.search(reason)
    operator = found.group() if found else ""
    instead = next((words for part, words in INSTEAD.items() if part in operator), "")
    return Finding(
        module=module,
        kind=kind,
        graph_format=graph_format,
        operator=operator,
        # What to do stands in the advice, which knows the layer.
        reason=reason.removesuffix(f"; {REPLACE}"),
        advice=f"{advice} ({instead})" if instead else advice,
    )
