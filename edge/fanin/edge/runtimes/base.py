"""The contract of a runtime: open a Bundle's graphs as callables, on any inference library.

State lives outside the graphs. A train step receives a ``TrainState`` and returns the next one, so a device can stop
after any step and resume from the last state. ``available.open_runtime`` selects an implementation, and
``tests/contracts/test_runtime.py`` runs one suite over all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.tensors import Array, Float32s, Int32s, UInt8s

Inputs = Float32s | Int32s | UInt8s
"""One array (n, ...): float32 values or int32 tokens. ``preprocess`` also accepts bytes."""
NamedInputs = Mapping[str, Inputs]
"""The inputs of a model by name, each (n, ...) with the same n. The only input of most models is named ``x``."""
SHARED: Final = "shared"
"""The group of the parameters that travel."""
PERSONAL: Final = "personal"
"""The group of the parameters that stay on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBatch:
    """One batch of the Bundle's fixed batch size B.

    Attributes:
        inputs: The model's inputs by name, each (B, ...), float32 or int32.
        y: Targets: labels (B,) int32, next tokens (B, T) int32 with -1 for positions without a loss, or values
            (B, ...) float32.
        mask: (B,) float32: 1 for a sample, 0 for padding. With it the last, short batch of an epoch is exact.
    """

    inputs: NamedInputs
    y: Inputs
    mask: Float32s


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Everything that a train step reads and writes.

    Attributes:
        parameters: All parameters of the graphs (num_values,), laid out by the manifest's ``model_table``.
        optimizer: Flat vector (num_state_values,) in the order of ``graphs.optimizer_table``.
        num_steps: Steps since ``TrainStep.begin``.
    """

    parameters: Float32s
    optimizer: Float32s
    num_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionValues:
    """The values of a Version that fill its int8 model.

    Attributes:
        parameters: All parameters of the graphs (num_values,), laid out by the manifest's ``model_table``.
        ranges: The ranges of the activations (2 * activations,); None for those of the Bundle.
    """

    parameters: Float32s
    ranges: Float32s | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings of a train step. A graph that lacks an optional input ignores the setting.

    Attributes:
        learning_rate: Of the optimizer.
        proximal_weight: FedProx's mu.
        anchor: Parameters towards which the proximal term pulls (num_values,). Default: no pull.
        control: SCAFFOLD's c - c_i, which is added to the gradient (num_values,). Default: zeros.
        random_key: Key of the random inputs, from ``randomness.random_key``. Their values also depend on the step.
        optimizer: Settings of the optimizer by name, instead of the Bundle's (``Manifest.optimizer``).
        group: The parameters and running statistics that the step changes: ``SHARED`` or ``PERSONAL`` ones; "" for all.
            The others keep their values. Their optimizer state has no meaning after such a step.

    Reference:
        FedProx: Li et al. 2020, arXiv 1812.06127, section 3.
        SCAFFOLD: Karimireddy et al. 2020, arXiv 1910.06378, algorithm 1.
    """

    learning_rate: float
    proximal_weight: float = 0.0
    anchor: Float32s | None = None
    control: Float32s | None = None
    random_key: int = 0
    optimizer: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEvaluation:
    """Evaluation of one batch.

    Attributes:
        loss_sum: Sum of the loss over the samples with mask 1.
        predicted: Predictions for all samples, padding included: classes or tokens (int32) in the shape of ``y``, or
            the values (B, ...) float32 that the model returns.
        logits: The logits of the classes (B, ..., num_classes) float32, if they were asked for and the graph returns
            them.
    """

    loss_sum: float
    predicted: Inputs
    logits: Float32s | None = None


class TrainStep(Protocol):
    """The ``train`` Signature: one optimizer step on one batch."""

    def begin(self, parameters: Float32s) -> TrainState:
        """Return the state before the first step from these parameters (num_values,)."""
        ...

    def __call__(self, state: TrainState, batch: PaddedBatch, settings: StepSettings) -> tuple[TrainState, float]:
        """Return the next state and the mean loss over the samples with mask 1.

        Raises:
            ValueError: The state or the batch has a wrong shape, dtype, label or token.
            InvalidBundle: The graph does not run.
        """
        ...


