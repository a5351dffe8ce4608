"""The contract of an engine: the part of a runtime that differs between inference libraries.

A ``GraphEngine`` is a record over one library. ``GraphRuntime`` builds a ``Runtime`` from it and does all other work.
It checks ports, batches and dtypes, fills slots, keeps the state of a training, and maps errors. So an engine reads its
graph, runs it on arrays by name, and raises the library's own exceptions.

``contract.check_engine`` checks an engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from fanin.edge.bundles.formats import FILE_FORMATS, file_format
from fanin.edge.bundles.quantize import SlotValue
from fanin.edge.bundles.slots import Slot
from fanin.edge.runtimes.base import ModelPort
from fanin.edge.tensors import Array
from fanin.protos.records import are_all, check_part, is_word

Feed = Mapping[str, Array]
RunGraph = Callable[[Sequence[str], Feed], Sequence[Array]]
"""(output names, inputs by name) -> the outputs in this order."""
BindGraph = Callable[[Feed, Feed], Callable[[], None]]
"""(inputs, outputs by name) -> a function that runs the graph from the current content of the input arrays into the
output arrays. No array is both an input and an output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFile:
    """A graph file that an engine loads.

    An engine selects int8 kernels whose sums do not saturate. So the results of an exported int8 graph on different
    processors differ only in the rounding of floats. If a file does not allow them, the engine logs a warning.

    Attributes:
        data: Content of the file.
        graph_format: Its format.
        what: Name of the file in error messages.
        signature: The Signature to load, if the format has several in one file; "" for the only one.
        slots: Slots of the file.
        values: Their values by initializer.
    """

    data: bytes
    graph_format: str
    what: str
    signature: str = ""
    slots: tuple[Slot, ...] = ()
    values: Mapping[str, SlotValue] = field(default_factory=lambda: MappingProxyType({}))

    def filled(self) -> bytes:
        """Return the content with the values in the slots.

        An engine that supplies the values in another way uses ``data`` and ``values``.

        Raises:
            InvalidBundle: The file has no such slots.
        """
        return file_format(self.graph_format).fill_slots(self.data, self.slots, self.values, self.what)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedGraph:
    """A graph that an engine opened.

    Attributes:
        inputs: Inputs of the graph, without constants.
        outputs: Outputs of the graph.
        run: Runs the graph. It returns arrays that later calls do not change.
        bind: Binds arrays to the graph, so that a train step copies nothing; None if the library has no such call.
    """

    inputs: tuple[ModelPort, ...]
    outputs: tuple[ModelPort, ...]
    run: RunGraph
    bind: BindGraph | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEngine:
    """An inference library.

    Attributes:
        name: Name of the library, which error messages and telemetry show, without spaces.
        version: Version of the library.
        graph_format: Format of the graphs that it runs, a key of ``FILE_FORMATS``.
        load: Opens a file. It may raise a FaninError, such as InvalidBundle, with its own message.
        errors: Exceptions by which the library refuses a graph that it cannot open or run. For any other exception
            ``GraphRuntime`` raises a FaninError and logs the traceback once.
        operators: The supported operators: a name such as ``Conv``, or ``domain::name`` outside of ONNX's own set. A
            graph with others is refused before it is loaded. None if ``load`` itself refuses them, and for TFLite.

    Raises:
        InvalidInput: A part is missing or has another type.
    """

    name: str
    version: str
    graph_format: str
    load: Callable[[GraphFile], LoadedGraph]
    errors: tuple[type[Exception], ...]
    operators: frozenset[str] | None = None

    def __post_init__(self) -> None:
        """Check the parts: they may be another package's."""
        what = f"engine {self.name!r}"
        for part, text in (("name", self.name), ("version", self.version)):
            check_part(what, part, text, is_word(text), "a text without spaces")
        listed = sorted(FILE_FORMATS)
        check_part(what, "graph_format", self.graph_format, self.graph_format in listed, f"one of {listed}")
        check_part(what, "load", self.load, callable(self.load), "a function of a GraphFile")
        are_errors = are_all(self.errors, tuple, type) and all(issubclass(row, Exception) for row in self.errors)
        check_part(what, "errors", self.errors, are_errors, "a tuple of exception classes")
        if self.operators is None:
            return
        are_names = are_all(self.operators, frozenset, str)
        check_part(what, "operators", self.operators, are_names, "a frozenset of names, or None")
        can_list = FILE_FORMATS[self.graph_format].list_nodes is not None
        check_part(
            what, "operators", self.operators, can_list, f"None: fanin lists no operators of {self.graph_format} files"
        )
