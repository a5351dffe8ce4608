"""An App ready for tracing: its arguments are valid, and it passes the checks in eager torch that need no graph.

The errors name the module and the line. A trace does not find these faults, or only later.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from fanin.edge.export.app.app import App
from fanin.edge.export.app.calls import check_parameters, guarded, versions
from fanin.edge.export.app.inputs.checks import check_target_shape
from fanin.edge.export.app.inputs.named import call_module, num_samples, rows_of
from fanin.edge.export.app.inputs.outputs import Output, of_rows
from fanin.edge.export.app.losses import BatchLoss, function_of, values_of
from fanin.edge.export.app.optimizers.fields import are_names
from fanin.edge.export.formats.graphs import FORMATS
from fanin.edge.export.graph.examples import (
    ExampleBatch,
    check_output,
    checked_output,
    example_batch,
    loss_targets,
    loss_values_of,
    other_batch,
)
from fanin.edge.export.graph.forward import trace_evaluate, trace_infer
from fanin.edge.export.graph.train import trace_train
from fanin.edge.export.module.draws import ended, recorded, refused
from fanin.edge.export.module.kernels import plain_kernels
from fanin.edge.export.module.lengths import check_targets, each_length
from fanin.edge.export.module.prepare import Prepared, prepare
from fanin.edge.export.refusals import LOSS, NOWHERE, Place, Untraceable
from fanin.edge.export.verification.batch_loss import check_batch_loss
from fanin.edge.export.verification.norm_rows import with_rows
from fanin.edge.export.verification.padding import notes_on_encoders, notes_on_padding
from fanin.edge.export.verification.pure import OF_BATCH, are_close, check_samples, check_state
from fanin.edge.runtimes.randomness import MAX_RANDOM_BYTES, RandomPort
from fanin.protos.errors import InvalidInput, UnsupportedModel
from fanin.protos.numbers import is_number

ALMOST_ONE: Final = 1.0 - 2.0**-24
"""The largest uniform value."""


def with_draws(prepared: Prepared) -> Prepared:
    """Check the train step for each length and batch size of an App, and note its draws. Raises UnsupportedModel."""
    check_targets(prepared)
    prepared = with_rows(prepared)
    lengths, size = prepared.app.lengths, prepared.app.batch_size
    draws = {(0, size): check_kept(prepared)}
    if lengths is not None:
        # With its longest length alone, the App has the same data.
        draws[lengths.longest, size] = draws[0, size]
    for sized in map(prepared.for_batches, (size, *prepared.app.other_batch_sizes)):
        for _, single in each_length(sized):
            key = (single.length, single.app.batch_size)
            if key not in draws:
                draws[key] = check_kept(single)
    return replace(prepared, all_draws=draws)


def check_kept(prepared: Prepared) -> tuple[RandomPort, ...]:
    """Run one training pass and check that it changes neither buffers nor parameters.

    Returns:
        The random numbers that the pass draws, in order.

    Raises:
        UnsupportedModel: A buffer or a parameter changes, in place or by assignment. Or the loss or an output in
            evaluation is not finite, or the pass draws more than 16 MB of random numbers.
    """
    app, module = prepared.app, prepared.module
    before = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
    before_parameters = versions(module)
    inputs, y, mask = example_batch(prepared)
    draws: list[RandomPort] = []

    def run() -> Output:
        with prepared.norms(mask):
            return guarded(f"{prepared.what}: the train step", module, partial(checked_output, app, module, inputs))

    with torch.no_grad(), plain_kernels():
        with recorded(draws, MAX_RANDOM_BYTES):
            output = run()
        if (end := ended(draws, MAX_RANDOM_BYTES)) is not None:
            with end:
                run()
        with recorded(draws, MAX_RANDOM_BYTES):
            _check_loss(prepared, output, (inputs, y, mask))
        _check_calibrated(prepared)
        check_parameters(f"App {app.name}", module, before_parameters, run)
        after = dict(module.named_buffers())
        changed = sorted(name for name, old in before.items() if _differs(*old, after.get(name)))
        if changed and not _are_caches(prepared, changed, run):
            from fanin.edge.export.diagnosis.watched import place_of_change

            place = place_of_change(module, changed[0], run)
            raise Untraceable(
                f"App {app.name}: {place} changes its buffers {changed} in training, but a graph keeps no state "
                "between steps",
                "compute them from the inputs of each step, or freeze that part with .eval()",
                place,
                code="FN-0765",
            )
    return tuple(draws)


def _are_caches(prepared: Prepared, names: Sequence[str], run: Callable[[], object]) -> bool:
    """Return whether a pass has filled buffers that further passes do not write, with the same values for any batch."""
    versions_before = [prepared.module.get_buffer(name)._version for name in names]
    run()
    written = [prepared.module.get_buffer(name) for name in names]
    fresh, (inputs, *_) = copy.deepcopy(prepared.eager), other_batch(prepared, example_batch(prepared))
    with recorded([], MAX_RANDOM_BYTES):
        prepared.app.call(fresh, inputs)
    return all(
        value._version == version and torch.equal(fresh.get_buffer(name), value)
        for name, value, version in zip(names, written, versions_before, strict=True)
    )


def _check_loss(prepared: Prepared, output: Output, examples: ExampleBatch) -> None:
    """Raise Untraceable for a loss that fails, or that is not finite."""
    app, (inputs, y, mask) = prepared.app, examples
    losses = loss_values_of(prepared, output, y, mask)
    if not bool(losses.isfinite().all()):
        seen = [output] if isinstance(output, Tensor) else output.values()
        is_finite = all(bool(value.isfinite().all()) for value in seen)
        from fanin.edge.export.diagnosis.lines import first_line_of

        cause, place = "the module's output is finite", Place(kind=LOSS, line=first_line_of(function_of(app.loss)))
        if not is_finite:
            from fanin.edge.export.diagnosis.watched import first_not_finite

            cause, place = first_not_finite(prepared.module, partial(call_module, prepared.module, inputs)), NOWHERE
        raise Untraceable(
            f"App {app.name}: the loss is not finite on the calibration data; {cause}",
            "hide a class by a large negative number (masked_fill with -1e9), not by -inf, and keep outputs finite",
            place,
            code="FN-0781",
        )


def _check_calibrated(prepared: Prepared) -> None:
    """Raise Untraceable for an output of the module that is not finite on the calibration data of ``infer``."""
    app, module = prepared.app, copy.deepcopy(prepared.eager).eval()
    size = app.batch_size
    stop = num_samples(app.inputs) - size
    # A module may accept batches of one size only, so the last one overlaps.
    starts = [*range(0, stop, size), stop] if stop >= 0 else []
    for inputs in [rows_of(app.inputs, slice(start, start + size)) for start in starts] or [app.examples(size)]:
        try:
            with torch.no_grad(), plain_kernels():
                output = guarded(prepared.what, module, partial(app.call, module, inputs))
                logits = app.predicted(check_output(app, output))
        except UnsupportedModel:
            return  # the trace reports it
        if not bool(logits.isfinite().all()):
            from fanin.edge.export.diagnosis.watched import KEEP_FINITE, first_not_finite

            where = first_not_finite(module, partial(call_module, module, inputs))
            raise Untraceable(
                f"App {app.name}: the module's output in evaluation is not finite on the calibration data; {where}",
                KEEP_FINITE,
                code="FN-0781",
            )


def check_pure(prepared: Prepared) -> None:
    """Check that a pass depends only on its batch, and each sample only on itself. A trace does not show this.

    Raises:
        Untraceable: A pass uses more than its batch, the parameters and torch's draws, or the output or the loss of a
            sample depends on other samples.
    """
    inputs, y, mask = example_batch(prepared)
    app, evaluated = prepared.app, copy.deepcopy(prepared.eager).eval()
    y = loss_targets(y)
    drawn: list[RandomPort] = []

    def passed() -> object:
        with recorded([]), prepared.norms(mask):
            output = check_output(app, app.call(prepared.module, inputs))
            return output, values_of(app.loss, output, y, mask)

    def output_of(rows: slice, chance: float | None = 0.5, chances: list[float] | None = None) -> Output:
        with refused(chance, chances):
            return check_output(app, app.call(evaluated, rows_of(inputs, rows)))

    def losses_of(rows: slice) -> Tensor:
        with recorded(drawn):
            return app.loss(of_rows(output_of(slice(None)), rows), y[rows])

    def check() -> None:
        check_state(f"{prepared.what}: the train step", prepared.module, function_of(app.loss), passed)
        chances: list[float] = []
        output_of(slice(None), 0.0, chances)
        if chances and not are_close(output_of(slice(None), 0.0), output_of(slice(None), ALMOST_ONE)):
            output_of(slice(None), None)
        # Rounded activations may be rounded another way by sums in another order.
        if not app.recipe.quantization_aware:
            check_samples(f"{prepared.what}: the output of a sample", evaluated, output_of, len(y))
        if isinstance(app.loss, BatchLoss):
            check_batch_loss(prepared, app.loss, output_of(slice(None)), y)
            return
        losses_of(slice(None))
        if not drawn:
            check_samples(f"{prepared.what}: the loss of a sample", evaluated, losses_of, len(y), OF_BATCH)

    with torch.no_grad(), plain_kernels():
        guarded(prepared.what, evaluated, check)


def _differs(old: Tensor, version: int, new: Tensor | None) -> bool:
    """Return whether a buffer has changed. A buffer that is recreated with equal values has not."""
    if new is old:
        return old._version != version
    return new is not None and not torch.equal(old, new)


def check_arguments(what: str, app: object, formats: object, max_drop: object) -> None:
    """Raise InvalidInput unless these are an App, one or more formats, and a limit or None."""
    if not isinstance(app, App):
        raise InvalidInput(
            f"{what}: got {type(app).__name__}, expected an App; load one from a file by load_app(path)", code="FN-0704"
        )
    if not are_names(formats) or not formats or {*formats} - {*FORMATS}:
        raise InvalidInput(
            f"{what}: got formats {formats!r}, expected a list of one or more of {sorted(FORMATS)}", code="FN-0708"
        )
    if max_drop is not None and not (is_number(max_drop) and max_drop >= 0.0):
        raise InvalidInput(
            f"{what}: got max_drop {max_drop!r} for the cost of int8, expected a number of at least 0", code="FN-0709"
        )


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
                raise UnsupportedModel(
                    f"{exc} (at {app.created_at})" if app.created_at else str(exc), code=exc.code
                ) from exc
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
    return replace(prepared, notes=(*prepared.notes, *notes_on_padding(prepared), *notes_on_encoders(prepared)))
