"""The runtime over onnxruntime. No other file imports it, and it needs neither torch nor the onnx package.

Sessions run on one thread, node after node, with deterministic kernels. So equal inputs give bit-identical outputs on
one build and instruction set (``tests/twins/test_train_step.py``).

Slots are filled by ``add_external_initializers``, which supplies their data *before* the graph is optimized.
``add_initializer`` supplies it after the optimization. By then the optimizer has folded values from the file (the
scales of a convolution before a ReLU, a GroupNorm's weight), and the results would be wrong without an error.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as library

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.manifest import Port, Signature
from fanin.edge.bundles.quantize import SlotValue, fill_slots
from fanin.edge.runtimes.base import Evaluate, LoadedModel, ModelPort, Predict, TrainStep
from fanin.edge.runtimes.graphs import Feed, GraphEvaluate, GraphPredict
from fanin.edge.runtimes.models import GraphModel
from fanin.edge.runtimes.stepping import GraphTrainStep
from fanin.edge.tensors import Array, Float32s
from fanin.protos.errors import InvalidBundle

FORMAT: Final = "onnx"
FATAL_ONLY: Final = 4
"""The library's log level. Our exceptions contain the messages that it would write to stderr."""
DTYPES: Final = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(bool)": "bool",
    **{f"tensor({sign}int{bits})": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
"""numpy's name of each element type that numpy supports."""
GRAPH_ERRORS: Final = (
    library.EPFail,
    library.Fail,
    library.InvalidArgument,
    library.InvalidGraph,
    library.InvalidProtobuf,
    library.NoModel,
    library.NoSuchFile,
    library.NotFound,
    library.NotImplemented,
    library.RuntimeException,
)


class OnnxRuntime:
    """A ``Runtime`` over onnxruntime's CPU provider.

    Args:
        plain: Disable graph optimization, so that no operators are fused. Slower; for comparison.
    """

    def __init__(self, *, plain: bool = False) -> None:
        self._plain = plain

    @property
    def name(self) -> str:
        return f"onnxruntime {onnxruntime.__version__}"

    @property
    def graph_format(self) -> str:
        return FORMAT

    def open_train(self, bundle: Bundle) -> TrainStep:
        return GraphTrainStep(bundle.manifest, self._open(bundle, "train", {}).bind)

    def open_evaluate(self, bundle: Bundle) -> Evaluate:
        return GraphEvaluate(bundle.manifest, self._open(bundle, "evaluate", {}))

    def open_predict(self, bundle: Bundle, parameters: Float32s) -> Predict:
        manifest = bundle.manifest
        values = fill_slots(manifest.slots.get(FORMAT, ()), manifest.table, parameters, manifest.derived)
        try:
            return GraphPredict(manifest, self._open(bundle, "infer", values, exact=True))
        except InvalidBundle:
            # onnxruntime 1.31 cannot open a graph with exact kernels if two products share a weight.
            return GraphPredict(manifest, self._open(bundle, "infer", values))

    def open_model(self, graph: bytes, what: str, signature: str = "") -> LoadedModel:
        session = _Graph(graph, what, {}, self._options())
        inputs, outputs = session.ports()
        return GraphModel(inputs, outputs, session)

    def _open(self, bundle: Bundle, signature: str, slots: Mapping[str, SlotValue], *, exact: bool = False) -> "_Graph":
        """Open a Signature's graph.

        Args:
            bundle: Has the graph.
            signature: Name of the Signature.
            slots: Values of the slots.
            exact: Use int8 kernels that do not saturate. By default x86 processors without VNNI add pairs of 8-bit
                products in 16 bits, which saturate. With this option an int8 model gives the same logits on every
                processor. Other processors ignore it.
        """
        options = self._options()
        if exact:
            options.add_session_config_entry("session.x64quantprecision", "1")
        graph = _Graph(bundle.graph(signature, FORMAT), f"{signature} graph", slots, options)
        graph.check_ports(bundle.manifest.signatures[signature])
        return graph

    def _options(self) -> onnxruntime.SessionOptions:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.use_deterministic_compute = True
        options.log_severity_level = FATAL_ONLY
        # By default the library also rounds the activations of a product with an int8 weight to 8 bits.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        if self._plain:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return options


class _Graph:
    """A ``RunGraph`` and a ``BindGraph`` over one session."""

    def __init__(
        self, graph: bytes, what: str, slots: Mapping[str, SlotValue], options: onnxruntime.SessionOptions
    ) -> None:
        # An OrtValue is a view of its array, and the session may hold a view of the OrtValue: keep both alive.
        self._slots = slots
        self._values = [onnxruntime.OrtValue.ortvalue_from_numpy(value) for value in slots.values()]
        if slots:
            options.add_external_initializers(list(slots), self._values)
        self._what = what
        try:
            self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        # For a damaged file the library raises a plain RuntimeError, or a message that is not valid UTF-8.
        except (*GRAPH_ERRORS, RuntimeError, UnicodeDecodeError) as exc:
            raise InvalidBundle(f"{what}: onnxruntime cannot open it ({exc})") from exc

    def __call__(self, outputs: Sequence[str], feed: Feed) -> Sequence[Array]:
        try:
            arrays: Sequence[Array] = self._session.run(outputs, feed)
        except GRAPH_ERRORS as exc:
            raise InvalidBundle(f"{self._what}: onnxruntime cannot run it ({exc})") from exc
        return arrays

    def bind(self, inputs: Feed, outputs: Feed) -> Callable[[], None]:
        """Return a function that runs the graph on these arrays without copies.

        No array may be both an input and an output.
        """
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        # The binding holds addresses only, so the closure must keep the arrays alive.
        arrays = (inputs, outputs)

        def run() -> None:
            assert arrays, "held by this function"
            try:
                self._session.run_with_iobinding(binding)
            except (*GRAPH_ERRORS, RuntimeError) as exc:
                raise InvalidBundle(f"{self._what}: onnxruntime cannot run it ({exc})") from exc

        return run

    def ports(self) -> tuple[list[ModelPort], list[ModelPort]]:
        """Return the graph's inputs and outputs. Raises InvalidBundle for an element type that numpy lacks."""
        rows = (self._session.get_inputs(), self._session.get_outputs())
        for node in (*rows[0], *rows[1]):
            if node.type not in DTYPES:
                raise InvalidBundle(f"{self._what}: {node.name!r} is {node.type}, expected one of {sorted(DTYPES)}")
        inputs, outputs = (
            [ModelPort(name=node.name, dtype=DTYPES[node.type], shape=_shape(node)) for node in row] for row in rows
        )
        return inputs, outputs

    def check_ports(self, signature: Signature) -> None:
        """Raise InvalidBundle unless the graph has exactly the inputs and outputs of the signed manifest."""
        _check_ports(f"{self._what}: inputs", self._session.get_inputs(), signature.inputs)
        _check_ports(f"{self._what}: outputs", self._session.get_outputs(), signature.outputs)


def _check_ports(what: str, nodes: Sequence[onnxruntime.NodeArg], ports: Sequence[Port]) -> None:
    actual = {node.name: (DTYPES.get(node.type, node.type), _shape(node)) for node in nodes}
    expected = {port.name: (port.dtype, port.shape) for port in ports}
    if actual != expected:
        wrong = sorted(name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name))
        name = wrong[0]
        raise InvalidBundle(f"{what}: got {name!r} as {actual.get(name)}, expected {expected.get(name)}")


def _shape(node: onnxruntime.NodeArg) -> tuple[int, ...]:
    # A dimension of variable length has a name in the graph instead of a number.
    return tuple(dim if isinstance(dim, int) else -1 for dim in node.shape)
