"""The export: an App becomes a signed Bundle.

1. ``app/``, ``module/``: prepare the module of the App, and run the checks that need no graph.
2. ``graph/``, ``formats/``: in each graph format trace, convert, quantize and find the slots.
3. Write the manifest.
4. ``verification/``: compare the graphs with eager torch, and int8 with float.
5. Sign the Bundle and write its folder. This is the last step, so a failure leaves nothing behind.

A check of an App runs all steps but the last one. ``diagnosis/`` is imported only after a failure.
"""

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch

from fanin.edge.bundles.bundle import Bundle, open_folder, write_bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.manifest_json import dump_manifest
from fanin.edge.export.app.app import App
from fanin.edge.export.app.inputs.named import call_module, numpy_inputs
from fanin.edge.export.app.losses import function_of
from fanin.edge.export.formats.apart import apart
from fanin.edge.export.formats.graphs import FORMATS, Graphs, graphs_of
from fanin.edge.export.formats.manifest import assembled
from fanin.edge.export.formats.preprocess import encode_preprocess, with_preprocess
from fanin.edge.export.graph.examples import example_batch
from fanin.edge.export.graph.layers import trace_forward, trace_layer
from fanin.edge.export.module.gradients import output_learns
from fanin.edge.export.module.lengths import each_length
from fanin.edge.export.module.prepare import Prepared
from fanin.edge.export.refusals import INT8, RUN, Finding, FormatFailure, Place, Untraceable
from fanin.edge.export.verification.cost import (
    TRAIN_FIRST,
    calibration_batches,
    check_cost,
    measure_app,
    untrained,
    warnings_of,
)
from fanin.edge.export.verification.ready import check_arguments, checked
from fanin.edge.export.verification.verify import verify, verify_train
from fanin.edge.files import new_folder
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import Runtime, VersionValues
from fanin.edge.runtimes.measure import compare
from fanin.edge.runtimes.models import PREPROCESS
from fanin.edge.runtimes.quality import Agreement, Quality
from fanin.edge.runtimes.randomness import RandomPort
from fanin.protos.errors import InvalidBundle, InvalidVersion, UnsupportedModel

if TYPE_CHECKING:
    from fanin.edge.export.diagnosis.parts import Owner

LOG = logging.getLogger("fanin.edge.export")
"""Logs each step of an export at INFO: an export may take minutes."""
FIX: Final = "fix the code that the reason names: it fails, or it does not fit the App's own data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A Bundle, and the findings of its export.

    Attributes:
        bundle: The Bundle.
        notes: Changes to the module, rows that depend on padding, and formats in which int8 is far from float.
        advice: What to do if the module seems not to be trained, or if that is unknown; otherwise empty. A Plan whose
            ``int8.ranges`` follow its training needs none.
        measured: Float against int8 in each graph format, for an App with validation data.
        compared: Float against int8 in each graph format on calibration data, for an App without validation data.
    """

    bundle: Bundle
    notes: tuple[str, ...]
    advice: str
    measured: Mapping[str, Quality]
    compared: Mapping[str, Agreement]


def export(
    app: App,
    folder: Path | str,
    key: SigningKey,
    formats: Sequence[str] = tuple(FORMATS),
    max_drop: float | None = None,
) -> Exported:
    """Export an App as a signed Bundle: trace, quantize, verify against eager torch, sign and write.

    Args:
        app: The App.
        folder: A new or empty folder for the Bundle. It is written only if every step succeeds.
        key: The publisher's key, which signs the manifest.
        formats: Graph formats to write: ``"onnx"``, ``"tflite"``, or both.
        max_drop: Limit on the cost of int8 on the validation data: points of accuracy, or percent of squared error for
            a module that returns values. None: the defaults of ``check_drop``. ``math.inf``: no limit.

    Returns:
        The Bundle with notes and measurements.

    Raises:
        UnsupportedModel: The module cannot be trained by a graph, or int8 costs more than ``max_drop``. The message
            names the part of the module and a remedy.
        InvalidInput: ``folder`` holds files or is no path, ``app`` is no App, a format is unknown, or ``max_drop`` is
            not a number of at least 0. All of them are checked first.
    """
    path = new_folder("export: folder", folder)
    check_arguments("export", app, formats, max_drop)
    draft = build(app, formats, max_drop, _refuse)
    assert draft is not None, "a format without graphs ends the export"
    LOG.info("writing the bundle")
    # Another export may have written there in the meantime.
    write_bundle(new_folder("export: folder", path), draft.manifest, draft.artifacts, key)
    return Exported(
        bundle=open_folder(path, trusted=[key.public]),
        notes=draft.notes,
        advice=draft.advice,
        measured=draft.measured,
        compared=draft.compared,
    )


def _refuse(failure: FormatFailure) -> None:
    raise UnsupportedModel(failure.reason, code=failure.code)


def check_app(app: App, formats: Sequence[str], max_drop: float | None = None) -> tuple[Finding, ...]:
    """Return the parts of an App that cannot be exported to these formats.

    Args:
        app: The App.
        formats: Graph formats, ``"onnx"`` and ``"tflite"``.
        max_drop: Limit on the cost of int8, as for ``export``.

    Returns:
        One finding for each part; empty if the App can be exported.

    Raises:
        UnsupportedModel: The App has an error that affects every format: dtypes, names, or nothing to train.
        InvalidInput: ``app`` is no App, a format is unknown, or ``max_drop`` is not a number of at least 0.
    """
    check_arguments("check_app", app, formats, max_drop)
    failures: list[FormatFailure] = []
    try:
        build(app, formats, max_drop, failures.append)
    except Untraceable as exc:
        from fanin.edge.export.diagnosis.parts import finding_of

        return (finding_of(_owner(app, app.module), "", exc, FIX),)
    findings = [finding for failure in failures for finding in failure.findings]
    able = [name for name in formats if all(finding.graph_format != name for finding in findings)]
    if not able:
        return tuple(findings)
    return tuple(replace(row, advice=_with_other(row, able[0])) for row in findings)


def _with_other(finding: Finding, able: str) -> str:
    """Return the remedy of a finding, with an export to a format that has no findings as an alternative."""
    other = f"export without {' and '.join(finding.runtimes)}: --format {able}"
    return f"{finding.advice}; or {other}" if finding.advice else other


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A Bundle before it is signed: the bytes of its manifest, its artifacts, and the findings (``Exported``)."""

    manifest: bytes
    artifacts: Mapping[str, bytes]
    notes: tuple[str, ...]
    advice: str
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
    prepared = checked(app, formats)
    graphs = {}
    for name, outcome in _all_graphs(prepared, formats).items():
        if isinstance(outcome, FormatFailure):
            on_failure(outcome)
        else:
            graphs[name] = outcome
    if not graphs:
        return None
    manifest, artifacts = assembled(prepared, graphs)
    data = dump_manifest(manifest)
    notes = [
        *prepared.notes,
        *_random_notes(prepared.draws),
        *(note for each in graphs.values() for note in each.notes),
    ]
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
                    notes += check_cost(prepared, name, measured[name], max_drop)
                else:
                    compared[name] = compare(
                        runtime, bundle, VersionValues(parameters=initial), calibration_batches(prepared)
                    )
                    notes += warnings_of(name, compared[name])
            except (UnsupportedModel, InvalidBundle, InvalidVersion, ValueError) as exc:
                from fanin.edge.export.diagnosis.parts import failure_of_step

                on_failure(failure_of_step(prepared.what, prepared.eager, (name, step), exc))
    finding = untrained(app, measured, compared) if measured or compared else []
    return Draft(
        manifest=data,
        artifacts=MappingProxyType(artifacts),
        notes=(*notes, *finding),
        advice=TRAIN_FIRST if finding else "",
        measured=MappingProxyType(measured),
        compared=MappingProxyType(compared),
    )


