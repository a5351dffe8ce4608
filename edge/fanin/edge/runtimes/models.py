"""Graph files from any source as callables, the stateless ``preprocess`` Signature, and the graph that measures ranges.

Inputs are checked against the file's own ports before the library receives them. Quantized inputs and outputs follow
``value = scale * (stored - zero_point)``. TFLite states scale and zero point for inputs and outputs; ONNX computes with
them inside the graph.

Reference:
    Jacob et al. 2018, arXiv 1712.05877, section 2.1.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

import numpy as np

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.lengths import TARGETS
from fanin.edge.runtimes.base import Inputs, LoadedModel, ModelPort, NamedInputs, Preprocess, Runtime
from fanin.edge.runtimes.buckets.dispatch import fitted, shortest
from fanin.edge.runtimes.engine import Feed, RunGraph
from fanin.edge.runtimes.graphs import (
    NO_TOKEN,
    check_labels,
    check_names,
    check_port,
    check_tokens,
    fits,
    form_of,
    input_names,
    num_rows,
    padded_rows,
)
from fanin.edge.signatures import Port, Ports
from fanin.edge.tensors import Array, Float32s
from fanin.protos.errors import InvalidBundle

PREPROCESS: Final = "preprocess"
RAW: Final = "raw"


class GraphModel:
    """A ``LoadedModel`` over any engine that can run a named graph."""

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
        arrays = self._run([port.name for port in self._outputs], feed)
        return {port.name: array for port, array in zip(self._outputs, arrays, strict=True)}


def quantize_input(port: ModelPort, values: Array) -> Array:
    """Return values as the port stores them. Ties round away from zero, as in TFLite.

    Raises:
        ValueError: The port has no scale, or a value is not finite.
    """
    if not port.scale or np.dtype(port.dtype).kind not in "iu":
        raise ValueError(f"{port.name}: got {values.dtype}, expected {port.dtype}: the file has no scale for it")
    exact = values.astype(np.float64) / port.scale
    if not np.isfinite(exact).all():
        raise ValueError(f"{port.name}: got values that are not finite, expected none")
    bounds = np.iinfo(port.dtype)
    rounded = np.trunc(exact + np.copysign(0.5, exact)) + port.zero_point
    stored: Array = np.clip(rounded, bounds.min, bounds.max).astype(port.dtype)
    return stored


def dequantize_output(port: ModelPort, stored: Array) -> Array:
    """Return the float32 values that stored values represent, or ``stored`` itself for a port without a scale."""
    if not port.scale:
        return stored
    values: Float32s = (port.scale * (stored.astype(np.float64) - port.zero_point)).astype(np.float32)
    return values


def feed_of(port: ModelPort, array: Array) -> Array:
    """Return an array in the input's dtype: floats for an integer input are quantized with the file's scale."""
    if array.dtype.kind != "f":
        return array
    if port.scale and np.dtype(port.dtype).kind in "iu":
        return quantize_input(port, array)
    # numpy creates float64 by default.
    return array.astype(np.float32) if port.dtype == "float32" else array


class GraphPreprocess:
    """A ``Preprocess`` over a graph file. A graph with a fixed batch size runs once per padded batch."""

    def __init__(self, bundle: Bundle, runtime: Runtime) -> None:
        (self._raw,), (self._x,) = preprocess_ports(bundle)
        what = f"{PREPROCESS} graph"
        self._model = runtime.open_model(bundle.graph(PREPROCESS, runtime.graph_format), what, PREPROCESS)
        for ports, port in ((self._model.inputs, self._raw), (self._model.outputs, self._x)):
            actual = {own.name: (own.dtype, own.shape[1:]) for own in ports}
            if actual != {port.name: (port.dtype, port.shape[1:])}:
                raise InvalidBundle(
                    f"{what}: got {actual}, expected {port.name!r} as {form_of(port.dtype, port.shape)}", code="FN-0417"
                )

    def __call__(self, raw: Inputs) -> Inputs:
        check_port(self._raw, raw)
        if len(raw) == 0:
            empty: Inputs = np.empty((0, *self._x.shape[1:]), self._x.dtype)
            return empty
        output = run_rows(self._model, {RAW: raw})[self._x.name]
        check_port(self._x, output)
        x: Inputs = output  # type: ignore[assignment]  # the dtype is the port's, as just checked
        return x


def preprocess_ports(bundle: Bundle) -> Ports:
    """Return the ports of ``preprocess``: the input ``raw``, and outputs equal to the inputs of ``infer``.

    Raises:
        InvalidBundle: The Signature has other ports.
    """
    signature, infer = bundle.manifest.signatures[PREPROCESS], bundle.manifest.signatures["infer"]
    is_single = len(infer.inputs) == 1
    if [port.name for port in signature.inputs] != [RAW] or signature.outputs != infer.inputs or not is_single:
        raise InvalidBundle(
            f"bundle: signature {PREPROCESS!r} has the inputs {_forms(signature.inputs)} and the outputs "
            f"{_forms(signature.outputs)}, expected the input {RAW!r}, and one output like the only input of 'infer', "
            f"which has {_forms(infer.inputs)}; export the Bundle again",
            code="FN-0417",
        )
    return signature.inputs, signature.outputs


def _forms(ports: tuple[Port, ...]) -> str:
    """Return names, dtypes and shapes of ports for an error."""
    return ", ".join(f"{port.name!r} as {form_of(port.dtype, port.shape)}" for port in ports) or "none"


def open_preprocess(runtime: Runtime, bundle: Bundle) -> Preprocess | None:
    """Open the Bundle's ``preprocess`` Signature. Returns None if there is none; raises InvalidBundle."""
    return GraphPreprocess(bundle, runtime) if PREPROCESS in bundle.manifest.signatures else None


