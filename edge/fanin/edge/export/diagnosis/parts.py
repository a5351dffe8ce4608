"""The parts of an App that make an export fail: found after a failure, each with a name and a remedy.

If a format has no form of a graph, the steps of the export run on each single layer, forward and backward, with the
layer's inputs in the model. They also run on each function that a forward calls between its layers. A failure of a
later step, such as a comparison with torch, has the layer that its reason names.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils._pytree import TreeSpec, tree_unflatten

from fanin.edge.export.diagnosis.lines import first_line_of, is_apps, is_of
from fanin.edge.export.diagnosis.watched import Event, events_of
from fanin.edge.export.refusals import (
    LOSS,
    Finding,
    FormatFailure,
    NoForm,
    NoGradient,
    Place,
    Unconverted,
    Untraceable,
)
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
        "linalg": "compute a matrix that does not learn in __init__; orthogonal has a form with its "
        "orthogonal_map='matrix_exp', and torch.nn.utils.parametrize.remove_parametrizations leaves it out",
        "Boolean index": "index by numbers, which you compute once in __init__: mask.nonzero()[:, 0]",
    }
)
"""Replacements that have a form in every format, by a part of the operator's name, or of a reason without one."""
OPERATOR: Final = re.compile(r"(?:aten|prims|torchvision)[.:]+\w+|(?<=no form of )\w+[.:]+\w+")
NODE: Final = re.compile(r"Name:'([^'/]+)/")
"""onnxruntime's name of a node, which begins with that of its module."""
Trial = Callable[[nn.Module, Sequence[Tensor], str], object]
"""(layer, its inputs, its name in messages): raises an error if the layer has no form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The user's part in an export.

    Attributes:
        module: The module, with the names and classes that the user knows.
        loss: The loss.
        learns: Returns whether the output of the module has a gradient.
    """

    module: nn.Module
    loss: Callable[..., object]
    learns: Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """An App without a graph in a format, as the search for the reason needs it.

    Attributes:
        owner: The user's part.
        graph_format: The format.
        module: The module that was traced.
        run: Runs a pass of it on the example batch.
        gradient: Tests a layer with its gradient.
        forward: Tests a layer without its gradient.
    """

    owner: Owner
    graph_format: str
    module: nn.Module
    run: Callable[[], object]
    gradient: Trial
    forward: Trial


def failure_of_graphs(suspect: Suspect, exc: UnsupportedModel) -> FormatFailure:
    """Return the failure of a format that cannot express a graph.

    Raises:
        Untraceable: The error does not depend on the format.
    """
    if isinstance(exc, Untraceable) and not isinstance(exc, NoForm):
        raise exc
    reason, rows = str(exc), _failing_parts(suspect)
    if isinstance(exc, NoForm):
        return FormatFailure(
            reason=reason,
            code=exc.code,
            findings=tuple(rows or [finding_of(suspect.owner, suspect.graph_format, exc, LOOK)]),
        )
    cause = exc.reason if isinstance(exc, Unconverted) else reason
    row = _finding(_named_in(suspect.owner.module, reason), suspect.graph_format, cause, LOOK)
    rows = rows or [replace(row, advice=OWN_FORM) if row.operator else row]
    if isinstance(exc, Unconverted):
        places = ", ".join(str(Place(module=part.module, kind=part.kind, line=part.line)) for part in rows)
        reason = f"{exc.reason}; {places}: {rows[0].advice}"
    return FormatFailure(reason=reason, code=exc.code, findings=tuple(rows))


def failure_of_preprocess(place: Place, graph_format: str, exc: UnsupportedModel) -> FormatFailure:
    """Return the failure of a format that cannot express ``preprocess``, the module at this place."""
    reason, advice = (exc.reason, exc.advice) if isinstance(exc, Untraceable) else (str(exc), "")
    row = _finding(place, graph_format, exc.reason if isinstance(exc, Unconverted) else reason, advice or REWRITE)
    return FormatFailure(reason=str(exc), code=exc.code, findings=(row,))


def failure_of_step(
    what: str, module: nn.Module, failed: tuple[str, str], exc: InvalidInput | ValueError
) -> FormatFailure:
    """Return the failure of a later step, whose error has the remedy.

    Args:
        what: The App, for the message.
        module: Its module.
        failed: The graph format, and the step: ``RUN`` or ``INT8``.
        exc: The error.
    """
    reason = str(exc) if isinstance(exc, UnsupportedModel) else f"{what}: {exc}"
    place, (graph_format, step) = _named_in(module, reason), failed
    row = Finding(
        module=place.module,
        kind=place.kind,
        graph_format=graph_format,
        operator="",
        reason=reason,
        advice="",
        step=step,
    )
    return FormatFailure(reason=reason, code=exc.code if isinstance(exc, InvalidInput) else "FN-0784", findings=(row,))


def _named_in(module: nn.Module, reason: str) -> Place:
    """Return the module of the node that an error of onnxruntime names, or the App's module."""
    node = NODE.search(reason)
    layers = dict(module.named_modules())
    name = node[1] if node and node[1] in layers else ""
    return Place(module=name, kind=type(layers[name]).__name__)


def finding_of(owner: Owner, graph_format: str, exc: Untraceable, advice: str) -> Finding:
    """Return the finding of an error, with this advice if it has none."""
    place, advice = exc.place, exc.advice or advice
    if is_of(exc, owner.loss) or (isinstance(exc, NoGradient) and owner.learns()):
        place = Place(kind=LOSS, line=place.line or first_line_of(owner.loss))
    elif not place.kind:
        place = replace(place, kind=type(owner.module).__name__)
    return _finding(place, graph_format, exc.reason, advice)


