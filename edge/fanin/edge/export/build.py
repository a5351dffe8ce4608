"""The build of a Bundle from an App: all steps of an export except for the signature.

1. Prepare the module, and run the checks that need no graph (``verification.ready.checked``).
2. In each graph format trace, convert, quantize and find the slots (``formats``). Write the manifest.
3. Verify the graphs against eager torch (``verify``).
4. Measure int8 against float on the validation data, or compare them on calibration data.

``sign.export`` signs and writes the result. ``check.check_app`` reports the failures.
"""

import logging
import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fanin.edge.bundles.bundle import Bundle, open_folder, write_bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.manifest import LocalParameters, Manifest
from fanin.edge.bundles.manifest_json import dump_manifest
from fanin.edge.bundles.slots import Slot
from fanin.edge.export.app.app import App
from fanin.edge.export.app.inputs.named import num_samples, numpy_inputs, rows_of
from fanin.edge.export.app.inputs.sequences import at_length, groups_of
from fanin.edge.export.app.losses import squared_error
from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.export.diagnosis.parts import (
    INT8,
    RUN,
    FormatFailure,
    failure_of_graphs,
    failure_of_preprocess,
    failure_of_step,
)
from fanin.edge.export.formats.apart import apart
from fanin.edge.export.formats.graphs import FORMATS, Graphs, graphs_of
from fanin.edge.export.formats.preprocess import with_preprocess
from fanin.edge.export.graph.examples import example_batch, loss_targets
from fanin.edge.export.graph.vocabulary import count_tokens
from fanin.edge.export.module.prepare import Prepared
from fanin.edge.export.verification.constant import constant_loss
from fanin.edge.export.verification.ready import checked
from fanin.edge.export.verification.verify import verify, verify_train
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import Inputs, PaddedBatch, Runtime
from fanin.edge.runtimes.measure import compare, measure
from fanin.edge.runtimes.quality import Agreement, Quality, check_drop
from fanin.edge.runtimes.randomness import RandomPort
from fanin.edge.signatures import Signature
from fanin.edge.tensors import Array, TensorTable, encode_parameters
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidBundle, InvalidVersion, UnsupportedModel

