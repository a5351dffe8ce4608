"""Signatures as callables over any engine that runs a named graph: what all runtimes share.

An engine opens a graph file and gives ``RunGraph``: names of outputs and a feed in, arrays out. Everything
else is here, once: which ports a Signature must have, what a batch must look like, and how flat vectors
become named tensors and back. The ports, in a Bundle whose parameters are ``<p>`` and whose optimizer keeps the
states ``<s>`` (none for plain SGD; ``momentum``; Adam's ``mean`` and ``square``) for those that it moves::

    train      <p>..., <s>.<p>..., x, y, mask, learning_rate  ->  next.<p>..., next.<s>.<p>..., loss
               and as inputs, where the App asks for them: step; anchor.<p>... and proximal_weight; control.<p>...
    evaluate   <p>..., x, y, mask                             ->  loss_sum, predicted
    infer      x                                              ->  logits
    preprocess raw                                            ->  x, where a Bundle has it (``models``)

The train step has a file of its own (``stepping``).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from fanin.edge.bundles.manifest import Manifest, Port, Signature
from fanin.edge.runtimes.base import Batch, Evaluated, Inputs
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.errors import InvalidBundle

Array = npt.NDArray[np.generic]
Feed = Mapping[str, Array]
RunGraph = Callable[[Sequence[str], Feed], Sequence[Array]]
"""(names of outputs, inputs by name) -> the outputs; raises InvalidBundle if the graph does not run."""
BindGraph = Callable[[Feed, Feed], Callable[[], None]]
"""(inputs, outputs by name) -> what runs the graph from those arrays, as they are then, into these."""

BATCH_PORTS: Final = ("x", "y", "mask")
STEP: Final = "step"
"""The number of this step, from 1, as float32: what Adam's bias correction needs."""
PROXIMAL_WEIGHT: Final = "proximal_weight"
SCALAR_PORTS: Final = ("learning_rate", STEP, PROXIMAL_WEIGHT)
NO_TOKEN: Final = -1
"""The label of a place without one; only sequences have such places."""


def state_port(state: str, parameter: str) -> str:
    """The train input that holds a parameter's share of an optimizer's state, or its anchor or control variate."""
    return f"{state}.{parameter}"


def control_ports(table: TensorTable, inputs: Iterable[Port]) -> tuple[str, ...]:
    """Return the train inputs that hold SCAFFOLD's control variates. No device sets them, so a Run refuses them."""
    parameters = {spec.name for spec in table.specs}
    # A parameter of a layer that is called "control" has such a name too.
    controls = {state_port("control", name) for name in parameters} - parameters
    return tuple(port.name for port in inputs if port.name in controls)


def next_port(name: str) -> str:
    """The train output that holds the next value of an input."""
    return f"next.{name}"


def optimizer_table(manifest: Manifest) -> TensorTable:
    """The layout of an optimizer's state: every train input that has a next value and is no parameter."""
    train = manifest.signatures["train"]
    following = {port.name for port in train.outputs}
    parameters = {spec.name for spec in manifest.table.specs}
    found = {
        port.name: port.shape
        for port in train.inputs
        if next_port(port.name) in following and port.name not in parameters
    }
    return TensorTable.of(found)


class GraphEvaluate:
    """An ``Evaluate`` over a graph."""

    def __init__(self, manifest: Manifest, run: RunGraph) -> None:
        names = [spec.name for spec in manifest.table.specs]
        self._outputs = ["loss_sum", "predicted"]
        found = signature_of(manifest, "evaluate", ([*names, *BATCH_PORTS], []), self._outputs)
        self._parameters = Layout(manifest.table, names)
        self._batch = BatchPorts(manifest, found)
        self._run = run

    def __call__(self, parameters: Float32s, batch: Batch) -> Evaluated:
        self._parameters.check("parameters", parameters)
        feed = self._batch.feed(batch) | self._parameters.views(parameters)
        loss_sum, predicted = self._run(self._outputs, feed)
        if predicted.shape != batch.y.shape or predicted.dtype != batch.y.dtype:
            raise InvalidBundle(
                f"evaluate graph: gave {predicted.dtype} {predicted.shape}, "
                f"expected what y is, {batch.y.dtype} {batch.y.shape}"
            )
        said: Inputs = predicted  # type: ignore[assignment]  # the dtype is y's, as just checked
        return Evaluated(loss_sum=float(loss_sum.item()), predicted=said)


