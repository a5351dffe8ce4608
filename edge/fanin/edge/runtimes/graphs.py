"""Signatures as callables over the graph of any engine.

This module checks the names of a Signature's inputs and outputs, checks batches, and converts flat vectors to named
tensors.

The inputs and outputs for a Bundle with parameters ``<p>`` and optimizer states ``<s>`` (none for plain SGD;
``momentum``; ``mean`` and ``square`` for Adam)::

    train      <p>..., <s>.<p>..., <i>..., y, mask, learning_rate  ->  next.<p>..., next.<s>.<p>..., loss
               optional inputs: step; anchor.<p>... and proximal_weight; control.<p>...; uniform.<k>, normal.<k>;
               optimizer.<o>, optimizer.<o>.complement and optimizer.<o>.log
    evaluate   <p>..., <i>..., y, mask                             ->  loss_sum, predicted
               optional output of a model with labels: logits
    infer      <i>...                                              ->  logits
    preprocess raw                                                 ->  <i>    (optional, see ``models``)

``<p>`` is ``parameter_port`` of the parameter's name, and ``<i>`` the name of an input of the model. k is the number of
a random input (``randomness``), and ``<o>`` a setting of the optimizer (``setting_values``). The inputs of ``infer``
declare the names of the arrays on devices. A single tensor is named ``x``. ``stepping`` has the train step.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from fanin.edge.bundles.manifest import Manifest
from fanin.edge.runtimes.base import BatchEvaluation, Inputs, NamedInputs, PaddedBatch
from fanin.edge.runtimes.engine import RunGraph
from fanin.edge.signatures import RANDOM_PREFIXES, Port, Signature
from fanin.edge.tensors import Array, Float32s, TensorTable
from fanin.protos.errors import InvalidBundle

X: Final = "x"
"""Name of the only input of a model whose inputs have no names."""
TARGET_PORTS: Final = ("y", "mask")
STEP: Final = "step"
"""Number of the step as float32, from 1 on. Adam's bias correction needs it."""
PROXIMAL_WEIGHT: Final = "proximal_weight"
CONTROL: Final = "control"
"""Kind of the inputs ``control.<p>``, which are added to the gradient."""
SCALAR_PORTS: Final = ("learning_rate", STEP, PROXIMAL_WEIGHT)
OTHER_PORTS: Final = frozenset({X, *TARGET_PORTS, *SCALAR_PORTS, "loss", "loss_sum", "predicted", "logits"})
"""Ports that are not of a parameter."""
RESERVED: Final = (OTHER_PORTS | {"raw", "file", "allow_pickle"}) - {X}
"""Names that no input of a model can have: those of other ports, and of numpy.savez's own arguments. The latter writes
the data of devices."""
PARAMETER_PREFIX: Final = "parameter."
SETTING_PREFIX: Final = "optimizer."
LOG_OF_ZERO: Final = -200.0
"""Stands for the logarithm of a setting of 0.0: its exponential is 0 in float32."""
OTHER_PREFIXES: Final = (
    *(PARAMETER_PREFIX, SETTING_PREFIX, "next.", "anchor.", "control.", "momentum.", "mean.", "square."),
    *RANDOM_PREFIXES,
)
"""Prefixes of ports that belong to a parameter (its next value, its optimizer states), and of random inputs."""
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


def setting_values(settings: Mapping[str, float]) -> dict[str, float]:
    """Return the values of all inputs that a graph may have for these settings of its optimizer, by port.

    ``optimizer.<o>`` is the setting v itself. ``.complement`` is 1 - v and ``.log`` the natural logarithm of v, both
    computed in float64. In float32 a graph would lose digits of them for v close to 1, such as the betas of Adam.
    """
    values: dict[str, float] = {}
    for name, value in settings.items():
        port = SETTING_PREFIX + name
        log = math.log(value) if value > 0.0 else LOG_OF_ZERO
        values |= {port: value, f"{port}.complement": 1.0 - value, f"{port}.log": log}
    return values


def checked_settings(manifest: Manifest, changes: Mapping[str, float]) -> dict[str, float]:
    """Return the settings of a Bundle's optimizer with some of them changed.

    Raises:
        ValueError: The graph has no such setting, or it does not allow the value.
    """
    for name, value in changes.items():
        setting = manifest.optimizer.get(name)
        if setting is None:
            known = ", ".join(manifest.optimizer) or "none"
            raise ValueError(f"optimizer: got the setting {name!r}, expected one of the bundle's optimizer: {known}")
        if not setting.allows(value):
            raise ValueError(f"optimizer: got {name} {value:g}, expected at least 0 and below {setting.below:g}")
    return {name: setting.default for name, setting in manifest.optimizer.items()} | dict(changes)


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
    parameters = {parameter_port(spec.name) for spec in manifest.model_table.specs}
    return TensorTable.of(
        {
            port.name: port.shape
            for port in train.inputs
            if next_port(port.name) in outputs and port.name not in parameters
        }
    )


