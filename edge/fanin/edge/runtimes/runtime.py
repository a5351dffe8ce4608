"""``GraphRuntime``: the ``Runtime`` over any engine.

1. The values of slots are computed and passed to the engine with the file.
2. The operators of the file are compared with the engine's, if it names them.
3. The engine loads the file. Its inputs and outputs must be those of the signed manifest.
4. A Signature becomes a callable that checks its arguments (``graphs``, ``stepping``).

The library's own exceptions become InvalidBundle here. Other exceptions of an engine are defects of the engine or of
its device. They become a FaninError. Their traceback is logged once, because a device trains repeatedly.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.formats import file_format
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.bundles.quantize import SlotValue, fill_slots, with_derived
from fanin.edge.bundles.slots import OF_ACTIVATION, Slot
from fanin.edge.ranges import RANGES, grids_of
from fanin.edge.runtimes.base import Evaluate, LoadedModel, MeasureRanges, ModelPort, Predict, TrainStep
from fanin.edge.runtimes.buckets.dispatch import EvaluateByLength, PredictByLength, RangesOfLongest, TrainByLength
from fanin.edge.runtimes.engine import BindGraph, Feed, GraphEngine, GraphFile, LoadedGraph
from fanin.edge.runtimes.graphs import GraphEvaluate, GraphPredict, fits, input_names, parameter_port
from fanin.edge.runtimes.models import GraphModel, GraphRanges
from fanin.edge.runtimes.stepping import GraphTrainStep, bind_by_copy
from fanin.edge.signatures import Port
from fanin.edge.tensors import Array, Float32s
from fanin.protos.errors import FaninError, InvalidBundle, InvalidInput

Filled = tuple[tuple[Slot, ...], Mapping[str, SlotValue]]
NO_VALUES: Final[Mapping[str, SlotValue]] = MappingProxyType({})
LOG: Final = logging.getLogger("fanin.edge.runtimes")


class GraphRuntime:
    """A ``Runtime`` over an engine."""

    def __init__(self, engine: GraphEngine) -> None:
        self._engine = engine
        self._logged = ""

    @property
    def name(self) -> str:
        return f"{self._engine.name} {self._engine.version}"

    @property
    def graph_format(self) -> str:
        return self._engine.graph_format

    def open_train(self, bundle: Bundle) -> TrainStep:
        if bundle.manifest.lengths is not None:
            return TrainByLength(bundle, self.open_train)
        graph = self._open(bundle, "train")
        return GraphTrainStep(bundle.manifest, graph.bind or bind_by_copy(graph.run))

    def open_evaluate(self, bundle: Bundle) -> Evaluate:
        if bundle.manifest.lengths is not None:
            return EvaluateByLength(bundle, self.open_evaluate)
        return GraphEvaluate(bundle.manifest, self._open(bundle, "evaluate").run)

    def open_predict(self, bundle: Bundle, parameters: Float32s, ranges: Float32s | None = None) -> Predict:
        if bundle.manifest.lengths is not None:
            return PredictByLength(bundle, lambda single: self.open_predict(single, parameters, ranges))
        graph = self._open(bundle, "infer", self._slots(bundle.manifest, parameters, ranges))
        # The batch is the first dimension; -1 means any number of samples.
        sizes = {port.shape[0] for port in graph.inputs}
        if len(sizes) != 1:
            raise InvalidBundle(
                f"infer graph: got inputs of the batch sizes {sorted(sizes)}, expected one size", code="FN-0417"
            )
        return GraphPredict(bundle.manifest, graph.run, max(*sizes, 0))

    def open_ranges(self, bundle: Bundle, parameters: Float32s) -> MeasureRanges:
        if bundle.manifest.lengths is not None:
            longest = bundle.at(bundle.manifest.lengths.longest)
            return RangesOfLongest(bundle.manifest.lengths, self.open_ranges(longest, parameters))
        manifest, row, what = bundle.manifest, file_format(self.graph_format), "graph of ranges"
        names = [each.name for each in manifest.activations if each.graph_format == self.graph_format]
        if not names:
            raise InvalidBundle(
                f"bundle: got no activations in {self.graph_format!r}, expected at least one; export the App again, or "
                "list them in the file for fanin assemble",
                code="FN-0319",
            )
        # Biases have codes on the grid of their input. Any grid that is fine enough serves a float graph.
        unit = np.tile(np.array([-1.0, 1.0], np.float32), len(manifest.activations))
        slots, values = self._slots(manifest, parameters, unit)
        data, outputs = row.measuring(bundle.graph("infer", self.graph_format), slots, what)
        slots = tuple(slot for slot in slots if slot.kind not in OF_ACTIVATION)
        loaded = self._load(
            GraphFile(
                data=data,
                graph_format=self.graph_format,
                what=what,
                signature=RANGES if row.has_signatures else "",
                slots=slots,
                values={slot.initializer: values[slot.initializer] for slot in slots},
            )
        )
        model = GraphModel(loaded.inputs, loaded.outputs, loaded.run)
        sources = with_derived(manifest.model_table.views(parameters), manifest.derived)
        ports = {parameter_port(name): value for name, value in sources.items()}
        constants = {port.name: ports[port.name] for port in loaded.inputs if port.name in ports}
        return GraphRanges(model, input_names(manifest), constants, [outputs[name] for name in names])

    def open_model(self, graph: bytes, what: str, signature: str = "") -> LoadedModel:
        file = GraphFile(data=graph, graph_format=self.graph_format, what=what, signature=signature)
        loaded = self._load(file)
        return GraphModel(loaded.inputs, loaded.outputs, loaded.run)

    def _slots(self, manifest: Manifest, parameters: Float32s, ranges: Float32s | None) -> Filled:
        """Return the slots of ``infer``, and their values by initializer."""
        slots, grids = manifest.slots.get(self.graph_format, ()), grids_of(manifest.activations, ranges)
        return slots, fill_slots(slots, manifest.model_table, parameters, manifest.derived, grids)

    def _open(self, bundle: Bundle, signature: str, filled: Filled = ((), NO_VALUES)) -> LoadedGraph:
        """Open a Signature's graph and compare its ports with the manifest.

        Args:
            bundle: Has the graph.
            signature: Name of the Signature.
            filled: The slots of the graph, and their values.
        """
        manifest, (slots, values) = bundle.manifest, filled
        what = f"{signature} graph"
        file = GraphFile(
            data=bundle.graph(signature, self.graph_format),
            graph_format=self.graph_format,
            what=what,
            signature=signature,
            slots=slots,
            values=values,
        )
        try:
            loaded = self._load(file)
        except InvalidInput as exc:
            # The file lacks the Signature. Only ``open_model`` receives a Signature's name from the user.
            raise InvalidBundle(str(exc), code=exc.code) from exc
        ports = manifest.signatures[signature]
        _check_ports(f"{what}: inputs", loaded.inputs, ports.inputs)
        _check_ports(f"{what}: outputs", loaded.outputs, ports.outputs)
        results = {port.name: port for port in loaded.outputs}

        def run(outputs: Sequence[str], feed: Feed) -> Sequence[Array]:
            arrays = loaded.run(outputs, feed)
            _check_results(f"{what}: {self._engine.name}", arrays, [results[name] for name in outputs])
            return arrays

        return replace(loaded, run=run)

    def _load(self, file: GraphFile) -> LoadedGraph:
        """Load a file, and map the exceptions of the engine, here and in the functions of the graph."""
        loaded: object
        with self._mapped(file.what, "load"):
            self._check_operators(file)
            loaded = self._engine.load(file)
        if not isinstance(loaded, LoadedGraph):
            raise InvalidBundle(
                f"{file.what}: {self._engine.name}: load returned {type(loaded).__name__}, expected a LoadedGraph",
                code="FN-0415",
            )
        if not loaded.outputs:
            raise InvalidBundle(f"{file.what}: got a graph without outputs, expected at least one", code="FN-0410")

        def run(outputs: Sequence[str], feed: Feed) -> Sequence[Array]:
            with self._mapped(file.what, "run"):
                return loaded.run(outputs, feed)

        return LoadedGraph(
            inputs=loaded.inputs,
            outputs=loaded.outputs,
            run=run,
            bind=None if loaded.bind is None else self._mapped_bind(file.what, loaded.bind),
        )

    def _mapped_bind(self, what: str, bind: BindGraph) -> BindGraph:
        def mapped(inputs: Feed, outputs: Feed) -> Callable[[], None]:
            with self._mapped(what, "bind"):
                step = bind(inputs, outputs)

            def call() -> None:
                with self._mapped(what, "run"):
                    step()

            return call

        return mapped

    @contextmanager
    def _mapped(self, what: str, call: str) -> Iterator[None]:
        """Map the exceptions of one call of the engine.

        Args:
            what: Name of the graph in error messages.
            call: The function of the engine: ``load``, ``bind`` or ``run``.

        Raises:
            InvalidBundle: One of the engine's ``errors``.
            FaninError: Another exception.
        """
        name = self._engine.name
        try:
            yield
        except FaninError:
            raise
        except self._engine.errors as exc:
            text = " ".join(str(exc).split()) or type(exc).__name__
            verb = "open" if call == "load" else "run"
            raise InvalidBundle(f"{what}: {name} cannot {verb} it ({text})", code="FN-0412") from exc
        except Exception as exc:  # Any error: the code may come from another package.
            raised = " ".join(f"{type(exc).__name__}: {exc}".split()).removesuffix(":")
            text = (
                f"{what}: {name}: {call} raised {raised}, which is not among the engine's `errors`; add it there if it "
                f"means a bad graph, or correct `{call}`"
            )
            if text != self._logged:
                self._logged = text
                LOG.exception("%s", text)
            raise FaninError(text, code="FN-0413") from exc

    def _check_operators(self, file: GraphFile) -> None:
        """Raise InvalidBundle for a file with an operator that the engine does not have."""
        list_nodes = file_format(self.graph_format).list_nodes
        if self._engine.operators is None or list_nodes is None:
            return
        lacking = [node for node in list_nodes(file.data, file.what) if node.operator not in self._engine.operators]
        if lacking:
            first = lacking[0]
            others = sorted({node.operator for node in lacking} - {first.operator})
            place = f"module {first.module!r}" if first.module else f"node {first.name!r}"
            raise InvalidBundle(
                f"{file.what}: {self._engine.name} has no operator {first.operator}, which {place} uses"
                f"{f' (nor {others})' if others else ''}; use another runtime, or replace the layer",
                code="FN-0414",
            )


def _check_results(what: str, results: object, ports: Sequence[ModelPort]) -> None:
    """Raise InvalidBundle unless an engine has returned one array for each port, of its dtype and shape."""
    if not isinstance(results, list | tuple) or len(results) != len(ports):
        received = f"{len(results)} results" if isinstance(results, list | tuple) else type(results).__name__
        raise InvalidBundle(
            f"{what} returned {received}, expected the arrays of {[port.name for port in ports]}", code="FN-0415"
        )
    for array, port in zip(results, ports, strict=True):
        # Some libraries return a scalar of numpy for an array without dimensions.
        is_array = isinstance(array, np.ndarray | np.generic)
        if not is_array or array.dtype != port.dtype or not fits(port.shape, array.shape):
            received = f"{array.dtype} {array.shape}" if is_array else type(array).__name__
            raise InvalidBundle(
                f"{what} returned {port.name} as {received}, expected {port.dtype} {port.shape}", code="FN-0415"
            )


def _check_ports(what: str, actual: Sequence[ModelPort], expected: Sequence[Port]) -> None:
    """Raise InvalidBundle unless the graph has exactly the ports of the signed manifest.

    A dimension that is variable in the manifest may have a fixed length in the graph.
    """
    own, signed = {port.name: port for port in actual}, {port.name: port for port in expected}
    for name in sorted(own.keys() | signed.keys()):
        port, target = own.get(name), signed.get(name)
        if port is None or target is None or port.dtype != target.dtype or not fits(target.shape, port.shape):
            forms = [row and (row.dtype, row.shape) for row in (port, target)]
            raise InvalidBundle(f"{what}: got {name!r} as {forms[0]}, expected {forms[1]}", code="FN-0417")
