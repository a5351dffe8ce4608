"""The ranges of the tensors of an ONNX model over the calibration data."""

from collections.abc import Sequence
from typing import Final

import onnx
from onnx import TensorProto, helper

from fanin.edge.export.formats.int8.activations import Ranges
from fanin.edge.export.refusals import Unconverted, first_line
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import Inputs, NamedInputs
from fanin.protos.errors import InvalidBundle

REDUCTIONS: Final = (("ReduceMin", min), ("ReduceMax", max))


class Calibration:
    """The calibration data, inputs (n, ...) by name, in batches.

    It has the interface of onnxruntime's quantizer, which receives the first batch only: its ranges are replaced.
    """

    def __init__(self, calibration: NamedInputs, batch_size: int) -> None:
        starts = range(0, len(next(iter(calibration.values()))), batch_size)
        self.batches = [
            {name: array[start : start + batch_size] for name, array in calibration.items()} for start in starts
        ]
        self._first = iter(self.batches[:1])

    def get_next(self) -> dict[str, Inputs] | None:
        """Return the first batch by input name, and then None."""
        return next(self._first, None)


def measured_ranges(model: onnx.ModelProto, tensors: Sequence[str], calibration: Calibration) -> Ranges:
    """Return the lowest and the highest value of float tensors, and 0 if all values are on one side of it.

    Args:
        model: The model. It is not changed.
        tensors: Names of the tensors.
        calibration: The calibration data.

    Raises:
        UnsupportedModel: The model does not run on the data.
    """
    if not tensors:
        return {}
    measuring, ranges = onnx.ModelProto(), dict.fromkeys(tensors, (0.0, 0.0))
    measuring.CopyFrom(model)
    graph = measuring.graph
    del graph.output[:]
    for at, tensor in enumerate(tensors):
        for operator, _ in REDUCTIONS:
            output = f"{operator}:{at}"
            graph.node.append(helper.make_node(operator, [tensor], [output], keepdims=0))
            graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, []))
    try:
        # Without fused operators, as the tensors exist in the quantized graph.
        run = open_runtime("onnx", plain=True).open_model(measuring.SerializeToString(), "infer graph")
        for batch in calibration.batches:
            extremes = run(batch)
            for at, tensor in enumerate(tensors):
                sides = zip(REDUCTIONS, ranges[tensor], strict=True)
                low, high = (wider(side, float(extremes[f"{name}:{at}"])) for (name, wider), side in sides)
                ranges[tensor] = low, high
    except InvalidBundle as exc:
        raise Unconverted(
            f"infer graph: onnxruntime cannot run it on the calibration data ({first_line(exc)})", code="FN-0784"
        ) from exc
    return ranges