class Evaluate(Protocol):
    """The ``evaluate`` Signature: float evaluation of parameters (num_values,) on one batch."""

    def __call__(self, parameters: Float32s, batch: PaddedBatch, *, with_logits: bool = False) -> BatchEvaluation: ...


class Predict(Protocol):
    """The ``infer`` Signature: int8 inference with the parameters of one Version."""

    def __call__(self, inputs: NamedInputs) -> Float32s:
        """Predict any number of samples.

        Args:
            inputs: The model's inputs by name, each (n, ...).

        Returns:
            Class logits (n, num_classes), token logits (n, T, num_classes), or values (n, ...).
        """
        ...


class MeasureRanges(Protocol):
    """The float form of ``infer`` with the parameters of one Version, whose outputs are its activations."""

    def __call__(self, inputs: NamedInputs) -> tuple[Float32s, Float32s]:
        """Return the lowest and the highest value of each activation in each example.

        Args:
            inputs: The model's inputs by name, each (n, ...).

        Returns:
            Lows and highs (n, activations), for the activations of the runtime's format in the order of the manifest.
        """
        ...


class Preprocess(Protocol):
    """The ``preprocess`` Signature: from raw sensor or file data (n, ...) to model inputs (n, ...)."""

    def __call__(self, raw: Inputs) -> Inputs: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPort:
    """An input or output of a graph file.

    Attributes:
        name: Name in the file.
        dtype: numpy's name of the element type.
        shape: Dimensions; -1 for a dimension of any length.
        scale: Scale of quantized values: value = scale * (stored - zero_point). 0.0 if they are not quantized.
        zero_point: Stored value of 0.0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    scale: float = 0.0
    zero_point: int = 0


class LoadedModel(Protocol):
    """A graph file from any source, opened as a callable."""

    @property
    def inputs(self) -> tuple[ModelPort, ...]: ...

    @property
    def outputs(self) -> tuple[ModelPort, ...]: ...

    def __call__(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Run the graph on inputs by name and return its outputs by name.

        Raises:
            ValueError: An input is missing, unknown, or has a wrong dtype or shape.
            InvalidBundle: The graph does not run.
        """
        ...


class Runtime(Protocol):
    """An inference library.

    A graph that it cannot open or run raises InvalidBundle; exceptions of the library itself are never visible.
    """

    @property
    def name(self) -> str:
        """Library and version, for example ``onnxruntime 1.31.1``."""
        ...

    @property
    def graph_format(self) -> str:
        """Format of the graphs that it runs: ``onnx`` or ``tflite``."""
        ...

    def open_train(self, bundle: Bundle) -> TrainStep:
        """Open the ``train`` Signature."""
        ...

    def open_evaluate(self, bundle: Bundle) -> Evaluate:
        """Open the ``evaluate`` Signature."""
        ...

    def open_predict(self, bundle: Bundle, parameters: Float32s, ranges: Float32s | None = None) -> Predict:
        """Open the ``infer`` Signature and fill its slots.

        Args:
            bundle: The Bundle.
            parameters: The parameters (num_values,), those of ``model_table``.
            ranges: The ranges of the Version (2 * activations,); None for those of the Bundle.

        Raises:
            InvalidBundle: The graph cannot be opened.
            InvalidVersion: A parameter is not finite, or the ranges are not those of the Bundle's activations.
        """
        ...

    def open_ranges(self, bundle: Bundle, parameters: Float32s) -> MeasureRanges:
        """Open the graph that measures the activations of ``infer`` in float, for the same parameters.

        Raises:
            InvalidBundle: The Bundle has no activations in the runtime's format, or the graph cannot be opened.
            InvalidVersion: A parameter is not finite.
        """
        ...

    def open_model(self, graph: bytes, what: str, signature: str = "") -> LoadedModel:
        """Open any graph file of the runtime's format.

        Args:
            graph: The file's bytes.
            what: Name of the file in error messages.
            signature: Which signature to open, for a file that has several; "" for the only one.
        """
        ...
