"""Any model as a callable: graph files that other people made, and Signatures that have no state.

What is fed is checked against the file's own ports before the library sees it. The quantization is the file's own,
``value = scale * (stored - zero_point)`` (Jacob et al. 2018, arXiv 1712.05877, section 2.1): TFLite states it for
inputs and outputs, ONNX computes with it inside the graph.
"""

from collections.abc import Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.manifest import Port
from fanin.edge.runtimes.base import Inputs, Model, ModelPort, Preprocess, Runtime
from fanin.edge.runtimes.graphs import Array, Feed, RunGraph, check_port, check_tokens
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidBundle, InvalidInput

PREPROCESS: Final = "preprocess"
RAW: Final = "raw"
FORMAT_OF: Final = MappingProxyType({".onnx": "onnx", ".tflite": "tflite"})
"""The graph format by a file's ending."""


class GraphModel:
    """A ``Model`` over any engine that runs a named graph."""

    def __init__(self, inputs: Sequence[ModelPort], outputs: Sequence[ModelPort], run: RunGraph) -> None:
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._run = run

    @property
    def inputs(self) -> tuple[ModelPort, ...]:
        return self._inputs

    @property
    def outputs(self) -> tuple[ModelPort, ...]:
        return self._outputs

    def __call__(self, feed: Feed) -> dict[str, Array]:
        names = [port.name for port in self._inputs]
        if set(feed) != set(names):
            raise ValueError(f"inputs: got {sorted(feed)}, expected {sorted(names)}")
        for port in self._inputs:
            check_port(Port(name=port.name, dtype=port.dtype, shape=port.shape), feed[port.name])
        found = self._run([port.name for port in self._outputs], feed)
        return {port.name: array for port, array in zip(self._outputs, found, strict=True)}


def quantize_input(port: ModelPort, values: Array) -> Array:
    """``values`` as the port stores them, ties away from zero as TFLite rounds. Raises ValueError."""
    if not port.scale or np.dtype(port.dtype).kind not in "iu":
        raise ValueError(f"{port.name}: got {values.dtype}, expected {port.dtype}: the file tells no scale for it")
    exact = values.astype(np.float64) / port.scale
    if not np.isfinite(exact).all():
        raise ValueError(f"{port.name}: got values that are not finite, expected none")
    bounds = np.iinfo(port.dtype)
    rounded = np.trunc(exact + np.copysign(0.5, exact)) + port.zero_point
    stored: Array = np.clip(rounded, bounds.min, bounds.max).astype(port.dtype)
    return stored


def dequantize_output(port: ModelPort, stored: Array) -> Array:
    """What the port's stored values stand for, float32; those of a port without a scale as they are."""
    if not port.scale:
        return stored
    values: Float32s = (port.scale * (stored.astype(np.float64) - port.zero_point)).astype(np.float32)
    return values


def feed_of(port: ModelPort, array: Array) -> Array:
    """An array as an input takes it: quantized with the file's own scale where it has floats for integers."""
    if array.dtype.kind != "f":
        return array
    if port.scale and np.dtype(port.dtype).kind in "iu":
        return quantize_input(port, array)
    # numpy makes float64 unasked; a model of float32 wants just that.
    return array.astype(np.float32) if port.dtype == "float32" else array


class GraphPreprocess:
    """A ``Preprocess`` over a model; one of a fixed batch runs as often as it takes."""

    def __init__(self, bundle: Bundle, runtime: Runtime) -> None:
        (self._raw,), (self._x,) = preprocess_ports(bundle)
        what = f"{PREPROCESS} graph"
        self._model = runtime.open_model(bundle.graph(PREPROCESS, runtime.graph_format), what, PREPROCESS)
        for ports, port in ((self._model.inputs, self._raw), (self._model.outputs, self._x)):
            got = {found.name: (found.dtype, found.shape[1:]) for found in ports}
            if got != {port.name: (port.dtype, port.shape[1:])}:
                raise InvalidBundle(f"{what}: got {got}, expected {port.name!r} as {port.dtype} {port.shape}")

    def __call__(self, raw: Inputs) -> Inputs:
        check_port(self._raw, raw)
        if len(raw) == 0:
            empty: Inputs = np.empty((0, *self._x.shape[1:]), self._x.dtype)
            return empty
        found = run_rows(self._model, {RAW: raw})[self._x.name]
        check_port(self._x, found)
        x: Inputs = found  # type: ignore[assignment]  # the dtype is the port's, as just checked
        return x


