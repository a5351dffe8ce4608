"""onnxruntime as an engine. It needs neither torch nor the onnx package.

Sessions run on one thread, node after node, with deterministic kernels. So equal inputs give bit-identical outputs on
one build and instruction set (``tests/twins/test_train_step.py``).

Slots are filled by ``add_external_initializers``, which supplies their data *before* the graph is optimized.
``add_initializer`` supplies it after the optimization. At that time the optimizer has already folded values from the
file, such as a GroupNorm's weight or the scales of a convolution before a ReLU. The results would be wrong without an
error.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as library

from fanin.edge.bundles.initializers import list_nodes
from fanin.edge.runtimes.base import ModelPort
from fanin.edge.runtimes.engine import Feed, GraphEngine, GraphFile, LoadedGraph
from fanin.edge.tensors import Array
from fanin.protos.errors import InvalidBundle

# ``fanin.edge`` switches telemetry off by a variable. This does so where the app has imported the library before.
onnxruntime.disable_telemetry_events()

LOG: Final = logging.getLogger("fanin.edge.runtimes")
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
INT8_ACTIVATIONS: Final = ("Quantize", "QLinear", "QGemm", "QAttention", "Integer")
"""Parts of the names of operators whose activations are int8: QuantizeLinear, MatMulInteger. Not DequantizeLinear."""
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
    # For a damaged file the library raises a plain RuntimeError, or a message that is not valid UTF-8.
    RuntimeError,
    UnicodeDecodeError,
)


def onnxruntime_engine(*, plain: bool = False) -> GraphEngine:
    """Return the engine over onnxruntime's CPU provider.

    Args:
        plain: Disable graph optimization, so that no operators are fused. Slower; for comparison.
    """
    return GraphEngine(
        name="onnxruntime",
        version=onnxruntime.__version__,
        graph_format="onnx",
        load=partial(_load, plain=plain),
        errors=GRAPH_ERRORS,
    )


def _load(file: GraphFile, *, plain: bool) -> LoadedGraph:
    try:
        return _Graph(file, _options(plain=plain, exact=True)).loaded()
    except GRAPH_ERRORS as exc:
        # onnxruntime 1.31 cannot open a graph with exact kernels if two products share an int8 weight. In a train
        # graph, products with a frozen weight share one. An exported ``infer`` graph has a copy for each product.
        graph = _Graph(file, _options(plain=plain, exact=False)).loaded()
        if _has_int8_activations(file):
            LOG.warning(
                "%s: onnxruntime cannot open it with exact int8 kernels (%s), so it uses its default kernels: on x86 "
                "processors without VNNI their sums may saturate, and the outputs differ from those of other "
                "processors; give each product a weight of its own",
                file.what,
                " ".join(str(exc).split()),
            )
        return graph


def _has_int8_activations(file: GraphFile) -> bool:
    """Return whether a product may have int8 operands: an int8 weight alone is dequantized, and its products float."""
    nodes = list_nodes(file.data, file.what)
    return any(part in node.operator for node in nodes for part in INT8_ACTIVATIONS)


def _options(*, plain: bool, exact: bool) -> onnxruntime.SessionOptions:
    """Return the options of a session.

    Args:
        plain: Disable graph optimization.
        exact: Use int8 kernels that do not saturate. By default x86 processors without VNNI add pairs of 8-bit products
            in 16 bits, which saturate. With this option their sums are equal to those of other processors, which ignore
            it. onnxruntime refuses it for a graph in which two products share an int8 weight.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.use_deterministic_compute = True
    options.log_severity_level = FATAL_ONLY
    # By default the library also rounds the activations of a product with an int8 weight to 8 bits.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if plain:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if exact:
        options.add_session_config_entry("session.x64quantprecision", "1")
    return options


class _Graph:
    """One session."""

    def __init__(self, file: GraphFile, options: onnxruntime.SessionOptions) -> None:
        self._what = file.what
        # An OrtValue is a view of its array, and the session may hold a view of the OrtValue: keep both alive.
        self._slots = file.values
        self._values = [onnxruntime.OrtValue.ortvalue_from_numpy(value) for value in file.values.values()]
        if file.values:
            options.add_external_initializers(list(file.values), self._values)
        self._session = onnxruntime.InferenceSession(file.data, options, providers=["CPUExecutionProvider"])

    def loaded(self) -> LoadedGraph:
        """Return the graph's functions."""
        inputs, outputs = self._ports(self._session.get_inputs()), self._ports(self._session.get_outputs())
        return LoadedGraph(inputs=inputs, outputs=outputs, run=self._run, bind=self._bind)

    def _run(self, outputs: Sequence[str], feed: Feed) -> Sequence[Array]:
        arrays: Sequence[Array] = self._session.run(outputs, feed)
        return arrays

    def _bind(self, inputs: Feed, outputs: Feed) -> Callable[[], None]:
        """Return a function that runs the graph on these arrays without copies."""
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        # The binding holds addresses only, so the closure must keep the arrays alive.
        arrays = (inputs, outputs)

        def run() -> None:
            assert arrays, "held by this function"
            self._session.run_with_iobinding(binding)

        return run

    def _ports(self, nodes: Sequence[onnxruntime.NodeArg]) -> tuple[ModelPort, ...]:
        """Return inputs or outputs. Raises InvalidBundle for an element type that numpy lacks."""
        for node in nodes:
            if node.type not in DTYPES:
                raise InvalidBundle(
                    f"{self._what}: {node.name!r} is {node.type}, expected one of {sorted(DTYPES)}", code="FN-0410"
                )
        return tuple(ModelPort(name=node.name, dtype=DTYPES[node.type], shape=_shape(node)) for node in nodes)


def _shape(node: onnxruntime.NodeArg) -> tuple[int, ...]:
    # A dimension of variable length has a name in the graph instead of a number.
    return tuple(dim if isinstance(dim, int) else -1 for dim in node.shape)
