"""The grids of the activations of an int8 graph, which the graphs of all lengths share.

They are measured once, on the calibration data in the graph of the longest length, which holds every row. Two graphs
share grids if both have the same quantized tensors.
"""

from collections.abc import Mapping

from fanin.protos.errors import UnsupportedModel

Grids = Mapping[str, tuple[float, float]]
"""Two numbers that determine the grid of an activation, by tensor. In ONNX they are (scale, zero point), by name. In
TFLite they are (lowest, highest value), by the tensor's index."""


def check_grids(actual: Grids, expected: Grids | None) -> None:
    """Raise UnsupportedModel unless a graph has the expected grids. None expects nothing."""
    if expected is not None and actual != expected:
        others = sorted({*actual.items()} ^ {*expected.items()})
        raise UnsupportedModel(
            f"infer graph: {len(others)} activations such as {others[0][0]!r} are quantized otherwise than in the "
            "graph of the longest length, expected the same operators for all lengths; remove what depends on the "
            "length from forward, or export an App for each length"
        )
