"""A metric that is an ONNX graph: a file instead of code, which any program may write.

The graph has the inputs ``predictions`` or ``logits``, and ``targets``, with the arrays of a ``Metric``, and one output
of one number::

    predictions, targets  (n,) int32 of a model with labels, (n, ...) float32 of a model of values
    logits                (n, num_classes) float32 of a model with labels
    any name              () or (1,) of a float type

The number n of examples is free. onnxruntime runs the graph; it is opened when it is first called.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from fanin.edge.metrics.metric import FORMS, INT8, OUR_VALUES, Metric
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import Inputs, LoadedModel
from fanin.edge.runtimes.graphs import form_of
from fanin.protos.errors import InvalidInput

TARGETS: Final = "targets"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFunction:
    """The function of a graph.

    Attributes:
        graph: The ONNX file.
        name: Its name, for errors.
    """

    graph: bytes
    name: str

    def __call__(self, predictions: Inputs, targets: Inputs) -> float:
        """Return the number that the graph computes.

        Raises:
            InvalidInput: The graph has other inputs or outputs.
            InvalidBundle: The graph cannot be opened or run.
            ValueError: The arrays have another type or shape than the inputs.
        """
        model = _opened(self)
        (value,) = model({_wanted(model): predictions, TARGETS: targets}).values()
        return float(value.reshape(()))


def graph_metric(path: Path | str, *, higher_is_better: bool = True) -> Metric:
    """Return the metric of an ONNX file. The file is read now, so it may change or vanish afterwards.

    Args:
        path: The file.
        higher_is_better: Whether a larger value is better.

    Raises:
        InvalidInput: The file cannot be read, or has other inputs or outputs.
        InvalidBundle: It is no ONNX graph.
        RuntimeMissing: onnxruntime is not installed.
    """
    try:
        graph = Path(path).read_bytes()
    except OSError as exc:
        raise InvalidInput(
            f"metric: {path} cannot be read ({exc.strerror}); name an ONNX file", code="FN-0352"
        ) from exc
    function = GraphFunction(graph=graph, name=Path(path).name)
    return Metric(function=function, higher_is_better=higher_is_better, wants=_wanted(_opened(function)))


def metric_of(what: str, name: str, value: object) -> Metric:
    """Return a metric of one's own: a ``Metric``, a function, or the path of an ONNX file.

    Args:
        what: The place of the metric, for errors.
        name: Its name.
        value: The metric.

    Raises:
        InvalidInput: The value has another type, the name is that of another value, or the file has another graph.
        InvalidBundle: The file is no ONNX graph.
    """
    if name in OUR_VALUES or name.endswith(INT8):
        raise InvalidInput(
            f"{what}: expected a name that is not in {sorted(OUR_VALUES)} and does not end in {INT8}: these values are "
            "always computed",
            code="FN-0229",
        )
    match value:
        case Metric():
            return value
        case str() | Path():
            return graph_metric(value)
        case _ if callable(value):
            return Metric(function=value)
    raise InvalidInput(
        f"{what}: got {type(value).__name__}, expected a function (predictions, targets), a Metric, or the path of an "
        "ONNX file",
        code="FN-0390",
    )


@lru_cache(maxsize=32)
def _opened(function: GraphFunction) -> LoadedModel:
    model = open_runtime("onnx").open_model(function.graph, f"metric {function.name}")
    inputs = {port.name for port in model.inputs}
    sizes = [port.shape for port in model.outputs if port.dtype.startswith("float")]
    if inputs not in [{form, TARGETS} for form in FORMS] or len(model.outputs) != 1 or sizes not in ([()], [(1,)]):
        outputs = ", ".join(form_of(port.dtype, port.shape) for port in model.outputs)
        raise InvalidInput(
            f"metric {function.name}: got a graph from {', '.join(sorted(inputs))} to {outputs}, expected one from "
            f"{' or '.join(FORMS)}, {TARGETS} to one float number; correct the graph",
            code="FN-0390",
        )
    return model


def _wanted(model: LoadedModel) -> str:
    """Return what the metric of a graph wants: the name of its other input."""
    (name,) = {port.name for port in model.inputs} - {TARGETS}
    return name