class GraphPredict:
    """A ``Predict`` over a graph whose slots are filled; one of a fixed batch is run as often as it takes."""

    def __init__(self, manifest: Manifest, run: RunGraph, fixed_batch: int = 0) -> None:
        found = signature_of(manifest, "infer", (["x"], []), ["logits"])
        (self._x,), (self._logits,) = found.inputs, found.outputs
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
            return self._logits_of(x)
        size, num = self._fixed_batch, len(x)
        padded = x if num % size == 0 else np.concatenate([x, np.repeat(x[:1], -num % size, axis=0)])
        return np.concatenate([self._logits_of(padded[at : at + size]) for at in range(0, len(padded), size)])[:num]

    def _logits_of(self, x: Inputs) -> Float32s:
        (logits,) = self._run(["logits"], {"x": x})
        return logits.astype(np.float32, copy=False)


def check_port(port: Port, array: Array) -> None:
    """Raise ValueError unless an array has the port's dtype and shape (-1 is any length)."""
    fits = len(array.shape) == len(port.shape) and all(
        want in (-1, got) for want, got in zip(port.shape, array.shape, strict=True)
    )
    if array.dtype != port.dtype or not fits:
        raise ValueError(f"{port.name}: got {array.dtype} {array.shape}, expected {port.dtype} {port.shape}")


def check_values(name: str, x: Array) -> None:
    """Raise ValueError for NaN and infinity, which int8 would turn into confident numbers, and for tokens below 0,
    which some runtimes count from the end."""
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

    def feed(self, batch: Batch) -> dict[str, Array]:
        """A new feed with the batch in it. Raises ValueError."""
        feed: dict[str, Array] = {"x": batch.x, "y": batch.y, "mask": batch.mask}
        for port, dtype in self._ports:
            array = feed[port.name]
            # A batch's ports have no dimension that varies: two plain comparisons, a thousand times a second.
            if array.shape != port.shape or array.dtype != dtype:
                check_port(port, array)
        if self._num_classes:
            check_labels(batch.y, self._num_classes)
        check_tokens(batch.x, self._num_tokens)
        return feed


def check_tokens(x: Inputs, num_tokens: int) -> None:
    """Raise ValueError for a token that a model does not know, by the sample that has it; 0: any number is a token."""
    if not num_tokens or not x.size or (x.min() >= 0 and x.max() < num_tokens):
        return
    place = np.argwhere((x < 0) | (x >= num_tokens))[0]
    raise ValueError(f"x: token {x[tuple(place)]} at sample {place[0]}, expected 0 to {num_tokens - 1}")


def check_labels(y: Inputs, num_classes: int) -> None:
    """Raise ValueError unless all labels are classes; in sequences a place may have none."""
    least, lowest, highest = NO_TOKEN if y.ndim > 1 else 0, y.min(), y.max()
    if lowest < least or highest >= num_classes:
        raise ValueError(f"y: got labels from {lowest} to {highest}, expected {least} to {num_classes - 1}")


class Layout:
    """A table's tensors under a Signature's names: where each lies in the flat vector. "" names none."""

    def __init__(self, table: TensorTable, names: Sequence[str]) -> None:
        self.num_values = table.num_values
        self._places = [
            (name, slice(start, start + spec.num_values), spec.shape)
            for name, spec, start in zip(names, table.specs, table.offsets, strict=True)
            if name
        ]

    def check(self, what: str, flat: Float32s) -> None:
        """Raise ValueError unless this is a vector (num_values,)."""
        if flat.shape != (self.num_values,) or flat.dtype != np.float32:
            raise ValueError(f"{what}: got {flat.dtype} {flat.shape}, expected float32 ({self.num_values},)")

    def views(self, flat: Float32s) -> dict[str, Array]:
        """The tensors of ``flat`` (num_values,) by their names there."""
        return {name: flat[place].reshape(shape) for name, place, shape in self._places}


def signature_of(
    manifest: Manifest, name: str, inputs: tuple[Sequence[str], Sequence[str]], outputs: Sequence[str]
) -> Signature:
    """The named Signature, which must have just these (required, optional) inputs and outputs. Raises InvalidBundle."""
    found = manifest.signatures[name]
    required, optional = inputs
    for what, ports, names, allowed in (
        ("inputs", found.inputs, required, optional),
        ("outputs", found.outputs, outputs, ()),
    ):
        got = {port.name for port in ports}
        if not set(names) <= got <= {*names, *allowed} or len(got) != len(ports):
            raise InvalidBundle(
                f"bundle: signature {name!r} has {what} {sorted(port.name for port in ports)}, expected {sorted(names)}"
            )
    return found