def model_inputs(bundle: Bundle, inputs: NamedInputs, preprocess: Preprocess | None) -> NamedInputs:
    """Return inputs for the Bundle's model.

    Args:
        bundle: Has the model.
        inputs: Arrays by name, each (n, ...). Model inputs are returned unchanged, without arrays of other names. Raw
            data with the name of the only input is preprocessed. Inputs of a model with lengths are cut or
            padded to the smallest one that holds all rows.
        preprocess: The Bundle's ``preprocess``, if there is one.

    Raises:
        ValueError: An input is missing, or has another dtype, shape or number of samples. Or it has a token outside the
            vocabulary, or a row longer than the longest length. The text names it.
        InvalidBundle: The ``infer`` Signature has no inputs, or ones with the names of other ports.
    """
    names, ports = input_names(bundle.manifest), bundle.manifest.signatures["infer"].inputs
    if missing := [name for name in names if name not in inputs]:
        raise ValueError(f"inputs: got the arrays {sorted(inputs)}, expected {sorted(names)}; add {missing}")
    chosen = inputs if inputs.keys() == set(names) else {name: inputs[name] for name in names}
    num_rows(chosen)
    if (lengths := bundle.manifest.lengths) is not None:
        size = shortest(lengths, chosen)
        chosen, ports = fitted(lengths, chosen, size), bundle.manifest.at(size).signatures["infer"].inputs
    if preprocess is not None and not _hasform_of(ports[0], chosen[names[0]]):
        ((raw,), _) = preprocess_ports(bundle)
        if _hasform_of(raw, chosen[names[0]]):
            return {names[0]: preprocess(chosen[names[0]])}
        _refuse(ports[0], chosen[names[0]], f", or raw as {form_of(raw.dtype, raw.shape)}")
    for port in ports:
        if not _hasform_of(port, chosen[port.name]):
            can_preprocess = len(names) == 1 and bundle.manifest.lengths is None
            _refuse(port, chosen[port.name], _input_remedy(port, chosen[port.name], can_preprocess=can_preprocess))
        check_tokens(port.name, chosen[port.name], bundle.manifest.num_tokens.get(port.name, 0))
    return chosen


def check_targets(manifest: Manifest, y: Inputs) -> None:
    """Check all targets (n, ...) of a device.

    Raises:
        ValueError: They have another dtype or shape than the model's, or labels that are no classes.
    """
    view = manifest if manifest.lengths is None else manifest.at(manifest.lengths.sizes[-1])
    port = next((port for port in view.signatures["train"].inputs if port.name == "y"), None)
    if port is None:
        return
    expected = (-1, *port.shape[1:])
    if manifest.lengths is not None:
        # Targets with a length are cut and padded with their inputs.
        expected = manifest.lengths.shape_like(TARGETS, expected, y.shape)
    if y.dtype != port.dtype or not fits(expected, y.shape):
        raise ValueError(
            f"y: got {form_of(y.dtype, y.shape)}, expected {form_of(port.dtype, expected)}"
            f"{_target_remedy(manifest.num_classes, y, port)}"
        )
    if manifest.num_classes:
        try:
            check_labels(y, manifest.num_classes)
        except ValueError as exc:
            raise ValueError(f"{exc}{label_remedy(y, manifest.num_classes)}") from exc


def label_remedy(y: Inputs, num_classes: int) -> str:
    """Return the remedy for labels that are no classes: "" unless they are counted from 1."""
    labels = y[y != NO_TOKEN]
    if not labels.size or labels.min() < 1 or labels.max() != num_classes:
        return ""
    return f"; count classes from 0: y - 1, or set num_classes={num_classes + 1} in the App"


