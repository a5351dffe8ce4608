"""The interface that LiteRT and tflite-runtime share: their ``Interpreter``. It imports neither library, only a type.

The XNNPACK delegate, which both libraries use by default, refuses a product whose output is much narrower than its
factors allow: a scale of the output below 1/256 of the product of their scales. A Version may have such ranges, for
example if a layer is almost dead. Its graph then runs without the delegate.

An interpreter runs on one thread, kernel after kernel. Each call copies inputs in and outputs out, so a caller never
holds the interpreter's own memory. Slots are filled in a copy of the file. A graph has one batch size.

The first run of a process prints one line, ``INFO: Created TensorFlow Lite XNNPACK delegate for CPU.``, on standard
error. Neither library has a setting for it. It is not filtered here: a redirected standard error would delay or
reorder the output of the app's other threads.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from fanin.edge.runtimes.base import ModelPort
from fanin.edge.runtimes.engine import Feed, GraphEngine, GraphFile, LoadedGraph
from fanin.edge.runtimes.engines.flatbuffer import check_file
from fanin.edge.tensors import Array
from fanin.protos.errors import InvalidBundle, InvalidInput

if TYPE_CHECKING:
    from ai_edge_litert.interpreter import Interpreter

MakeInterpreter = Callable[..., "Interpreter"]
"""(``model_content``, ``num_threads``) -> an interpreter."""
ERRORS: Final = (ValueError, RuntimeError)
"""Exceptions of an interpreter for a graph that it cannot open or run."""
Details = Mapping[str, object]
"""The interpreter's description of a tensor."""


def interpreter_engine(
    name: str, version: str, interpreter: "MakeInterpreter", plain: "MakeInterpreter"
) -> GraphEngine:
    """Return the engine over a library with TFLite's interpreter.

    Args:
        name: Name of the library.
        version: Its version.
        interpreter: Its interpreter.
        plain: Its interpreter without delegates, for a Version that they refuse.
    """
    load = partial(_load, interpreter=interpreter, plain=plain)
    return GraphEngine(name=name, version=version, graph_format="tflite", load=load, errors=ERRORS)


def _load(file: GraphFile, *, interpreter: "MakeInterpreter", plain: "MakeInterpreter") -> LoadedGraph:
    data = file.filled()
    check_file(data, file.what)
    inputs, outputs, runner = _opened(file, data, interpreter)
    # Only the values of slots make a graph that the delegate accepted at the export one that it refuses.
    others = [] if not file.slots or plain is interpreter else [plain]

    def run(names: Sequence[str], feed: Feed) -> Sequence[Array]:
        nonlocal runner
        try:
            arrays = runner(**feed)
        except ERRORS:
            if not others:
                raise
            _, _, runner = _opened(file, data, others.pop())
            arrays = runner(**feed)
        return [arrays[name] for name in names]

    return LoadedGraph(
        inputs=tuple(_port(file.what, name, row) for name, row in inputs.items()),
        outputs=tuple(_port(file.what, name, row) for name, row in outputs.items()),
        run=run,
    )


def _opened(
    file: GraphFile, data: bytes, interpreter: "MakeInterpreter"
) -> tuple[dict[str, Details], dict[str, Details], Callable[..., Mapping[str, Array]]]:
    """Return the inputs and outputs of a graph by name, and the function that runs it."""
    # With several threads the order of a sum varies; one thread gives bit-identical results.
    opened = interpreter(model_content=data, num_threads=1)
    signatures = sorted(opened.get_signature_list())
    if (file.signature or len(signatures) > 1) and file.signature not in signatures:
        raise InvalidInput(
            f"{file.what}: got signature {file.signature!r}, expected one of {signatures}", code="FN-0325"
        )
    signature = file.signature or "".join(signatures)
    if signature:
        runner = opened.get_signature_runner(signature)
        return runner.get_input_details(), runner.get_output_details(), runner
    opened.allocate_tensors()
    inputs = _by_name("input", opened.get_input_details())
    outputs = _by_name("output", opened.get_output_details())
    return inputs, outputs, _Tensors(opened, inputs, outputs)


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
    dtype = np.dtype(details["dtype"]).name  # type: ignore[call-overload]
    if np.dtype(dtype).kind not in "biuf":
        raise InvalidBundle(f"{what}: {name!r} is {dtype}, expected numbers", code="FN-0410")
    shape, quantization = details["shape_signature"], details["quantization"]
    assert isinstance(shape, np.ndarray) and isinstance(quantization, tuple)
    scale, zero_point = quantization
    sizes = tuple(int(size) for size in shape)
    return ModelPort(name=name, dtype=dtype, shape=sizes, scale=float(scale), zero_point=int(zero_point))
