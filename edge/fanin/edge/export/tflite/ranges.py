"""The ranges of the tensors of a TFLite graph over the calibration data."""

from collections.abc import Collection
from dataclasses import dataclass

from ai_edge_litert.interpreter import Interpreter, OpResolverType

from fanin.edge.runtimes.base import Inputs


@dataclass(slots=True)
class Range:
    """The lowest and the highest value of a tensor. Zero is included, so that it is exact on the grid."""

    low: float = 0.0
    high: float = 0.0


def measured_ranges(data: bytes, tensors: Collection[int], calibration: Inputs) -> dict[int, Range]:
    """Return the range of each of these float tensors over all of ``calibration`` (n, ...), the graph's only input."""
    interpreter = Interpreter(
        model_content=data,
        num_threads=1,
        experimental_preserve_all_tensors=True,
        # A delegate would hide its inner tensors.
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    interpreter.allocate_tensors()
    (x,) = interpreter.get_input_details()
    size = int(x["shape"][0])
    ranges = {index: Range() for index in tensors}
    for start in range(0, len(calibration) - size + 1, size):
        interpreter.set_tensor(x["index"], calibration[start : start + size])
        interpreter.invoke()
        for index in tensors:
            value = interpreter.get_tensor(index)
            if value.size:
                ranges[index].low = min(ranges[index].low, float(value.min()))
                ranges[index].high = max(ranges[index].high, float(value.max()))
    return ranges
