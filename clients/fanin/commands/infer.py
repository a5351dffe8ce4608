"""``fanin infer``: the predictions of a model, on the core install and a runtime.

The model is one of these:

- a .onnx or .tflite file of any origin
- a Bundle, whose int8 graph runs with Version 0 or with the parameters of another Version
- the folder of a device that joined with --serve, whose newest Version runs

The data is a .npy, .npz or .csv file, or images (``console.samples``). A model of classes prints the class of each
sample with its probability, or the classes of its positions, and the accuracy if the data has labels. It uses
argparse, because the core install has no typer.
"""

import argparse
import json
import math
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, cast

import numpy as np

from fanin.clients.device.serving import Serving
from fanin.clients.device.storage.cache import Cache
from fanin.clients.textfiles import read_public_key
from fanin.commands.console.predictions import (
    Predictions,
    are_classes,
    is_of_classes,
    predictions,
    read_names,
    squared_error,
)
from fanin.commands.console.samples import Target, check_paths, read_samples
from fanin.commands.console.show import finite, note_on_local
from fanin.commands.console.usage import Parser, check_target, wrong_usage
from fanin.edge.bundles.bundle import Bundle, open_folder, read_signed_manifest
from fanin.edge.bundles.formats import file_format, format_of
from fanin.edge.lengths import TARGETS
from fanin.edge.parameter_files import read_tensors
from fanin.edge.ranges import RANGES, ranges_table
from fanin.edge.runtimes.available import RUNTIMES, open_format, open_runtime
from fanin.edge.runtimes.base import LoadedModel, NamedInputs, Runtime
from fanin.edge.runtimes.engine import Feed
from fanin.edge.runtimes.graphs import fits, has_output_targets
from fanin.edge.runtimes.models import (
    PREPROCESS,
    dequantize_output,
    feed_of,
    model_inputs,
    open_preprocess,
    preprocess_ports,
    run_rows,
)
from fanin.edge.signatures import Port
from fanin.edge.tensors import Array
from fanin.protos.errors import InvalidInput, NotFound

