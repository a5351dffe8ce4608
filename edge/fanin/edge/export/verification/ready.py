"""An App ready for tracing: its arguments are valid, and it passes the checks that need no graph."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fanin.edge.export.app.app import App
from fanin.edge.export.app.inputs.checks import check_target_shape
from fanin.edge.export.app.optimizers.fields import are_names
from fanin.edge.export.formats.graphs import FORMATS
from fanin.edge.export.graph.forward import trace_evaluate, trace_infer
from fanin.edge.export.graph.train import trace_train
from fanin.edge.export.module.prepare import Prepared, prepare
from fanin.edge.export.verification.padding import notes_on_padding
from fanin.edge.export.verification.passes import check_pure, with_draws
from fanin.protos.errors import InvalidInput, UnsupportedModel
from fanin.protos.numbers import is_number


def check_arguments(what: str, app: object, formats: object, max_drop: object) -> None:
    """Raise InvalidInput unless these are an App, one or more formats, and a limit or None."""
    if not isinstance(app, App):
        raise InvalidInput(f"{what}: got {type(app).__name__}, expected an App; load one from a file by load_app(path)")
    if not are_names(formats) or not formats or {*formats} - {*FORMATS}:
        raise InvalidInput(f"{what}: got formats {formats!r}, expected a list of one or more of {sorted(FORMATS)}")
    if max_drop is not None and not (is_number(max_drop) and max_drop >= 0.0):
        raise InvalidInput(f"{what}: got max_drop {max_drop!r} for the cost of int8, expected a number of at least 0")


def checked(app: App, formats: Sequence[str]) -> Prepared:
    """Return an App ready for tracing, with the draws of its train step, after the checks that need no graph.

    Raises:
        UnsupportedModel: The App has an error that affects every format. The message names the module and the line, if
            they are known.
    """
    prepared = prepare(app)
    targets = {"targets": app.targets, "validation data: y": None if app.validation is None else app.held_out[1]}
    for name, y in targets.items():
        if isinstance(y, Tensor):
            try:
                check_target_shape(f"App {app.name}: {name}", y, app.target_shape, app.num_classes)
            except UnsupportedModel as exc:
                raise UnsupportedModel(f"{exc} (at {app.created_at})" if app.created_at else str(exc)) from exc
    prepared = with_draws(prepared)
    try:
        check_pure(prepared)
    except UnsupportedModel:
        # The tracer may know more: it names the operator that reads a value or draws.
        row = FORMATS[formats[0]]
        trace_train(prepared, row.forms)
        trace_evaluate(prepared, row.forms)
        trace_infer(prepared, row.num_samples)
        raise
    return replace(prepared, notes=(*prepared.notes, *notes_on_padding(prepared)))
