"""The runtimes over LiteRT and tflite-runtime. No other file imports them, and they need neither torch nor onnx.

Both libraries provide the same ``Interpreter``. It runs on one thread, kernel after kernel. Each call copies inputs in
and outputs out, so a caller never holds the interpreter's own memory.

A slot is a range of zeros in the file at the offset in the manifest. The values of a Version are written into a copy of
the file, and the copy is opened. A graph has one batch size: more samples run in several batches, fewer are padded.

The first run of a process prints one line, ``INFO: Created TensorFlow Lite XNNPACK delegate for CPU.``, on standard
error. Neither library has a setting for it. It is not filtered here: a redirected standard error would delay or
reorder the output of the app's other threads.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.manifest import Port, Signature
from fanin.edge.bundles.quantize import SlotValue, fill_slots
from fanin.edge.bundles.slots import Slot
from fanin.edge.runtimes.base import Evaluate, LoadedModel, ModelPort, Predict, TrainStep
from fanin.edge.runtimes.flatbuffer import check_file
from fanin.edge.runtimes.graphs import Feed, GraphEvaluate, GraphPredict
from fanin.edge.runtimes.models import GraphModel
from fanin.edge.runtimes.stepping import GraphTrainStep, bind_by_copy
from fanin.edge.tensors import Array, Float32s
from fanin.protos.errors import InvalidBundle, InvalidInput, RuntimeMissing

if TYPE_CHECKING:
    from ai_edge_litert.interpreter import Interpreter

FORMAT: Final = "tflite"
MakeInterpreter = Callable[..., "Interpreter"]
"""(``model_content``, ``num_threads``) -> an interpreter."""


ERRORS: Final = (ValueError, RuntimeError)
"""Exceptions of an interpreter for a graph that it cannot open or run."""


class TfliteRuntime:
    """A ``Runtime`` over a library with TFLite's interpreter."""

    def __init__(self, name: str, interpreter: "MakeInterpreter") -> None:
        self._name = name
        self._interpreter = interpreter

    @property
    def name(self) -> str:
        return self._name

    @property
    def graph_format(self) -> str:
        return FORMAT

    def open_train(self, bundle: Bundle) -> TrainStep:
        opened = self._open(bundle, "train", bundle.graph("train", FORMAT))
        return GraphTrainStep(bundle.manifest, bind_by_copy(opened))

    def open_evaluate(self, bundle: Bundle) -> Evaluate:
        return GraphEvaluate(bundle.manifest, self._open(bundle, "evaluate", bundle.graph("evaluate", FORMAT)))

    def open_predict(self, bundle: Bundle, parameters: Float32s) -> Predict:
        slots = bundle.manifest.slots.get(FORMAT, ())
        values = fill_slots(slots, bundle.manifest.table, parameters, bundle.manifest.derived)
        graph = with_slots(bundle.graph("infer", FORMAT), slots, values)
        opened = self._open(bundle, "infer", graph)
        return GraphPredict(bundle.manifest, opened, fixed_batch=opened.batch_size)

    def open_model(self, graph: bytes, what: str, signature: str = "") -> LoadedModel:
        check_file(graph, what)
        try:
            interpreter = self._interpreter(model_content=graph, num_threads=1)
            signatures = sorted(interpreter.get_signature_list())
            if (signature or len(signatures) > 1) and signature not in signatures:
                raise InvalidInput(f"{what}: got signature {signature!r}, expected one of {signatures}")
            return _model(interpreter, what, self.name, signature or "".join(signatures))
        except ERRORS as exc:
            raise InvalidBundle(f"{what}: {self.name} cannot open it ({_one_line(exc)})") from exc

    def _open(self, bundle: Bundle, signature: str, graph: bytes) -> "_Graph":
        opened = _Graph(graph, signature, self.name, self._interpreter)
        opened.check_ports(bundle.manifest.signatures[signature])
        return opened


def lite_rt(*, plain: bool = False) -> TfliteRuntime:
    """Open the runtime over LiteRT.

    Args:
        plain: Run each operator by its own kernel, without the XNNPACK delegate; for comparison.

    Raises:
        ModuleNotFoundError: LiteRT is not installed.
    """
    from ai_edge_litert import __version__
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    kernels = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES if plain else OpResolverType.AUTO
    return TfliteRuntime(f"ai-edge-litert {__version__}", partial(Interpreter, experimental_op_resolver_type=kernels))


def tflite_runtime() -> TfliteRuntime:
    """Open the runtime over tflite-runtime.

    Raises:
        ModuleNotFoundError: tflite-runtime is not installed.
        RuntimeMissing: numpy 2 is installed, for which the library was not built.
    """
    if int(np.__version__.partition(".")[0]) >= 2:
        raise RuntimeMissing(
            f"runtime 'tflite': tflite-runtime was built for numpy 1, got numpy {np.__version__}; "
            "pip install 'fanin[tflite]', or use LiteRT: 'fanin[litert]'"
        )
    from tflite_runtime import __version__
    from tflite_runtime.interpreter import Interpreter

    return TfliteRuntime(f"tflite-runtime {__version__}", Interpreter)


def with_slots(graph: bytes, slots: Sequence[Slot], values: Mapping[str, SlotValue]) -> bytes:
    """Return a copy of a file with the slots' values written at their offsets.

    Args:
        graph: The file of the ``infer`` graph.
        slots: Its slots.
        values: Their values by initializer.

    Raises:
        InvalidBundle: A slot is outside the file.
    """
    if not slots:
        return graph
    filled = np.frombuffer(graph, np.uint8).copy()
    for slot in slots:
        value = values[slot.initializer]
        data = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
        end = slot.offset + data.nbytes
        if slot.offset < 0 or end > len(graph):
            raise InvalidBundle(
                f"infer graph: slot {slot.initializer!r} has the bytes {slot.offset} to {end}, "
                f"expected a range within the file's {len(graph)}"
            )
        filled[slot.offset : end] = data.reshape(-1).view(np.uint8)
    return filled.tobytes()