def _verify_format(prepared: Prepared, bundle: Bundle, name: str, runtime: Runtime) -> None:
    """Check the graphs of one format, for all lengths and batch sizes, against eager torch. Raises UnsupportedModel."""
    LOG.info("%s: verifying against eager torch", name)
    plain = open_runtime(FORMATS[name].runtime, plain=True)
    for _, single in each_length(prepared):
        verify(single, _view(bundle, single), runtime, plain)
    if any(row.graph_format == name for row in bundle.manifest.activations):
        initial = bundle.completed(bundle.initial_parameters())
        runtime.open_ranges(bundle, initial)(numpy_inputs(prepared.app.examples(1)))
    for size in prepared.app.other_batch_sizes:
        LOG.info("%s: verifying the train step for batches of %d", name, size)
        for _, single in each_length(prepared.for_batches(size)):
            verify_train(single, _view(bundle.at_batch(size), single), runtime)


def _view(bundle: Bundle, single: Prepared) -> Bundle:
    """Return the Bundle for the length of an App."""
    return bundle.at(single.length) if single.length else bundle


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
    """Return the graphs in a format, or each part that has none."""
    LOG.info("%s: tracing, converting and quantizing", name)
    failures: list[FormatFailure] = []
    graphs: Graphs | None = None
    preprocess: bytes | None = None
    try:
        graphs = graphs_of(prepared, FORMATS[name])
    except UnsupportedModel as exc:
        failures.append(_failure(prepared, name, exc))
    try:
        if prepared.app.preprocess is not None:
            preprocess = encode_preprocess(prepared.app, name, prepared.what)
    except UnsupportedModel as exc:
        from fanin.edge.export.diagnosis.parts import failure_of_preprocess

        place = Place(module=PREPROCESS, kind=type(prepared.app.preprocess).__name__)
        failures.append(failure_of_preprocess(place, name, exc))
    if graphs is None or failures:
        findings = tuple(row for each in failures for row in each.findings)
        return FormatFailure(reason=failures[0].reason, code=failures[0].code, findings=findings)
    return graphs if preprocess is None else with_preprocess(prepared.app, name, graphs, preprocess)


def _failure(prepared: Prepared, name: str, exc: UnsupportedModel) -> FormatFailure:
    """Return why a format has no graphs. Raises Untraceable if the error does not depend on the format."""
    from fanin.edge.export.diagnosis.parts import Suspect, failure_of_graphs

    app, row = prepared.app, FORMATS[name]
    own, (inputs, _, mask) = app.decompositions, example_batch(prepared)

    def run() -> None:
        with torch.no_grad(), prepared.norms(mask):
            call_module(prepared.module, inputs)

    return failure_of_graphs(
        Suspect(
            owner=_owner(app, prepared.eager),
            graph_format=name,
            module=prepared.module,
            run=run,
            gradient=lambda layer, inputs, what: row.encode(
                what, trace_layer(layer, inputs, row.forms, what, own), what
            ),
            forward=lambda layer, inputs, what: row.encode(what, trace_forward(layer, inputs, row.forms, own), what),
        ),
        exc,
    )


def _owner(app: App, module: torch.nn.Module) -> "Owner":
    from fanin.edge.export.diagnosis.parts import Owner

    def learns() -> bool:
        return output_learns(app.module, lambda trial: app.call(trial, app.examples(app.batch_size)))

    return Owner(module=module, loss=function_of(app.loss), learns=learns)