def preprocess_ports(bundle: Bundle) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """The ports of ``preprocess``: one ``raw``, and ``x`` just as ``infer`` takes it. Raises InvalidBundle."""
    found, infer = bundle.manifest.signatures[PREPROCESS], bundle.manifest.signatures["infer"]
    if [port.name for port in found.inputs] != [RAW] or found.outputs != infer.inputs:
        raise InvalidBundle(
            f"bundle: signature {PREPROCESS!r} has inputs {found.inputs} and outputs {found.outputs}, "
            f"expected one input {RAW!r} and the outputs {infer.inputs}"
        )
    return found.inputs, found.outputs


def open_preprocess(runtime: Runtime, bundle: Bundle) -> Preprocess | None:
    """The Bundle's ``preprocess``; None if it has none. Raises InvalidBundle."""
    return GraphPreprocess(bundle, runtime) if PREPROCESS in bundle.manifest.signatures else None


def model_inputs(bundle: Bundle, x: Inputs, preprocess: Preprocess | None) -> Inputs:
    """``x`` (n, ...) as the Bundle's model takes it: as it is, or through ``preprocess`` if it is raw.

    Raises ValueError for anything else, InvalidBundle if it takes something else than ``x``.
    """
    port, *others = bundle.manifest.signatures["infer"].inputs or (None,)
    if port is None or others or port.name != "x":
        raise InvalidBundle(f"bundle: signature 'infer' has inputs {[port, *others]}, expected 'x' alone")
    if _has_form(port, x):
        check_tokens(x, bundle.manifest.num_tokens)
        return x
    wanted = f"{port.dtype} {port.shape}"
    if preprocess is not None:
        ((raw,), _) = preprocess_ports(bundle)
        if _has_form(raw, x):
            return preprocess(x)
        wanted += f", or raw as {raw.dtype} {raw.shape}"
    raise ValueError(f"x: got {x.dtype} {x.shape}, expected {wanted}")


def _has_form(port: Port, array: Array) -> bool:
    return array.dtype == port.dtype and array.shape[1:] == port.shape[1:] and array.ndim == len(port.shape)


def run_rows(model: Model, feed: Feed) -> dict[str, Array]:
    """The model over any number of rows (n, ...): all at once, or, where its batch is fixed, as often as it takes.

    Raises ValueError unless all inputs have the same number of rows; the last batch is padded with its first row.
    """
    sizes = {port.shape[0] for port in model.inputs if port.shape}
    (size,) = sizes if len(sizes) == 1 else (-1,)
    rows = {len(array) for array in feed.values() if array.ndim}
    if size < 1 or rows == {size} or set(feed) != {port.name for port in model.inputs}:
        return model(feed)
    if len(rows) != 1 or not all(port.shape and port.shape[0] == size for port in model.outputs):
        raise ValueError(f"inputs: got {sorted(rows)} rows, expected {size} in each: the model's batch is fixed")
    (num,) = rows
    if num == 0:
        raise ValueError("inputs: got no rows, expected at least one")
    parts = []
    for start in range(0, num, size):
        at = np.arange(start, start + size)
        at = np.where(at < num, at, start)
        parts.append(model({name: array[at] for name, array in feed.items()}))
    return {port.name: np.concatenate([part[port.name] for part in parts])[:num] for port in model.outputs}


def format_of(name: str) -> str:
    """The graph format that a file's name says. Raises InvalidInput."""
    found = FORMAT_OF.get(PurePath(name).suffix.lower())
    if found is None:
        raise InvalidInput(f"{name}: got a file of unknown format, expected one that ends in {sorted(FORMAT_OF)}")
    return found
