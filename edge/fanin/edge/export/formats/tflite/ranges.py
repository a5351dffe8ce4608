"""The ranges of the tensors of a TFLite graph over the calibration data."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from fanin.edge.export.formats.int8.activations import activation_name
from fanin.edge.runtimes.base import NamedInputs


@dataclass(slots=True)
class Range:
    """The lowest and the highest value of a tensor. Zero is included, so that it is exact on the grid."""

    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The ranges of the float tensors of an ``infer`` graph.

    Attributes:
        ranges: By tensor index. They decide which tensors become int8.
        grids: The ranges behind the grids in the file, by tensor index.
        names: Names of the tensors in the graphs of all lengths. A name has the number and the kind of the operator:
            the converter numbers tensors otherwise in another graph.
        has_graph: Whether the file gets a graph that measures the ranges.
    """

    ranges: Mapping[int, Range]
    grids: Mapping[int, Range]
    names: Mapping[int, str]
    has_graph: bool = True

    def activation(self, tensor: int) -> str:
        """Return the name of a tensor in a manifest."""
        return activation_name("tflite", self.names[tensor])


def measured_ranges(data: bytes, tensors: Collection[int], calibration: NamedInputs) -> dict[int, Range]:
    """Return the range of each of these float tensors over all of ``calibration``.

    Args:
        data: A file with one Signature, whose inputs are those of ``calibration``.
        tensors: Indices of the tensors.
        calibration: Inputs (n, ...) by name.
    """
    interpreter = Interpreter(
        model_content=data,
        num_threads=1,
        experimental_preserve_all_tensors=True,
        # A delegate would hide its inner tensors.
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    interpreter.allocate_tensors()
    # Read in place, because unpacking the complete file takes longer.
    ports = schema.Model.GetRootAs(data, 0).SignatureDefs(0)
    inputs = [ports.Inputs(index) for index in range(ports.InputsLength())]
    indices = {port.Name().decode(): port.TensorIndex() for port in inputs}
    sizes = {int(row["shape"][0]) for row in interpreter.get_input_details()}
    assert len(sizes) == 1 and indices.keys() == calibration.keys(), "infer was traced for these inputs"
    (size,), num = sizes, len(next(iter(calibration.values())))
    ranges = {index: Range() for index in tensors}
    for start in range(0, num - size + 1, size):
        for name, array in calibration.items():
            interpreter.set_tensor(indices[name], array[start : start + size])
        interpreter.invoke()
        for index in tensors:
            value = interpreter.get_tensor(index)
            if value.size:
                ranges[index].low = min(ranges[index].low, float(value.min()))
                ranges[index].high = max(ranges[index].high, float(value.max()))
    return ranges
