"""Signatures as callables over any engine that runs a named graph: what all runtimes share.

An engine opens a graph file and gives ``RunGraph``: names of outputs and a feed in, arrays out. Everything
else is here, once: which ports a Signature must have, what a batch must look like, and how flat vectors
become named tensors and back. The ports, in a Bundle whose parameters are ``<p>``::

    train      <p>..., momentum.<p>..., x, y, mask, learning_rate  ->  next.<p>..., next.momentum.<p>..., loss
    evaluate   <p>..., x, y, mask                                  ->  loss_sum, predicted
    infer      x                                                   ->  logits

Parameters go in as views of the flat vector; what comes out is written once, into the next one.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fanin.edge.manifest import Manifest, Port, Signature
from fanin.edge.runtimes.base import Batch, Evaluated, TrainState
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.errors import InvalidBundle

Array = npt.NDArray[np.generic]
Feed = Mapping[str, Array]
RunGraph = Callable[[Sequence[str], Feed], Sequence[Array]]
"""(names of outputs, inputs by name) -> the outputs; raises InvalidBundle if the graph does not run."""


def momentum_port(parameter: str) -> str:
    """The train input that holds a parameter's momentum."""
    return f"momentum.{parameter}"


def next_port(name: str) -> str:
    """The train output that holds the next value of an input."""
    return f"next.{name}"


class GraphTrainStep:
    """A ``TrainStep`` over a graph."""

    def __init__(self, manifest: Manifest, run: RunGraph) -> None:
        names = [spec.name for spec in manifest.table.specs]
        momenta = [momentum_port(name) for name in names]
        self._outputs = [next_port(name) for name in (*names, *momenta)] + ["loss"]
        found = _signature(manifest, "train", [*names, *momenta, "x", "y", "mask", "learning_rate"], self._outputs)
        self._parameters = _Layout(manifest.table, names)
        self._momenta = _Layout(manifest.table, momenta)
        self._batch = _BatchPorts(manifest, found)
        self._run = run

    def __call__(self, state: TrainState, batch: Batch, learning_rate: float) -> tuple[TrainState, float]:
        feed = self._batch.feed(batch)
        self._parameters.feed(feed, "parameters", state.parameters)
        self._momenta.feed(feed, "momentum", state.momentum)
        feed["learning_rate"] = np.array(learning_rate, np.float32)
        found = self._run(self._outputs, feed)
        half = len(found) // 2
        following = TrainState(
            parameters=self._parameters.flat(found[:half]), momentum=self._momenta.flat(found[half:-1])
        )
        return following, float(found[-1].item())


class GraphEvaluate:
    """An ``Evaluate`` over a graph."""

    def __init__(self, manifest: Manifest, run: RunGraph) -> None:
        names = [spec.name for spec in manifest.table.specs]
        self._outputs = ["loss_sum", "predicted"]
        found = _signature(manifest, "evaluate", [*names, "x", "y", "mask"], self._outputs)
        self._parameters = _Layout(manifest.table, names)
        self._batch = _BatchPorts(manifest, found)
        self._run = run

    def __call__(self, parameters: Float32s, batch: Batch) -> Evaluated:
        feed = self._batch.feed(batch)
        self._parameters.feed(feed, "parameters", parameters)
        loss_sum, predicted = self._run(self._outputs, feed)
        if predicted.shape != batch.y.shape:
            raise InvalidBundle(f"evaluate graph: gave {predicted.shape} classes, expected {batch.y.shape}")
        return Evaluated(loss_sum=float(loss_sum.item()), predicted=predicted.astype(np.int64, copy=False))


class GraphPredict:
    """A ``Predict`` over a graph whose slots are filled."""

    def __init__(self, manifest: Manifest, run: RunGraph) -> None:
        (self._x,) = _signature(manifest, "infer", ["x"], ["logits"]).inputs
        self._num_classes = manifest.num_classes
        self._run = run

    def __call__(self, x: Float32s) -> Float32s:
        check_port(self._x, x)
        if len(x) == 0:
            return np.empty((0, self._num_classes), np.float32)
        (logits,) = self._run(["logits"], {"x": x})
        return logits.astype(np.float32, copy=False)


def check_port(port: Port, array: Array) -> None:
    """Raise ValueError unless an array has the port's dtype and shape (-1 is any length)."""
    fits = len(array.shape) == len(port.shape) and all(
        want in (-1, got) for want, got in zip(port.shape, array.shape, strict=True)
    )
    if array.dtype != port.dtype or not fits:
        raise ValueError(f"{port.name}: got {array.dtype} {array.shape}, expected {port.dtype} {port.shape}")


class _BatchPorts:
    """The three inputs that a batch fills, with their checks."""

    def __init__(self, manifest: Manifest, signature: Signature) -> None:
        self._ports = [(port, np.dtype(port.dtype)) for port in signature.inputs if port.name in ("x", "y", "mask")]
        self._num_classes = manifest.num_classes

    def feed(self, batch: Batch) -> dict[str, Array]:
        """A new feed with the batch in it. Raises ValueError."""
        feed: dict[str, Array] = {"x": batch.x, "y": batch.y, "mask": batch.mask}
        for port, dtype in self._ports:
            array = feed[port.name]
            # A batch's ports have no dimension that varies: two plain comparisons, a thousand times a second.
            if array.shape != port.shape or array.dtype != dtype:
                check_port(port, array)
        if batch.y.min() < 0 or batch.y.max() >= self._num_classes:
            raise ValueError(
                f"y: got labels from {batch.y.min()} to {batch.y.max()}, expected 0 to {self._num_classes - 1}"
            )
        return feed


class _Layout:
    """A table's tensors under a Signature's names: where each lies in the flat vector."""

    def __init__(self, table: TensorTable, names: Sequence[str]) -> None:
        self._num_values = table.num_values
        self._places = [
            (name, slice(start, start + spec.num_values), spec.shape)
            for name, spec, start in zip(names, table.specs, table.offsets, strict=True)
        ]

    def feed(self, feed: dict[str, Array], what: str, flat: Float32s) -> None:
        """Add the tensors of ``flat`` (num_values,) to a feed, as views."""
        if flat.shape != (self._num_values,) or flat.dtype != np.float32:
            raise ValueError(f"{what}: got {flat.dtype} {flat.shape}, expected float32 ({self._num_values},)")
        for name, place, shape in self._places:
            feed[name] = flat[place].reshape(shape)

    def flat(self, tensors: Sequence[Array]) -> Float32s:
        """One flat vector (num_values,) of tensors in the table's order."""
        flat = np.concatenate([tensor.reshape(-1) for tensor in tensors], dtype=np.float32)
        if flat.shape != (self._num_values,):
            raise InvalidBundle(f"train graph: gave {flat.size} values, expected {self._num_values}")
        return flat


def _signature(manifest: Manifest, name: str, inputs: Sequence[str], outputs: Sequence[str]) -> Signature:
    """The named Signature, which must have just these ports. Raises InvalidBundle."""
    found = manifest.signatures[name]
    for what, ports, names in (("inputs", found.inputs, inputs), ("outputs", found.outputs, outputs)):
        if sorted(port.name for port in ports) != sorted(names):
            raise InvalidBundle(
                f"bundle: signature {name!r} has {what} {sorted(port.name for port in ports)}, expected {sorted(names)}"
            )
    return found
