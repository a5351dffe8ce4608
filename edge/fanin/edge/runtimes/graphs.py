"""Signatures as callables over the graph of any engine.

This module checks the names of a Signature's inputs and outputs, checks batches, and converts flat vectors to named
tensors.

The inputs and outputs for a Bundle with parameters ``<p>`` and optimizer states ``<s>`` (none for plain SGD;
``momentum``; ``mean`` and ``square`` for Adam)::

    train      <p>..., <s>.<p>..., x, y, mask, learning_rate  ->  next.<p>..., next.<s>.<p>..., loss
               optional inputs: step; anchor.<p>... and proximal_weight; control.<p>...
    evaluate   <p>..., x, y, mask                             ->  loss_sum, predicted
    infer      x                                              ->  logits
    preprocess raw                                            ->  x    (optional, see ``models``)

``<p>`` is ``parameter_port`` of the parameter's name. ``stepping`` has the train step.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from fanin.edge.bundles.manifest import Manifest, Port, Signature
from fanin.edge.runtimes.base import BatchEvaluation, Inputs, PaddedBatch
from fanin.edge.runtimes.engine import RunGraph
from fanin.edge.tensors import Array, Float32s, TensorTable
from fanin.protos.errors import InvalidBundle

BATCH_PORTS: Final = ("x", "y", "mask")
STEP: Final = "step"
"""Number of the step as float32, from 1 on. Adam's bias correction needs it."""
PROXIMAL_WEIGHT: Final = "proximal_weight"
CONTROL: Final = "control"
"""Kind of the inputs ``control.<p>``, which are added to the gradient."""
SCALAR_PORTS: Final = ("learning_rate", STEP, PROXIMAL_WEIGHT)
OTHER_PORTS: Final = frozenset({*BATCH_PORTS, *SCALAR_PORTS, "loss", "loss_sum", "predicted", "logits"})
"""Ports that are not of a parameter."""
PARAMETER_PREFIX: Final = "parameter."
OTHER_PREFIXES: Final = (PARAMETER_PREFIX, "next.", "anchor.", "control.", "momentum.", "mean.", "square.")
"""Prefixes of ports that belong to a parameter, such as its next value and its optimizer states."""
NO_TOKEN: Final = -1
"""Label of a position without a target. Only sequences have such positions."""


def parameter_port(name: str) -> str:
    """Return the port of a parameter: its name, with a prefix if other ports have such names.

    So a module may give its parameters any names. Two parameters never have the same port.
    """
    return PARAMETER_PREFIX + name if name in OTHER_PORTS or name.startswith(OTHER_PREFIXES) else name


def state_port(state: str, parameter: str) -> str:
    """Return the name of the train input for a parameter's optimizer state, anchor or control variate."""
    return f"{state}.{parameter}"


def control_ports(table: TensorTable, inputs: Iterable[Port]) -> tuple[str, ...]:
    """Return the train inputs that hold SCAFFOLD's control variates. The stage ``scaffold`` sets them."""
    controls = {state_port(CONTROL, spec.name) for spec in table.specs}
    return tuple(port.name for port in inputs if port.name in controls)


def next_port(name: str) -> str:
    """Return the name of the train output with the next value of an input."""
    return f"next.{name}"


def optimizer_table(manifest: Manifest) -> TensorTable:
    """Return the layout of the optimizer's state: all train inputs that have a next value, except the parameters."""
    train = manifest.signatures["train"]
    outputs = {port.name for port in train.outputs}
    parameters = {parameter_port(spec.name) for spec in manifest.table.specs}
    return TensorTable.of(
        {
            port.name: port.shape
            for port in train.inputs
            if next_port(port.name) in outputs and port.name not in parameters
        }
    )


class GraphEvaluate:
    """An ``Evaluate`` over a graph."""

    def __init__(self, manifest: Manifest, run: RunGraph) -> None:
        names = [parameter_port(spec.name) for spec in manifest.table.specs]
        self._outputs = ["loss_sum", "predicted"]
        signature = signature_of(manifest, "evaluate", ([*names, *BATCH_PORTS], []), self._outputs)
        self._parameters = FlatPorts(manifest.table, names)
        self._batch = BatchPorts(manifest, signature)
        self._run = run

    def __call__(self, parameters: Float32s, batch: PaddedBatch) -> BatchEvaluation:
        self._parameters.check("parameters", parameters)
        feed = self._batch.feed(batch) | self._parameters.views(parameters)
        loss_sum, predictions = self._run(self._outputs, feed)
        if predictions.shape != batch.y.shape or predictions.dtype != batch.y.dtype:
            raise InvalidBundle(
                f"evaluate graph: returned 'predicted' as {predictions.dtype} {predictions.shape}, "
                f"expected {batch.y.dtype} {batch.y.shape} as y"
            )
        predicted: Inputs = predictions  # type: ignore[assignment]  # the dtype is y's, as just checked
        return BatchEvaluation(loss_sum=float(loss_sum.item()), predicted=predicted)


class GraphPredict:
    """A ``Predict`` over a graph with filled slots. A graph with a fixed batch size runs once per padded batch."""

    def __init__(self, manifest: Manifest, run: RunGraph, fixed_batch: int = 0) -> None:
        signature = signature_of(manifest, "infer", (["x"], []), ["logits"])
        (self._x,), (self._logits,) = signature.inputs, signature.outputs
        self._fixed_batch = fixed_batch
        self._num_tokens = manifest.num_tokens
        self._run = run

    def __call__(self, x: Inputs) -> Float32s:
        check_port(self._x, x)
        check_tokens(x, self._num_tokens)
        check_values("x", x)
        if len(x) == 0:
            return np.empty((0, *self._logits.shape[1:]), np.float32)
        if not self._fixed_batch:
            return self._run(["logits"], {"x": x})[0].astype(np.float32, copy=False)
        size, num = self._fixed_batch, len(x)
        parts = [self._run(["logits"], {"x": padded_rows(x, start, size)})[0] for start in range(0, num, size)]
        return np.concatenate(parts)[:num].astype(np.float32, copy=False)