_UNFILLED: Final = (
    "a file with the signatures infer and train is a bundle's: its weights are zeros until a version fills them; "
    "run the bundle's folder instead, with --version for a later version"
)
SHOWN_VALUES: Final = 100
"""Values above which an output is abbreviated, or summarized if it has more than two dimensions."""
ALL_VALUES: Final = "(--out FILE.npz or --json FILE writes all values)"
NARROW: Final = MappingProxyType({"float32": "f", "int32": "ib"})
"""The kinds of arrays that become those of an input's dtype, of the dtypes that inputs have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedInference:
    """An open model: its runtime, its inputs, the function that runs it, and a note for the user.

    ``bundle`` is None for a file: its output has an unknown meaning.
    """

    runtime: str
    target: Target
    run: Callable[[Feed], dict[str, Array]]
    note: str = ""
    bundle: Bundle | None = None

    @property
    def has_classes(self) -> bool:
        """Whether the output is known to be one of classes."""
        return self.bundle is not None and self.bundle.manifest.num_classes > 0

    @property
    def has_values(self) -> bool:
        """Whether the output is known to be one of values."""
        return self.bundle is not None and not self.bundle.manifest.num_classes


def main(argv: Sequence[str]) -> int:
    """Run ``fanin infer``."""
    options = _parser().parsed(argv)
    path = Path(options.model)
    # A missing path raises FileNotFoundError here, instead of an error about its format.
    path.stat()
    with wrong_usage():
        _check_options(path, options)
    if Cache.is_device(path):
        opened = _open_device(path, options)
    else:
        opened = _open_bundle(path, options) if path.is_dir() else _open_file(path, options)
    if options.classes and opened.has_values:
        raise InvalidInput(
            f"--classes: got it for {path}, a bundle of values, expected a model of classes; remove it", code="FN-1026"
        )
    samples = read_samples([Path(name) for name in options.data], opened.target, options.scale)
    names = read_names(Path(options.classes)) if options.classes else ()
    started_s = time.monotonic()
    try:
        outputs = opened.run(samples.feed)
    except ValueError as exc:
        raise InvalidInput(f"{options.data[0]}: {exc}", code="FN-1031") from exc
    seconds = time.monotonic() - started_s
    labels = _labels(opened.bundle, outputs, samples.labels)
    predicted = None if opened.has_values else _predictions(outputs, names, labels, is_known=opened.has_classes)
    error = squared_error(outputs["logits"], labels) if opened.has_values else None
    if options.out:
        _write(Path(options.out), outputs)
    if options.json:
        rows = {name: _row(array, with_values=not options.out) for name, array in outputs.items()}
        row = {"model": options.model, "runtime": opened.runtime, "seconds": seconds, "outputs": rows}
        if predicted is not None:
            row |= {"accuracy": predicted.accuracy, "predictions": predicted.rows()}
        if error is not None:
            row["squared_error"] = error
        text = json.dumps(finite(row), indent=1, allow_nan=False) + "\n"
        sys.stdout.write(text) if options.json == "-" else Path(options.json).write_text(text, encoding="utf-8")
    if options.json != "-":
        hint = "" if options.out or options.json else ALL_VALUES
        is_table = predicted is not None and (opened.has_classes or names)
        sys.stdout.write(predicted.table() if predicted is not None and is_table else _text(outputs, hint))
        sys.stdout.write("" if predicted is None else predicted.score())
        sys.stdout.write("" if error is None else f"mean squared error {error:.6g}\n")
    if opened.note:
        sys.stderr.write(f"note: {opened.note}\n")
    if samples.labels is not None and labels is None:
        sys.stderr.write("note: y is not compared: this model's targets have another shape or dtype than its output\n")
    return 0


def _check_options(path: Path, options: argparse.Namespace) -> None:
    """Raise InvalidInput for options that do not go with the kind of model, and targets that cannot be written."""
    check_target("--json", options.json or "")
    check_target("--out", options.out or "")
    check_paths([Path(name) for name in options.data])
    if Cache.is_device(path):
        if options.signature or options.version or options.ranges:
            raise InvalidInput(
                f"{path}: got --signature, --version or --ranges, but a device serves one version; remove it",
                code="FN-1025",
            )
        if not options.publisher:
            raise InvalidInput(f"{path}: got a device without --publisher; pass its publisher.pub", code="FN-1025")
    elif path.is_dir():
        if options.signature:
            raise InvalidInput(
                f"{path}: got --signature for a bundle, which is opened by its infer graph; remove it", code="FN-1025"
            )
    else:
        if options.publisher or options.version or options.ranges:
            raise InvalidInput(
                f"{path}: got --publisher, --version or --ranges for a file, which has none; remove it", code="FN-1025"
            )
        if options.signature and not file_format(format_of(path.name)).has_signatures:
            raise InvalidInput(
                f"{path}: got --signature {options.signature!r}, but an {path.suffix.lower()} file has a single graph",
                code="FN-1025",
            )
        format_of(path.name)


def _labels(bundle: Bundle | None, outputs: Feed, labels: Array | None) -> Array | None:
    """Return the labels in the length of the output; None if the targets of a Bundle cannot be compared with it."""
    if bundle is None or labels is None:
        return labels
    if not bundle.manifest.num_classes and not has_output_targets(bundle.manifest):
        return None
    lengths = bundle.manifest.lengths
    axis = None if lengths is None else lengths.axes.get(TARGETS)
    if lengths is None or axis is None or labels.ndim <= axis:
        return labels
    return lengths.fit(TARGETS, labels, outputs["logits"].shape[axis])


def _predictions(
    outputs: dict[str, Array], names: tuple[str, ...], labels: Array | None, *, is_known: bool
) -> Predictions | None:
    """Return the predicted classes of a model of classes, or of a file whose output may have them; otherwise None."""
    has_classes = is_of_classes([*outputs.values()])
    if names and not has_classes:
        shapes = {name: array.shape for name, array in outputs.items()}
        raise InvalidInput(
            f"--classes: got outputs {shapes}, expected floats (n, ..., classes); add --float for an int8 output",
            code="FN-1026",
        )
    if not has_classes:
        return None
    (logits,) = outputs.values()
    # An array y next to the inputs of a file of another origin need not be its labels.
    if is_known or names or are_classes(labels, logits):
        return predictions(logits, names, labels)
    return None


def _open_file(path: Path, options: argparse.Namespace) -> OpenedInference:
    runtime = open_format([format_of(path.name)], options.runtime)
    data = path.read_bytes()
    model = runtime.open_model(data, str(path), options.signature)
    return OpenedInference(
        runtime=runtime.name,
        target=Target(inputs=tuple(Port(name=row.name, dtype=row.dtype, shape=row.shape) for row in model.inputs)),
        run=lambda feed: _run(model, feed, options.float),
        note=_UNFILLED if options.signature == "infer" and _has(runtime, data, path, "train") else "",
    )


def _has(runtime: Runtime, data: bytes, path: Path, signature: str) -> bool:
    try:
        runtime.open_model(data, str(path), signature)
    except InvalidInput:
        return False
    return True


def _run(model: LoadedModel, feed: Feed, in_float: bool) -> dict[str, Array]:
    ports = {port.name: port for port in model.inputs}
    # An array of another shape keeps its dtype, for the error.
    inputs = {
        name: feed_of(ports[name], array) if name in ports and fits(ports[name].shape, array.shape) else array
        for name, array in feed.items()
    }
    outputs = run_rows(model, inputs)
    if not in_float:
        return outputs
    return {port.name: dequantize_output(port, outputs[port.name]) for port in model.outputs}


def _open_device(folder: Path, options: argparse.Namespace) -> OpenedInference:
    """Open the newest Version of a device that joined with --serve. The device may run at the same time."""
    publisher = read_public_key(Path(options.publisher))
    runtime = open_runtime(options.runtime)
    serving = Serving(runtime, Cache(folder), (publisher,))
    if serving.version is None:
        raise NotFound(
            f"{folder}: this device has no served model; run fanin join with --serve until it has taken part in a "
            "round",
            code="FN-0833",
        )

    bundle = serving.bundle
    assert bundle is not None, "a served version has a bundle"

    def run(feed: Feed) -> dict[str, Array]:
        return {"logits": serving.predict(_narrow(bundle, feed))}

    return _of_bundle(bundle, runtime, run)


def _open_bundle(folder: Path, options: argparse.Namespace) -> OpenedInference:
    publisher = options.publisher
    trusted = read_public_key(Path(publisher)) if publisher else read_signed_manifest(folder).public_key
    bundle = open_folder(folder, trusted=(trusted,))
    if not bundle.manifest.signatures:
        raise InvalidInput(
            f"{folder}: the bundle has no graphs, expected an infer graph; run its model in your own framework, with "
            "the parameters of fanin fetch",
            code="FN-0846",
        )
    runtime = open_format(bundle.manifest.signatures["infer"].graphs.keys(), options.runtime)
    own, table = bundle.manifest.table, ranges_table(bundle.manifest.activations)
    parameters = read_tensors(Path(options.version), own) if options.version else bundle.initial_parameters()
    ranges_file = Path(options.ranges or Path(options.version or folder).with_name(RANGES))
    has_ranges = options.ranges or (options.version and ranges_file.is_file())
    ranges = read_tensors(ranges_file, table) if has_ranges else None
    predict = runtime.open_predict(bundle, bundle.completed(parameters), ranges)
    preprocess = open_preprocess(runtime, bundle)

    def run(feed: Feed) -> dict[str, Array]:
        return {"logits": predict(model_inputs(bundle, _narrow(bundle, feed), preprocess))}

    return replace(_of_bundle(bundle, runtime, run), note=note_on_local(bundle))


def _of_bundle(bundle: Bundle, runtime: Runtime, run: Callable[[Feed], dict[str, Array]]) -> OpenedInference:
    signatures = bundle.manifest.signatures
    raw = preprocess_ports(bundle)[0][0] if PREPROCESS in signatures else None
    target = Target(inputs=signatures["infer"].inputs, raw=raw)
    return OpenedInference(runtime=runtime.name, target=target, run=run, bundle=bundle)


def _narrow(bundle: Bundle, feed: Feed) -> NamedInputs:
    """Convert floats to float32, and int64 numbers and masks to int32, of arrays that then are inputs of the Bundle.

    ``model_inputs`` refuses the others, so its errors have the dtypes of the file.
    """
    ports = {port.name: [port] for port in bundle.manifest.signatures["infer"].inputs}
    if PREPROCESS in bundle.manifest.signatures:
        (name,) = ports
        ports[name] += preprocess_ports(bundle)[0]
    lengths = bundle.manifest.lengths

    def narrowed(name: str, x: Array) -> Array:
        for port in ports.get(name, []):
            shape = port.shape if lengths is None else lengths.shape_like(name, port.shape, x.shape)
            if x.dtype.kind not in NARROW.get(port.dtype, "") or not fits(shape, x.shape):
                continue
            narrow = x.astype(port.dtype, copy=False)
            if x.dtype.kind == "i" and not np.array_equal(narrow, x):
                raise ValueError(f"{name}: got integers from {x.min()} to {x.max()}, expected int32 numbers")
            return narrow
        return x

    return cast("NamedInputs", {name: narrowed(name, x) for name, x in feed.items()})


def _write(path: Path, outputs: Feed) -> None:
    if path.suffix == ".npy":
        if len(outputs) > 1:
            raise InvalidInput(
                f"{path}: got outputs {sorted(outputs)}, expected one for .npy; name an .npz file", code="FN-1006"
            )
        with path.open("wb") as file:
            np.save(file, next(iter(outputs.values())), allow_pickle=False)
        return
    # numpy.savez takes arrays as keyword arguments, so an output named like one of its parameters would fail.
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in outputs.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _row(array: Array, *, with_values: bool) -> dict[str, object]:
    row: dict[str, object] = {"dtype": array.dtype.name, "shape": list(array.shape)}
    return row | {"values": array.tolist()} if with_values else row


def _text(outputs: Feed, hint: str) -> str:
    lines = []
    for name, array in outputs.items():
        shown = np.array2string(array, threshold=SHOWN_VALUES, precision=6, separator=" ")
        if array.size > SHOWN_VALUES and array.ndim > 2:
            shown = f"from {array.min():.6g} to {array.max():.6g}, mean {array.mean(dtype=np.float64):.6g}"
        lines += [f"{name}  {array.dtype.name} {tuple(array.shape)}", shown]
    if hint and any(array.size > SHOWN_VALUES for array in outputs.values()):
        lines.append(hint)
    return "\n".join(lines) + "\n"


def _scale(text: str) -> float:
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}, expected a positive number")
    return value


def _parser() -> Parser:
    parser = Parser(
        prog="fanin infer",
        description="Run a model: a .onnx or .tflite file, or the int8 graph of a bundle or of a device.",
        epilog="Floats for an int8 input are quantized with the file's own scale. Inputs that exceed the model's batch "
        "size run in batches.",
    )
    parser.add_argument("model", metavar="MODEL", help="a .onnx or .tflite file, or the folder of a bundle or a device")
    parser.add_argument(
        "--data",
        required=True,
        action="append",
        metavar="FILE",
        help="inputs: .npy, .npz with one array an input, .csv with one sample a row, or an image (repeat it for "
        "more); labels: the array y of an .npz file, or the column y of a .csv file",
    )
    parser.add_argument(
        "--scale", type=_scale, default=0.0, metavar="NUMBER", help="divide uint8 pixels by NUMBER, such as 255"
    )
    parser.add_argument("--classes", metavar="FILE", help="names of the classes, one a line, class 0 first")
    parser.add_argument("--runtime", metavar="NAME", help=f"one of {', '.join(RUNTIMES)} (the first that fits)")
    parser.add_argument(
        "--signature", default="", metavar="NAME", help="the signature to run, if a .tflite file has several"
    )
    parser.add_argument("--float", action="store_true", help="convert quantized outputs to floats")
    parser.add_argument("--publisher", metavar="FILE", help="public key that must have signed the bundle")
    parser.add_argument("--version", metavar="FILE", help="parameters of a version (default: version 0)")
    parser.add_argument(
        "--ranges", metavar="FILE", help="ranges of its activations (default: the file ranges beside it)"
    )
    parser.add_argument("--out", metavar="FILE", help="where to write the outputs: .npz, or .npy for a single one")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON: to standard output instead of the text, or to FILE"
    )
    return parser