def _refuse(port: Port, array: Array, alternative: str) -> NoReturn:
    raise ValueError(
        f"{port.name}: got {form_of(array.dtype, array.shape)}, expected {form_of(port.dtype, port.shape)}{alternative}"
    )


def _input_remedy(port: Port, x: Array, *, can_preprocess: bool) -> str:
    """Return how to convert an input (n, ...) to the form that a model expects; "" if that is unknown.

    Args:
        port: The form.
        x: The input.
        can_preprocess: Whether an App with this input may have ``preprocess``.
    """
    rows, wanted = x.shape[1:], port.shape[1:]
    if x.dtype == np.uint8 and can_preprocess and port.dtype == "float32":
        return "; scale the values as the App's calibration data, or give the App a preprocess= for raw ones"
    if rows == wanted:
        return f"; convert it by {port.name}.astype({port.dtype!r})"
    if len(rows) == len(wanted) > 1 and (*rows[-1:], *rows[:-1]) == wanted:
        return "; channels are the first dimension of a sample: np.moveaxis(x, -1, 1)"
    if -1 not in wanted and np.prod(rows, dtype=int) == np.prod(wanted, dtype=int):
        return f"; x.reshape(-1, {', '.join(map(str, wanted))}) has this shape"
    return ""


def _target_remedy(num_classes: int, y: Inputs, port: Port) -> str:
    expected = port.shape[1:]
    if num_classes and (axis := extra_axis(y.shape[1:], expected, num_classes)):
        return f"; convert one-hot values by y.argmax({axis}).astype('int32')"
    if axis := extra_axis(y.shape[1:], expected, 1):
        return f"; remove a dimension by y.squeeze({axis})"
    if (*y.shape[1:], 1) == expected:
        return "; add a dimension by y[..., None]"
    return f"; convert it by y.astype({port.dtype!r})" if fits((-1, *expected), y.shape) else ""


def extra_axis(sample: Sequence[int], expected: Sequence[int], size: int) -> int:
    """Return the axis in a batch that the shape of a sample has in excess, -1 for the last one; 0 if there is none.

    Args:
        sample: The shape of a sample.
        expected: The shape that it should have.
        size: Length of the axis in excess.
    """
    for index in reversed(range(len(sample))):
        if sample[index] == size and (*sample[:index], *sample[index + 1 :]) == (*expected,):
            return -1 if index == len(sample) - 1 else index + 1
    return 0


def _hasform_of(port: Port, array: Array) -> bool:
    return array.dtype == port.dtype and array.shape[1:] == port.shape[1:] and array.ndim == len(port.shape)


def run_rows(model: LoadedModel, feed: Feed) -> dict[str, Array]:
    """Run a model over any number of rows.

    A model with a fixed batch size runs once per batch. The last batch is padded with its first row.

    Args:
        model: The model.
        feed: Inputs (n, ...) by name.

    Returns:
        Outputs (n, ...) by name.

    Raises:
        ValueError: The inputs differ in their number of rows, or there is no row for a model with a fixed batch size.
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
    parts = [
        model({name: padded_rows(array, start, size) for name, array in feed.items()}) for start in range(0, num, size)
    ]
    return {port.name: np.concatenate([part[port.name] for part in parts])[:num] for port in model.outputs}


class GraphRanges:
    """A ``MeasureRanges`` over a graph.

    One example runs at a time: the first dimension of an inner tensor need not be the batch.

    Args:
        model: The graph.
        names: Names of the model's inputs.
        constants: The other inputs of the graph: parameters and the tensors derived from them.
        outputs: For each activation, the outputs with its lowest and with its highest value.
    """

    def __init__(
        self,
        model: LoadedModel,
        names: Sequence[str],
        constants: Mapping[str, Array],
        outputs: Sequence[tuple[str, str]],
    ) -> None:
        self._model, self._names, self._constants, self._outputs = model, names, constants, outputs

    def __call__(self, inputs: NamedInputs) -> tuple[Float32s, Float32s]:
        check_names(inputs, self._names)
        num = num_rows(inputs)
        extremes = np.zeros((2, num, len(self._outputs)), np.float32)
        for row in range(num):
            example = {name: array[row : row + 1] for name, array in inputs.items()}
            arrays = self._model({**example, **self._constants})
            for column, (lowest, highest) in enumerate(self._outputs):
                extremes[:, row, column] = arrays[lowest].min(initial=np.inf), arrays[highest].max(initial=-np.inf)
        return extremes[0], extremes[1]