def _failing_parts(suspect: Suspect) -> list[Finding]:
    """Return a finding for each layer and each call between layers that fails alone."""
    events = events_of(suspect.module, suspect.run)
    layers, calls = list(_failing_layers(suspect, events)), _failing_calls(suspect, events)
    # The first call of a layer of the App's own that fails has the line of its operator.
    lines = {call.module: call.line for call in reversed(calls)}
    names = {layer.module for layer in layers}
    return [
        *(replace(layer, line=lines.get(layer.module) or layer.line) for layer in layers),
        *(call for call in calls if call.module not in names),
    ]


def _failing_layers(suspect: Suspect, events: Sequence[Event]) -> Iterator[Finding]:
    """Yield a finding for each layer without layers inside that received only tensors and fails alone."""
    known: dict[str, tuple[str, str]] = {}
    for event in events:
        layer, inputs = event.layer, _tensors(event.inputs or ())
        if event.inputs is None or layer is None or not event.place.module or any(True for _ in layer.children()):
            continue
        if len(inputs) < len(event.inputs):
            continue
        # Layers with equal settings and equal input shapes fail in the same way.
        key = f"{_key(layer, inputs)} {[value.requires_grad for value in layer.parameters()]}"
        if key not in known:
            known[key] = _failure(suspect, layer, inputs, type(layer).__name__)
        reason, advice = known[key]
        if reason:
            yield _finding(replace(event.place, kind=type(layer).__name__), suspect.graph_format, reason, advice)


class _FunctionModule(nn.Module):
    """A function as a module. Its tensor arguments are inputs, and its other arguments are constants."""

    def __init__(self, function: Callable[..., object], arguments: Sequence[object], form: TreeSpec) -> None:
        super().__init__()
        self._function, self._arguments, self._form = function, arguments, form

    def extra_repr(self) -> str:
        """Represent the call: two calls of one function with equal arguments have equal representations."""
        return f"{self._function}, {self._arguments}"

    def forward(self, *inputs: Tensor) -> object:
        """Call the function."""
        tensors = iter(inputs)
        filled = [next(tensors) if value is Tensor else value for value in self._arguments]
        args, kwargs = tree_unflatten(filled, self._form)
        return self._function(*args, **kwargs)


def _failing_calls(suspect: Suspect, events: Sequence[Event]) -> list[Finding]:
    """Return a finding for each function between layers that fails alone and names an operator.

    Only functions that map floats to floats are tested. A layer without layers inside is tested as a unit. Every other
    function belongs to the forward of the module around it. The calls of a layer of the App's own are tested, too: they
    have its lines. A function that returns complex numbers cannot be tested by itself: without any other, the first one
    is a finding.
    """
    findings: dict[tuple[str, str], Finding] = {}
    known: dict[str, tuple[str, str]] = {}
    is_complex: list[Finding] = []
    for event in events:
        inputs, layer, function = _tensors(event.received), event.layer, event.function
        first = event.returned[0] if event.returned else None
        if layer is None or function is None or event.form is None:
            continue
        is_forward = layer is suspect.module or any(True for _ in layer.children()) or is_apps(layer)
        has_floats = any(value.is_floating_point() for value in inputs)
        if not (is_forward and has_floats and isinstance(first, Tensor)):
            continue
        place, name = replace(event.place, kind=type(layer).__name__), resolve_name(function) or str(function)
        if first.is_complex():
            reason = f"{name} returns complex numbers, expected real ones"
            row = replace(_finding(place, suspect.graph_format, reason, ""), operator=name, advice=REAL, call=name)
            is_complex.append(row)
        elif first.is_floating_point():
            arguments = [Tensor if isinstance(value, Tensor) else value for value in event.received]
            call = _FunctionModule(function, arguments, event.form)
            key = _key(call, inputs)
            if key not in known:
                known[key] = _failure(suspect, call, inputs, name)
            reason, advice = known[key]
            row = replace(_finding(place, suspect.graph_format, reason, advice), call=name)
            if row.operator:
                findings.setdefault((row.module, name), row)
    return list(findings.values()) or is_complex[:1]


def _tensors(values: Sequence[object]) -> list[Tensor]:
    return [value.detach() for value in values if isinstance(value, Tensor)]


def _key(layer: nn.Module, inputs: Sequence[Tensor]) -> str:
    return f"{layer!r} {[tuple(value.shape) for value in inputs]}"


def _failure(suspect: Suspect, layer: nn.Module, inputs: Sequence[Tensor], what: str) -> tuple[str, str]:
    """Return why a layer has no form with its gradient, and the remedy; two empty strings if it has one.

    Args:
        suspect: The App.
        layer: The layer.
        inputs: Its inputs in the model.
        what: The name of the layer in messages.
    """
    try:
        suspect.gradient(layer, inputs, what)
    except UnsupportedModel as exc:
        reason = exc.reason if isinstance(exc, Unconverted) else str(exc)
    else:
        return "", ""
    try:
        suspect.forward(layer, inputs, what)
    except (UnsupportedModel, RuntimeError, TypeError, ValueError):
        return reason, LACKING
    return reason, FREEZE


def _finding(place: Place, graph_format: str, reason: str, advice: str) -> Finding:
    """Return a finding. Its advice replaces the general remedy, because it depends on the layer."""
    match = OPERATOR.search(reason)
    operator = match.group() if match else ""
    replacement = next((words for part, words in INSTEAD.items() if part in (operator or reason)), "")
    return Finding(
        module=place.module,
        kind=place.kind,
        graph_format=graph_format,
        operator=operator,
        reason=reason,
        advice=f"{advice} ({replacement})" if replacement else advice,
        line=place.line,
    )
