"""A train step, an evaluation and a prediction over the graphs of one or several lengths.

A batch has one length, which chooses the graph. A graph is opened for the first batch of its length and stays open,
because batches of all lengths alternate. A device has only the graphs for the lengths of its rows. The state of a
training has the same form for each length, so it passes from graph to graph as a value.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

import numpy as np

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.lengths import TARGETS, Lengths
from fanin.edge.runtimes.base import (
    BatchEvaluation,
    Evaluate,
    MeasureRanges,
    NamedInputs,
    PaddedBatch,
    Predict,
    StepSettings,
    TrainState,
    TrainStep,
)
from fanin.edge.runtimes.graphs import optimizer_table
from fanin.edge.tensors import Array, Float32s

Graph = TypeVar("Graph")


class GraphsByLength(Generic[Graph]):
    """The graphs of one Signature for each length, opened on first use."""

    def __init__(self, bundle: Bundle, open_one: Callable[[Bundle], Graph]) -> None:
        self._bundle, self._open_one = bundle, open_one
        self._graphs: dict[int, Graph] = {}

    def of(self, size: int) -> Graph:
        """Return the graph for one of the Bundle's lengths."""
        if size not in self._graphs:
            self._graphs[size] = self._open_one(self._bundle.at(size))
        return self._graphs[size]


class TrainByLength:
    """A ``TrainStep`` that runs each batch by the graph of its length."""

    def __init__(self, bundle: Bundle, open_one: Callable[[Bundle], TrainStep]) -> None:
        self._graphs = GraphsByLength(bundle, open_one)
        self._lengths = lengths_of(bundle.manifest)
        self._num_state_values = optimizer_table(bundle.manifest).num_values

    def begin(self, parameters: Float32s) -> TrainState:
        """Return the state before the first step; the optimizer's state is zero."""
        return TrainState(parameters=parameters, optimizer=np.zeros(self._num_state_values, np.float32))

    def __call__(self, state: TrainState, batch: PaddedBatch, settings: StepSettings) -> tuple[TrainState, float]:
        return self._graphs.of(batch_length(self._lengths, batch))(state, batch, settings)


class EvaluateByLength:
    """An ``Evaluate`` that runs each batch by the graph of its length."""

    def __init__(self, bundle: Bundle, open_one: Callable[[Bundle], Evaluate]) -> None:
        self._graphs = GraphsByLength(bundle, open_one)
        self._lengths = lengths_of(bundle.manifest)

    def __call__(self, parameters: Float32s, batch: PaddedBatch, *, with_logits: bool = False) -> BatchEvaluation:
        return self._graphs.of(batch_length(self._lengths, batch))(parameters, batch, with_logits=with_logits)


class PredictByLength:
    """A ``Predict`` that pads its inputs to the smallest length that holds the arrays.

    All rows of a call have one length. An output for each position has as many positions as the inputs.
    """

    def __init__(self, bundle: Bundle, open_one: Callable[[Bundle], Predict]) -> None:
        self._graphs = GraphsByLength(bundle, open_one)
        self._lengths = lengths_of(bundle.manifest)
        self._axis = output_axis(bundle.manifest)

    def __call__(self, inputs: NamedInputs) -> Float32s:
        num = max(array_lengths(self._lengths, inputs).values())
        size = self._lengths.holding(num)
        if not size:
            size = shortest(self._lengths, inputs)
        logits = self._graphs.of(size)(fitted(self._lengths, inputs, size))
        if self._axis and num < size:
            return logits[(*(slice(None) for _ in range(self._axis)), slice(num))]
        return logits


class RangesOfLongest:
    """A ``MeasureRanges`` that pads its inputs to the longest length: the graphs of all lengths share its ranges."""

    def __init__(self, lengths: Lengths, measure: MeasureRanges) -> None:
        self._lengths, self._measure = lengths, measure

    def __call__(self, inputs: NamedInputs) -> tuple[Float32s, Float32s]:
        shortest(self._lengths, inputs)
        return self._measure(fitted(self._lengths, inputs, self._lengths.longest))


def lengths_of(manifest: Manifest) -> Lengths:
    """Return the lengths of a Bundle that has some."""
    assert manifest.lengths is not None, "the runtime opens a Bundle without lengths by itself"
    return manifest.lengths


def batch_length(lengths: Lengths, batch: PaddedBatch) -> int:
    """Return the length of a batch. Raises ValueError if it is none of the model's."""
    sizes = array_lengths(lengths, {**batch.inputs, "y": batch.y})
    if len({*sizes.values()}) != 1 or not {*sizes.values()} <= {*lengths.sizes}:
        raise ValueError(f"batch: got the lengths {sizes}, expected one of {list(lengths.sizes)} for all of them")
    return next(iter(sizes.values()))


def array_lengths(lengths: Lengths, arrays: Mapping[str, Array]) -> dict[str, int]:
    """Return the lengths of arrays (n, ...), padding included. Raises ValueError if there is none."""
    if absent := sorted({*lengths.axes} - {TARGETS} - {*arrays}):
        raise ValueError(f"inputs: got {sorted(arrays)}, expected also {absent}")
    for name, axis in lengths.axes.items():
        if name in arrays and arrays[name].ndim <= axis:
            raise ValueError(f"{name}: got {arrays[name].shape}, expected the length as axis {axis}")
    return {name: arrays[name].shape[axis] for name, axis in lengths.axes.items() if name in arrays}


def shortest(lengths: Lengths, inputs: NamedInputs) -> int:
    """Return the smallest length that holds all rows of inputs (n, ...).

    Raises:
        ValueError: A row is longer than the longest length, or an array lacks the axis.
    """
    array_lengths(lengths, inputs)
    return max((int(size) for size in lengths.sizes_of(inputs)), default=lengths.longest)


def fitted(lengths: Lengths, inputs: NamedInputs, size: int) -> NamedInputs:
    """Return inputs (n, ...) cut or padded to a length."""
    return {name: lengths.fit(name, array, size) for name, array in inputs.items()}


def output_axis(manifest: Manifest) -> int:
    """Return the axis of the logits that has the length; 0 if there is none.

    Any number of a shape may equal a single length, so the axis is then that of the targets.
    """
    lengths = lengths_of(manifest)
    shapes = [(size, manifest.at(size).signatures["infer"].outputs[0].shape) for size in lengths.sizes]
    axes: Iterable[int] = range(1, len(shapes[0][1]))
    if not lengths.shorter:
        axes = {lengths.axes.get(TARGETS, 0)} & {*axes}
    return next((axis for axis in axes if all(shape[axis] == size for size, shape in shapes)), 0)
