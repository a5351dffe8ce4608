"""The runtimes over LiteRT and tflite-runtime: the only file that imports either. It needs neither torch nor onnx.

Both give the same ``Interpreter``. It runs on one thread, kernel after kernel, and each call copies inputs in and
outputs out: nothing that a caller holds is the interpreter's own memory, and state lives outside.

Slots lie in the file as zeros at the offsets that the manifest tells; the values of a Version are written into a
copy, which is opened then. A graph has one batch size: more samples run in several batches, fewer are padded.

The first run of a process prints one line, ``INFO: Created TensorFlow Lite XNNPACK delegate for CPU.``, on standard
error. Neither library has a setting for it. It is not filtered here: a redirected standard error would delay or
reorder the output of the app's other threads.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.manifest import Port, Signature, Slot
from fanin.edge.bundles.quantize import SlotValue, fill_slots
from fanin.edge.runtimes.base import Evaluate, Model, ModelPort, Predict, TrainStep
from fanin.edge.runtimes.flatbuffer import check_file
from fanin.edge.runtimes.graphs import Array, Feed, GraphEvaluate, GraphPredict
from fanin.edge.runtimes.models import GraphModel
from fanin.edge.runtimes.stepping import GraphTrainStep, bind_by_copy
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidBundle, InvalidInput, RuntimeMissing

if TYPE_CHECKING:
    from ai_edge_litert.interpreter import Interpreter

FORMAT: Final = "tflite"
MakeInterpreter = Callable[..., "Interpreter"]
"""From ``model_content`` and ``num_threads`` to an interpreter."""


ERRORS: Final = (ValueError, RuntimeError)
"""What an interpreter raises for a graph that it cannot open or run."""


class TfliteRuntime:
    """A ``Runtime`` over one of the libraries that have TFLite's interpreter."""

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

    def open_model(self, graph: bytes, what: str, signature: str = "") -> Model:
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
    """The runtime over LiteRT; ``plain`` runs each operator by its own kernel, fused with none: for comparison.

    Raises ModuleNotFoundError where it is not installed.
    """
    from ai_edge_litert import __version__
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    kernels = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES if plain else OpResolverType.AUTO
    return TfliteRuntime(f"ai-edge-litert {__version__}", partial(Interpreter, experimental_op_resolver_type=kernels))


def tflite_runtime() -> TfliteRuntime:
    """The runtime over tflite-runtime. Raises ModuleNotFoundError where it is not installed."""
    if int(np.__version__.partition(".")[0]) >= 2:
        raise RuntimeMissing(
            f"runtime 'tflite': tflite-runtime was built for numpy 1, got numpy {np.__version__}; "
            "pip install 'fanin[tflite]', or use LiteRT: 'fanin[litert]'"
        )
    from tflite_runtime import __version__
    from tflite_runtime.interpreter import Interpreter

    return TfliteRuntime(f"tflite-runtime {__version__}", Interpreter)


def with_slots(graph: bytes, slots: Sequence[Slot], values: Mapping[str, SlotValue]) -> bytes:
    """The file with each slot's value written over the bytes that the manifest says are its own.

    Raises InvalidBundle if one does not lie within the file.
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
                f"infer graph: slot {slot.initializer!r} takes the bytes {slot.offset} to {end} of {len(graph)}"
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
            # Threads share sums, and what one gets depends on the others: one thread gives the same bits each time.
            self._runner = interpreter(model_content=graph, num_threads=1).get_signature_runner(signature)
            self._ports = {
                "inputs": {name: _form(found) for name, found in self._runner.get_input_details().items()},
                "outputs": {name: _form(found) for name, found in self._runner.get_output_details().items()},
            }
        except ERRORS as exc:
            raise InvalidBundle(f"{self._what}: {library} cannot open it ({_one_line(exc)})") from exc

    @property
    def batch_size(self) -> int:
        """How many samples the graph takes at once."""
        return self._ports["inputs"]["x"][1][0]

    def __call__(self, outputs: Sequence[str], feed: Feed) -> Sequence[Array]:
        try:
            found = self._runner(**feed)
        except ERRORS as exc:
            raise InvalidBundle(f"{self._what}: {self._library} cannot run it ({_one_line(exc)})") from exc
        return [found[name] for name in outputs]

    def check_ports(self, signature: Signature) -> None:
        """The graph must have the ports that were signed; it has a number where those say any. Raises InvalidBundle."""
        for what, ports in (("inputs", signature.inputs), ("outputs", signature.outputs)):
            expected = {port.name: port for port in ports}
            got = self._ports[what]
            for name in sorted(got.keys() | expected.keys()):
                if name not in got or name not in expected or not _fits(expected[name], *got[name]):
                    port = expected.get(name)
                    wanted = (port.dtype, port.shape) if port else None
                    raise InvalidBundle(f"{self._what}: {what}: got {name!r} as {got.get(name)}, expected {wanted}")


def _form(details: Mapping[str, object]) -> tuple[str, tuple[int, ...]]:
    """A tensor's dtype and shape."""
    shape = details["shape"]
    assert isinstance(shape, np.ndarray)
    return np.dtype(details["dtype"]).name, tuple(int(size) for size in shape)  # type: ignore[call-overload]


def _fits(port: Port, dtype: str, shape: tuple[int, ...]) -> bool:
    return (
        port.dtype == dtype
        and len(port.shape) == len(shape)
        and all(want in (-1, got) for want, got in zip(port.shape, shape, strict=True))
    )


def _one_line(exc: Exception) -> str:
    return " ".join(str(exc).split())


Details = Mapping[str, object]
"""What the interpreter tells of a tensor."""


def _model(interpreter: "Interpreter", what: str, library: str, signature: str) -> GraphModel:
    """One Signature of a file, or its first graph if it has none ("")."""
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
            found = runner(**feed)
        except ERRORS as exc:
            raise InvalidBundle(f"{what}: {library} cannot run it ({_one_line(exc)})") from exc
        return [found[name] for name in names]

    return GraphModel(
        [_port(what, name, row) for name, row in inputs.items()],
        [_port(what, name, row) for name, row in outputs.items()],
        run,
    )


def _by_name(kind: str, rows: Sequence[Details]) -> dict[str, Details]:
    """Tensors under their own names; where a file has none, or one twice, under their positions."""
    names = [str(row["name"]) for row in rows]
    if "" in names or len(set(names)) != len(names):
        names = [f"{kind}{index}" for index in range(len(rows))]
    return dict(zip(names, rows, strict=True))


class _Tensors:
    """A graph without a Signature, called like one that has it."""

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
    """A tensor's facts; -1 where its file says that a length may vary. Raises InvalidBundle."""
    dtype, _ = _form(details)
    if np.dtype(dtype).kind not in "biuf":
        raise InvalidBundle(f"{what}: {name!r} is {dtype}, expected numbers")
    shape, quantization = details["shape_signature"], details["quantization"]
    assert isinstance(shape, np.ndarray) and isinstance(quantization, tuple)
    scale, zero_point = quantization
    sizes = tuple(int(size) for size in shape)
    return ModelPort(name=name, dtype=dtype, shape=sizes, scale=float(scale), zero_point=int(zero_point))