LOG = logging.getLogger("fanin.edge.export")
"""Logs each step of an export at INFO: an export may take minutes."""
PARAMETERS: Final = "parameters"
LOCAL: Final = "local"
"""Name of the artifact with the initial values of personal parameters."""
COMPARED_SAMPLES: Final = 256
"""Calibration samples that are compared: more of them take longer and show the same."""
MIN_GAIN: Final = 0.02
"""Share of the labels, or of the squared error, by which a trained module is better than one constant prediction."""
MIN_LOSS_GAIN: Final = 1e-4
"""The same of another loss. It has no zero, so a share of it may be all that can be learnt: only rounding counts."""
TRAIN_FIRST: Final = (
    "int8's scales are calibrated with the module as it is, so int8 may cost a trained Version more: train the module "
    "before the export, such as by fanin export APP --out FOLDER --pretrain DATA"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A Bundle before it is signed: the bytes of its manifest, its artifacts, and the findings (``sign.Exported``)."""

    manifest: bytes
    artifacts: Mapping[str, bytes]
    notes: tuple[str, ...]
    measured: Mapping[str, Quality]
    compared: Mapping[str, Agreement]


def build(
    app: App, formats: Sequence[str], max_drop: float | None, on_failure: Callable[[FormatFailure], None]
) -> Draft | None:
    """Run all steps of an export except for the last one.

    Args:
        app: The App.
        formats: Graph formats, each known.
        max_drop: Limit on the cost of int8, as for ``export``.
        on_failure: Receives the failure of a format. If it returns, the other formats follow.

    Returns:
        The Bundle of the formats that have graphs; None without any.

    Raises:
        UnsupportedModel: The App has an error that affects every format.
    """
    LOG.info("preparing the module")
    prepared, draws = checked(app, formats)
    graphs = {}
    for name, outcome in _all_graphs(prepared, formats).items():
        if isinstance(outcome, FormatFailure):
            on_failure(outcome)
        else:
            graphs[name] = outcome
    if not graphs:
        return None
    manifest, artifacts = _assemble(prepared, graphs)
    data = dump_manifest(manifest)
    notes = [*prepared.notes, *_random_notes(draws), *(note for each in graphs.values() for note in each.notes)]
    measured, compared = {}, {}
    with tempfile.TemporaryDirectory(prefix="fanin-export-") as folder:
        key = SigningKey.generate()
        write_bundle(Path(folder), data, artifacts, key)
        bundle = open_folder(Path(folder), trusted=[key.public])
        initial = bundle.completed(bundle.initial_parameters())
        for name in graphs:
            step = RUN
            try:
                runtime = open_runtime(FORMATS[name].runtime)
                _verify_format(prepared, bundle, name, runtime)
                LOG.info("%s: comparing int8 with float", name)
                if app.validation is not None:
                    measured[name] = measure_app(app, bundle, runtime)
                    step = INT8
                    notes += _check_cost(prepared, name, measured[name], max_drop)
                else:
                    compared[name] = compare(runtime, bundle, initial, calibration_batches(prepared))
                    notes += _warnings(name, compared[name])
            except (UnsupportedModel, InvalidBundle, InvalidVersion, ValueError) as exc:
                on_failure(failure_of_step(prepared, name, exc, step))
    if measured or compared:
        notes += _untrained(app, measured, compared)
    return Draft(
        manifest=data,
        artifacts=MappingProxyType(artifacts),
        notes=tuple(notes),
        measured=MappingProxyType(measured),
        compared=MappingProxyType(compared),
    )


def measure_app(app: App, bundle: Bundle, runtime: Runtime) -> Quality:
    """Measure float and int8 on the validation data, with the loss of both for a model of values with one output."""
    parameters = bundle.completed(bundle.initial_parameters())
    rows: list[list[Tensor]] = []  # targets, outputs in float and in int8

    def observe(targets: Inputs, in_float: Inputs, in_int8: Inputs) -> None:
        rows.append([torch.from_numpy(np.array(each)) for each in (targets, in_float, in_int8)])

    batches = validation_batches(app)
    if app.num_classes or app.lengths is not None or isinstance(app.output, tuple):
        return measure(runtime, bundle, parameters, batches)
    quality = measure(runtime, bundle, parameters, batches, observe)
    total = math.nan
    # Any error: the loss is the user's code, and values of int8 may be outside its domain, such as a share of 1.001.
    with torch.no_grad(), suppress(Exception):
        total = sum(float(app.loss(output, loss_targets(y)).sum()) for y, _, output in rows)
    constant = None
    if app.loss is not squared_error:  # of this one the spread of the targets is known
        constant = constant_loss(app.loss, [each for _, each, _ in rows], [y for y, _, _ in rows])
    return replace(quality, loss_sum_int8=total if math.isfinite(total) else None, loss_sum_constant=constant)


def _check_cost(prepared: Prepared, name: str, quality: Quality, max_drop: float | None) -> list[str]:
    """Return the notes on the cost of int8.

    Raises UnsupportedModel if int8 costs too much. The message says if the module seems not to be trained.
    """
    try:
        note = check_drop(f"{prepared.what}: {name}", quality, max_drop)
    except InvalidVersion as exc:
        raise UnsupportedModel("; ".join([str(exc), *_untrained(prepared.app, {name: quality}, {})])) from exc
    return [note] if note else []


def _verify_format(prepared: Prepared, bundle: Bundle, name: str, runtime: Runtime) -> None:
    """Check the graphs of one format, for all lengths and batch sizes, against eager torch. Raises UnsupportedModel."""
    LOG.info("%s: verifying against eager torch", name)
    plain = open_runtime(FORMATS[name].runtime, plain=True)
    for single, view in _lengths_of(prepared, bundle):
        verify(single, view, runtime, plain)
    for size in prepared.app.other_batch_sizes:
        LOG.info("%s: verifying the train step for batches of %d", name, size)
        for single, view in _lengths_of(prepared.for_batches(size), bundle.at_batch(size)):
            verify_train(single, view, runtime)


def _lengths_of(prepared: Prepared, bundle: Bundle) -> Iterator[tuple[Prepared, Bundle]]:
    """Yield the App and the Bundle for each single length, the longest last."""
    lengths = prepared.app.lengths
    if lengths is None:
        yield prepared, bundle
        return
    for size in lengths.sizes:
        yield at_length(prepared, size), bundle.at(size)


def _random_notes(draws: Sequence[RandomPort]) -> list[str]:
    size_bytes = sum(port.size_bytes for port in draws)
    return [f"a device draws {size_bytes} bytes of random numbers for each train step"] if draws else []


def _all_graphs(prepared: Prepared, formats: Sequence[str]) -> dict[str, Graphs | FormatFailure]:
    """Return the graphs in each format, or why it has none; at the same time where possible."""
    first, *others = formats
    with ExitStack() as stack:
        calls = {name: stack.enter_context(apart(partial(_graphs, prepared, name))) for name in others}
        return {first: _graphs(prepared, first)} | {name: call() for name, call in calls.items()}


def _graphs(prepared: Prepared, name: str) -> Graphs | FormatFailure:
    LOG.info("%s: tracing, converting and quantizing", name)
    try:
        graphs = graphs_of(prepared, FORMATS[name])
    except UnsupportedModel as exc:
        return failure_of_graphs(prepared, name, exc)
    try:
        return with_preprocess(prepared, name, graphs)
    except UnsupportedModel as exc:
        return failure_of_preprocess(prepared.app, name, exc)


def validation_batches(app: App) -> Iterator[PaddedBatch]:
    """Yield the validation data in batches of the App's size; the last one is padded and masked."""
    inputs, y = app.held_out
    y = y.to(app.target_dtype)
    yield from _padded(app, inputs, y, groups_of(app, {**inputs, "y": y}))


def calibration_batches(prepared: Prepared) -> Iterator[PaddedBatch]:
    """Yield some of the calibration data like ``validation_batches``; y has no meaning."""
    _, example, _ = example_batch(prepared)
    inputs = rows_of(prepared.app.inputs, slice(COMPARED_SAMPLES))
    y = example[torch.arange(num_samples(inputs)) % len(example)]
    yield from _padded(prepared.app, inputs, y, groups_of(prepared.app, inputs))


def _padded(app: App, inputs: Tensors, y: Tensor, groups: Iterable[tuple[int, Tensor]]) -> Iterator[PaddedBatch]:
    """Yield the batches of each group of rows, with the group's length. The last one is padded with its first row."""
    for size, rows in groups:
        for start in range(0, len(rows), app.batch_size):
            index, mask = rows[start : start + app.batch_size], torch.zeros(app.batch_size)
            mask[: len(index)] = 1.0
            index = torch.cat([index, index[:1].expand(app.batch_size - len(index))])
            arrays = {**numpy_inputs(rows_of(inputs, index)), "y": y[index].numpy()}
            if app.lengths is not None:
                arrays = {name: app.lengths.fit(name, array, size) for name, array in arrays.items()}
            yield PaddedBatch(inputs=arrays, y=arrays.pop("y"), mask=mask.numpy())


def _warnings(name: str, comparison: Agreement) -> list[str]:
    advice = (
        "it may not be trained yet, or a few of these examples are outliers; give the App validation data to measure "
        "the cost of int8, and set quantization_aware to lower it"
    )
    return [] if comparison.is_good else [f"{name}: {comparison}, a large difference for one model: {advice}"]


def _untrained(app: App, measured: Mapping[str, Quality], compared: Mapping[str, Agreement]) -> list[str]:
    """Return a note if the module is not better than a constant prediction, or if that is unknown."""
    if app.validation is None:
        name, comparison = next(iter(compared.items()))
        unmeasured = f"the cost of int8 is not measured; in {name}, {comparison}: give the App validation=(x, y)"
        return [f"{unmeasured}; {TRAIN_FIRST}"]
    name, quality = next(iter(measured.items()))
    if app.num_classes:
        labels = app.held_out[1]
        counts = torch.bincount(labels[labels >= 0].flatten())
        share = float(counts.max() / counts.sum())
        is_trained = quality.accuracy_float > share + MIN_GAIN
        accuracy = f"{100 * quality.accuracy_float:.2f} % of the labels"
        scores = f"predicts {accuracy}, of which {100 * share:.2f} % are of one class"
        cost = f"{quality.drop_points:.2f} points of accuracy"
    elif app.loss is squared_error:
        # A squared error of 0 means that the targets have another form than the output, and cannot be compared.
        error, spread = quality.squares_float, quality.squares_wanted
        is_trained = not error or error < (1.0 - MIN_GAIN) * spread
        scores = f"has a squared error of {error:g} in total, and the mean of the targets one of {spread:g}"
        cost = f"{quality.rise_percent:.2f} % of the squared error"
    elif quality.loss_sum_constant is not None:
        # Another loss may give the values another scale than the targets, such as logits for 0 and 1.
        loss, constant = (total / quality.num_examples for total in (quality.loss_sum, quality.loss_sum_constant))
        is_trained = loss < constant - MIN_LOSS_GAIN * abs(constant)
        scores = f"has a mean loss of {loss:.4f}, and one output for all examples has {constant:.4f}"
        rise = quality.loss_rise
        cost = "an unknown part of the loss" if rise is None else f"{rise:.4f} of the mean loss"
    else:
        return []
    if is_trained:
        return []
    return [f"the module {scores}: it seems not to be trained; int8 now costs {cost} in {name}; {TRAIN_FIRST}"]


def _assemble(prepared: Prepared, formats: Mapping[str, Graphs]) -> tuple[Manifest, dict[str, bytes]]:
    app = prepared.app
    arrays = {name: value.numpy() for name, value in prepared.parameters.items()}
    table, local = (_part_of(prepared.table, names) for names in (arrays.keys() - prepared.local, prepared.local))
    artifacts = {name: data for graphs in formats.values() for name, data in graphs.files.items()}
    artifacts[PARAMETERS] = _encoded(table, arrays)
    if prepared.local:
        artifacts[LOCAL] = _encoded(local, arrays)
    first = next(iter(formats.values()))
    for name, graphs in formats.items():
        if graphs.ports != first.ports or graphs.derived != first.derived:
            raise UnsupportedModel(
                f"{prepared.what}: the graphs in {name} have other ports or constants than those in "
                f"{next(iter(formats))}; please report the module"
            )
    signatures = {
        name: Signature(
            inputs=inputs,
            outputs=outputs,
            graphs=MappingProxyType({key: graphs.signatures[name] for key, graphs in formats.items()}),
        )
        for name, (inputs, outputs) in first.ports.items()
    }
    manifest = Manifest(
        name=app.name,
        batch_size=app.batch_size,
        num_classes=app.num_classes,
        num_tokens=MappingProxyType(count_tokens(prepared)),
        table=table,
        signatures=MappingProxyType(signatures),
        slots=MappingProxyType(_slots(formats)),
        artifacts=MappingProxyType({name: artifact_of(artifact) for name, artifact in artifacts.items()}),
        initial=PARAMETERS,
        derived=first.derived,
        optimizer=MappingProxyType(dict(app.recipe.optimizer.settings)),
        lengths=app.lengths,
        local=LocalParameters(table=local, initial=LOCAL) if prepared.local else None,
        other_batch_sizes=tuple(app.other_batch_sizes),
    )
    return manifest, artifacts


def _part_of(table: TensorTable, names: Collection[str]) -> TensorTable:
    return TensorTable(tuple(spec for spec in table.specs if spec.name in names))


def _encoded(table: TensorTable, arrays: Mapping[str, Array]) -> bytes:
    return encode_parameters(table, table.flatten({spec.name: arrays[spec.name] for spec in table.specs}))


def _slots(formats: Mapping[str, Graphs]) -> dict[str, tuple[Slot, ...]]:
    """Return the slots of each format, and of each shorter length in it."""
    longest = {name: graphs.slots for name, graphs in formats.items()}
    return longest | {
        f"{name}@{size}": slots for name, graphs in formats.items() for size, slots in graphs.shorter.items()
    }