class _Graph:
    """A ``RunGraph`` over one Signature of a file."""

    def __init__(self, graph: bytes, signature: str, library: str, interpreter: "MakeInterpreter") -> None:
        self._what = f"{signature} graph"
        self._library = library
        check_file(graph, self._what)
        try:
            # With several threads the order of a sum varies; one thread gives bit-identical results.
            self._runner = interpreter(model_content=graph, num_threads=1).get_signature_runner(signature)
            self._ports = {
                "inputs": {name: _form(details) for name, details in self._runner.get_input_details().items()},
                "outputs": {name: _form(details) for name, details in self._runner.get_output_details().items()},
            }
        except ERRORS as exc:
            raise InvalidBundle(f"{self._what}: {library} cannot open it ({_one_line(exc)})") from exc

    @property
    def batch_size(self) -> int:
        """The fixed batch size of the graph."""
        return self._ports["inputs"]["x"][1][0]

    def __call__(self, outputs: Sequence[str], feed: Feed) -> Sequence[Array]:
        try:
            arrays = self._runner(**feed)
        except ERRORS as exc:
            raise InvalidBundle(f"{self._what}: {self._library} cannot run it ({_one_line(exc)})") from exc
        return [arrays[name] for name in outputs]

    def check_ports(self, signature: Signature) -> None:
        """Raise InvalidBundle unless the graph has the inputs and outputs of the signed manifest.

        A dimension that is variable in the manifest has a fixed length in the graph.
        """
        for what, ports in (("inputs", signature.inputs), ("outputs", signature.outputs)):
            expected = {port.name: port for port in ports}
            actual = self._ports[what]
            for name in sorted(actual.keys() | expected.keys()):
                if name not in actual or name not in expected or not _fits(expected[name], *actual[name]):
                    port = expected.get(name)
                    form = (port.dtype, port.shape) if port else None
                    raise InvalidBundle(f"{self._what}: {what}: got {name!r} as {actual.get(name)}, expected {form}")


def _form(details: Mapping[str, object]) -> tuple[str, tuple[int, ...]]:
    """Return a tensor's dtype and shape."""
    shape = details["shape"]
    assert isinstance(shape, np.ndarray)
    return np.dtype(details["dtype"]).name, tuple(int(size) for size in shape)  # type: ignore[call-overload]


def _fits(port: Port, dtype: str, shape: tuple[int, ...]) -> bool:
    return (
        port.dtype == dtype
        and len(port.shape) == len(shape)
        and all(expected in (-1, length) for expected, length in zip(port.shape, shape, strict=True))
    )


def _one_line(exc: Exception) -> str:
    return " ".join(str(exc).split())


Details = Mapping[str, object]
"""The interpreter's description of a tensor."""


def _model(interpreter: "Interpreter", what: str, library: str, signature: str) -> GraphModel:
    """Return a signature of a file as a model; with "", its first graph."""
    if signature:
        runner = interpreter.get_signature_runner(signature)
        inputs, outputs = runner.get_input_details(), runner.get_output_details()
    else:
        interpreter.allocate_tensors()
        inputs = _by_name("input", interpreter.get_input_details())
        outputs = _by_name("output", interpreter.get_output_details())
        runner = _Tensors(interpreter, inputs, outputs)

    def run(names: Sequence[str], feed: Feed) -> Sequence[Array]:
        try:
            arrays = runner(**feed)
        except ERRORS as exc:
            raise InvalidBundle(f"{what}: {library} cannot run it ({_one_line(exc)})") from exc
        return [arrays[name] for name in names]

    return GraphModel(
        [_port(what, name, row) for name, row in inputs.items()],
        [_port(what, name, row) for name, row in outputs.items()],
        run,
    )


def _by_name(kind: str, rows: Sequence[Details]) -> dict[str, Details]:
    """Return tensors by name, or by position if a name is empty or repeated."""
    names = [str(row["name"]) for row in rows]
    if "" in names or len(set(names)) != len(names):
        names = [f"{kind}{index}" for index in range(len(rows))]
    return dict(zip(names, rows, strict=True))


class _Tensors:
    """A graph without a signature, with the interface of a signature runner."""

    def __init__(self, interpreter: "Interpreter", inputs: Mapping[str, Details], outputs: Mapping[str, Details]):
        self._interpreter, self._inputs, self._outputs = interpreter, inputs, outputs

    def __call__(self, **feed: Array) -> dict[str, Array]:
        for name, array in feed.items():
            self._interpreter.resize_tensor_input(self._inputs[name]["index"], array.shape)
        self._interpreter.allocate_tensors()
        for name, array in feed.items():
            self._interpreter.set_tensor(self._inputs[name]["index"], array)
        self._interpreter.invoke()
        return {name: self._interpreter.get_tensor(row["index"]) for name, row in self._outputs.items()}


def _port(what: str, name: str, details: Details) -> ModelPort:
    """Return a tensor's facts. Raises InvalidBundle if it does not hold numbers."""
    dtype, _ = _form(details)
    if np.dtype(dtype).kind not in "biuf":
        raise InvalidBundle(f"{what}: {name!r} is {dtype}, expected numbers")
    shape, quantization = details["shape_signature"], details["quantization"]
    assert isinstance(shape, np.ndarray) and isinstance(quantization, tuple)
    scale, zero_point = quantization
    sizes = tuple(int(size) for size in shape)
    return ModelPort(name=name, dtype=dtype, shape=sizes, scale=float(scale), zero_point=int(zero_point))