def padded_rows(array: Array, start: int, size: int) -> Array:
    """Return ``size`` rows of an array (n, ...) from ``start`` on. Missing rows at the end repeat row ``start``."""
    rows = array[start : start + size]
    num_missing = size - len(rows)
    return np.concatenate([rows, np.repeat(rows[:1], num_missing, axis=0)]) if num_missing else rows


def fits(expected: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a shape is the expected one; -1 in ``expected`` is any length."""
    return len(shape) == len(expected) and all(
        length in (-1, other) for length, other in zip(expected, shape, strict=True)
    )


def check_port(port: Port, array: Array) -> None:
    """Raise ValueError unless an array has the dtype and the shape of a port; -1 in the port's shape is any length."""
    if array.dtype != port.dtype or not fits(port.shape, array.shape):
        raise ValueError(f"{port.name}: got {array.dtype} {array.shape}, expected {port.dtype} {port.shape}")


def check_values(name: str, x: Array) -> None:
    """Raise ValueError for NaN, infinity and negative tokens.

    Int8 quantization would turn NaN and infinity into confident predictions. Some runtimes count negative tokens from
    the end of the vocabulary.
    """
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise ValueError(f"{name}: got NaN or infinity, expected finite values only")
    if x.dtype.kind == "i" and x.size and x.min() < 0:
        raise ValueError(f"{name}: got {x.min()}, expected tokens of at least 0")


class BatchPorts:
    """The three inputs that a batch fills, with their checks."""

    def __init__(self, manifest: Manifest, signature: Signature) -> None:
        self._ports = [(port, np.dtype(port.dtype)) for port in signature.inputs if port.name in BATCH_PORTS]
        self._num_classes = manifest.num_classes
        self._num_tokens = manifest.num_tokens

    def feed(self, batch: PaddedBatch) -> dict[str, Array]:
        """Return the inputs of a batch by name. Raises ValueError for a wrong shape, dtype, label or token."""
        feed: dict[str, Array] = {"x": batch.x, "y": batch.y, "mask": batch.mask}
        for port, dtype in self._ports:
            array = feed[port.name]
            # All dimensions of a batch are fixed. Two plain comparisons are fast enough for a thousand steps a second.
            if array.shape != port.shape or array.dtype != dtype:
                check_port(port, array)
        if self._num_classes:
            check_labels(batch.y, self._num_classes)
        check_tokens(batch.x, self._num_tokens)
        return feed


def check_tokens(x: Inputs, num_tokens: int) -> None:
    """Raise ValueError for a token outside the vocabulary, and name its sample. 0 for ``num_tokens`` accepts any."""
    if not num_tokens or not x.size or (x.min() >= 0 and x.max() < num_tokens):
        return
    position = np.argwhere((x < 0) | (x >= num_tokens))[0]
    raise ValueError(f"x: token {x[tuple(position)]} at sample {position[0]}, expected 0 to {num_tokens - 1}")


def check_labels(y: Inputs, num_classes: int) -> None:
    """Raise ValueError unless all labels are classes. In a sequence, -1 marks a position without a label."""
    smallest, lowest, highest = NO_TOKEN if y.ndim > 1 else 0, y.min(), y.max()
    if lowest < smallest or highest >= num_classes:
        raise ValueError(f"y: got labels from {lowest} to {highest}, expected {smallest} to {num_classes - 1}")


class FlatPorts:
    """The ports of a Signature that are slices of one flat vector.

    ``names`` has the port of each tensor of ``table``, in its order; "" for a tensor without a port.
    """

    def __init__(self, table: TensorTable, names: Sequence[str]) -> None:
        self.num_values = table.num_values
        self._slices = [
            (name, slice(start, start + spec.num_values), spec.shape)
            for name, spec, start in zip(names, table.specs, table.offsets, strict=True)
            if name
        ]

    def check(self, what: str, flat: Float32s) -> None:
        """Raise ValueError unless ``flat`` is a float32 vector (num_values,)."""
        if flat.shape != (self.num_values,) or flat.dtype != np.float32:
            raise ValueError(f"{what}: got {flat.dtype} {flat.shape}, expected float32 ({self.num_values},)")

    def views(self, flat: Float32s) -> dict[str, Array]:
        """Return the tensors of ``flat`` (num_values,) as views, by port."""
        return {name: flat[where].reshape(shape) for name, where, shape in self._slices}


def signature_of(
    manifest: Manifest, name: str, inputs: tuple[Sequence[str], Sequence[str]], outputs: Sequence[str]
) -> Signature:
    """Return a Signature after checking the names of its inputs and outputs.

    Args:
        manifest: Has the Signature.
        name: The Signature's name.
        inputs: Names of the required and of the optional inputs.
        outputs: Names of all outputs.

    Raises:
        InvalidBundle: A name is missing, unknown or repeated.
    """
    signature = manifest.signatures[name]
    required, optional = inputs
    for what, ports, names, allowed in (
        ("inputs", signature.inputs, required, optional),
        ("outputs", signature.outputs, outputs, ()),
    ):
        actual = {port.name for port in ports}
        if not set(names) <= actual <= {*names, *allowed} or len(actual) != len(ports):
            raise InvalidBundle(
                f"bundle: signature {name!r} has {what} {sorted(port.name for port in ports)}, expected {sorted(names)}"
            )
    return signature