def input_names(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the model's inputs: those of ``infer``, whose parameters are slots.

    Raises:
        InvalidBundle: There is none, or two inputs or an input and another port share a name.
    """
    names = tuple(port.name for port in manifest.signatures["infer"].inputs)
    others = RESERVED | {parameter_port(spec.name) for spec in manifest.model_table.specs}
    if not names or len(set(names)) < len(names) or others & {*names}:
        raise InvalidBundle(
            f"bundle: signature 'infer' has inputs {list(names)}, expected at least one, with different names that no "
            "other port has",
            code="FN-0417",
        )
    return names


def batch_ports(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the ports that a batch fills. Raises InvalidBundle like ``input_names``."""
    return (*input_names(manifest), *TARGET_PORTS)


def has_output_targets(manifest: Manifest) -> bool:
    """Return whether targets have the shape and dtype of a model's predictions, so that both can be compared."""
    evaluate = manifest.signatures["evaluate"]
    forms = {port.name: (port.dtype, port.shape) for port in (*evaluate.inputs, *evaluate.outputs)}
    return forms["y"] == forms["predicted"]


def probe_inputs(manifest: Manifest, num: int) -> NamedInputs:
    """Return inputs of ones (num, ...) by name. Zeros would hide all positions of a model with an attention mask."""
    arrays = {}
    for port in manifest.signatures["infer"].inputs:
        value = min(1, manifest.num_tokens.get(port.name, 2) - 1)
        arrays[port.name] = np.full((num, *port.shape[1:]), value, port.dtype)
    return arrays


def probe_batch(manifest: Manifest) -> PaddedBatch:
    """Return a batch of ``probe_inputs`` whose targets are zero and whose samples are all padding."""
    (y,) = (port for port in manifest.signatures["train"].inputs if port.name == "y")
    targets: Inputs = np.zeros(y.shape, y.dtype)
    mask = np.zeros(manifest.batch_size, np.float32)
    return PaddedBatch(inputs=probe_inputs(manifest, manifest.batch_size), y=targets, mask=mask)


class GraphEvaluate:
    """An ``Evaluate`` over a graph."""

    def __init__(self, manifest: Manifest, run: RunGraph) -> None:
        names = [parameter_port(spec.name) for spec in manifest.model_table.specs]
        self._outputs = ["loss_sum", "predicted"]
        others = ["logits"] if manifest.num_classes else []
        signature = signature_of(manifest, "evaluate", ([*names, *batch_ports(manifest)], []), self._outputs, others)
        self._has_logits = any(port.name == "logits" for port in signature.outputs)
        self._parameters = FlatPorts(manifest.model_table, names)
        self._batch = BatchPorts(manifest, signature)
        self._has_labels = manifest.num_classes > 0
        (self._predicted,) = (port for port in signature.outputs if port.name == "predicted")
        self._run = run

    def __call__(self, parameters: Float32s, batch: PaddedBatch, *, with_logits: bool = False) -> BatchEvaluation:
        self._parameters.check("parameters", parameters)
        feed = self._batch.feed(batch) | self._parameters.views(parameters)
        with_logits &= self._has_logits
        loss_sum, predictions, *logits = self._run([*self._outputs, "logits"] if with_logits else self._outputs, feed)
        # Values have the form of the model's output, which may differ from that of the targets.
        shape, dtype = batch.y.shape, batch.y.dtype
        if not self._has_labels:
            shape, dtype = self._predicted.shape, np.dtype(np.float32)
        if not fits(shape, predictions.shape) or predictions.dtype != dtype:
            raise InvalidBundle(
                f"evaluate graph: returned 'predicted' as {predictions.dtype} {predictions.shape}, "
                f"expected {dtype} {shape}{' as y' if self._has_labels else ''}",
                code="FN-0347",
            )
        predicted: Inputs = predictions  # type: ignore[assignment]  # the dtype was just checked
        return BatchEvaluation(
            loss_sum=float(loss_sum.item()),
            predicted=predicted,
            logits=logits[0].astype(np.float32, copy=False) if logits else None,
        )


class GraphPredict:
    """A ``Predict`` over a graph with filled slots. A graph with a fixed batch size runs once per padded batch."""

    def __init__(self, manifest: Manifest, run: RunGraph, fixed_batch: int = 0) -> None:
        signature = signature_of(manifest, "infer", (input_names(manifest), []), ["logits"])
        self._inputs, (self._logits,) = signature.inputs, signature.outputs
        self._fixed_batch = fixed_batch
        self._num_tokens = manifest.num_tokens
        self._run = run

    def __call__(self, inputs: NamedInputs) -> Float32s:
        check_names(inputs, [port.name for port in self._inputs])
        for port in self._inputs:
            check_port(port, inputs[port.name])
            check_tokens(port.name, inputs[port.name], self._num_tokens.get(port.name, 0))
            check_values(port.name, inputs[port.name])
        num = num_rows(inputs)
        if num == 0:
            return np.empty((0, *self._logits.shape[1:]), np.float32)
        if not self._fixed_batch:
            logits = self._run(["logits"], inputs)[0].astype(np.float32, copy=False)
            if len(logits) != num:
                raise InvalidBundle(f"infer graph: got logits of {len(logits)} samples, expected {num}", code="FN-0347")
            return logits
        size = self._fixed_batch
        feeds = (
            {name: padded_rows(array, start, size) for name, array in inputs.items()} for start in range(0, num, size)
        )
        parts = [self._run(["logits"], feed)[0] for feed in feeds]
        return np.concatenate(parts)[:num].astype(np.float32, copy=False)


def check_names(inputs: NamedInputs, names: Sequence[str]) -> None:
    """Raise ValueError unless the inputs have exactly these names."""
    if not isinstance(inputs, Mapping):
        raise ValueError(
            f"inputs: got {type(inputs).__name__}, expected a dict of arrays with the names {sorted(names)}"
        )
    if inputs.keys() != set(names):
        raise ValueError(f"inputs: got {sorted(inputs)}, expected {sorted(names)}")


def num_rows(inputs: NamedInputs) -> int:
    """Return the number of samples. Raises ValueError if the inputs differ in it."""
    lengths = {name: len(array) for name, array in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"inputs: got {lengths} samples, expected the same number in each")
    return next(iter(lengths.values()))


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
        expected = form_of(port.dtype, port.shape)
        raise ValueError(f"{port.name}: got {form_of(array.dtype, array.shape)}, expected {expected}")


def form_of(dtype: object, shape: Sequence[int]) -> str:
    """Return a dtype and a shape for people: a length of -1 is written as n."""
    sides = ["n" if length == -1 else str(length) for length in shape]
    return f"{dtype} ({', '.join(sides)}{',' if len(sides) == 1 else ''})"


def check_values(name: str, x: Array) -> None:
    """Raise ValueError for NaN, infinity and negative tokens.

    Int8 quantization would convert NaN and infinity to confident predictions. Some runtimes count negative tokens from
    the end of the vocabulary.
    """
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise ValueError(f"{name}: got NaN or infinity, expected finite values only")
    if x.dtype.kind == "i" and x.size and x.min() < 0:
        raise ValueError(f"{name}: got {x.min()}, expected tokens of at least 0")


class BatchPorts:
    """The inputs that a batch fills, with their checks."""

    def __init__(self, manifest: Manifest, signature: Signature) -> None:
        self._names = input_names(manifest)
        names = {*self._names, *TARGET_PORTS}
        self._ports = [(port, np.dtype(port.dtype)) for port in signature.inputs if port.name in names]
        self._num_classes = manifest.num_classes
        self._num_tokens = manifest.num_tokens

    def feed(self, batch: PaddedBatch) -> dict[str, Array]:
        """Return the inputs of a batch by name. Raises ValueError for a wrong shape, dtype, label or token."""
        check_names(batch.inputs, self._names)
        feed: dict[str, Array] = {**batch.inputs, "y": batch.y, "mask": batch.mask}
        for port, dtype in self._ports:
            array = feed[port.name]
            # All dimensions of a batch are fixed. Two plain comparisons are fast enough for a thousand steps a second.
            if array.shape != port.shape or array.dtype != dtype:
                check_port(port, array)
        if self._num_classes:
            check_labels(batch.y, self._num_classes)
        for name, num_tokens in self._num_tokens.items():
            check_tokens(name, batch.inputs[name], num_tokens)
        return feed


def check_tokens(name: str, x: Inputs, num_tokens: int) -> None:
    """Raise ValueError for a token outside the vocabulary, and name its sample. 0 for ``num_tokens`` accepts any."""
    if not num_tokens or not x.size or (x.min() >= 0 and x.max() < num_tokens):
        return
    position = np.argwhere((x < 0) | (x >= num_tokens))[0]
    raise ValueError(f"{name}: token {x[tuple(position)]} at sample {position[0]}, expected 0 to {num_tokens - 1}")


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
    manifest: Manifest,
    name: str,
    inputs: tuple[Sequence[str], Sequence[str]],
    outputs: Sequence[str],
    other_outputs: Sequence[str] = (),
) -> Signature:
    """Return a Signature after checking the names of its inputs and outputs.

    Args:
        manifest: Has the Signature.
        name: The Signature's name.
        inputs: Names of the required and of the optional inputs.
        outputs: Names of the required outputs.
        other_outputs: Names of the optional outputs.

    Raises:
        InvalidBundle: A name is missing, unknown or repeated.
    """
    signature = manifest.signatures[name]
    required, optional = inputs
    for what, ports, names, allowed in (
        ("inputs", signature.inputs, required, optional),
        ("outputs", signature.outputs, outputs, other_outputs),
    ):
        actual = {port.name for port in ports}
        if not set(names) <= actual <= {*names, *allowed} or len(actual) != len(ports):
            raise InvalidBundle(
                f"bundle: signature {name!r} has {what} {sorted(port.name for port in ports)}, expected "
                f"{sorted(names)}",
                code="FN-0417",
            )
    return signature
