"""What every runtime can do, whatever library stands behind it.

A runtime opens a Bundle's Signatures as callables. State lives outside the graph: a train step takes a
``TrainState`` and hands the next one back, so a device can stop after any step and go on from there.
``tests/contracts/test_runtime.py`` runs one suite over all implementations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.tensors import Float32s

Int32s = npt.NDArray[np.int32]
"""Labels, or tokens."""
UInt8s = npt.NDArray[np.uint8]
"""Pixels or characters, as files and sensors have them."""
Inputs = Float32s | Int32s | UInt8s
"""What a model is given (n, ...): float32 values or int32 tokens; ``preprocess`` takes bytes too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch of the Bundle's own size B.

    ``x`` (B, ...) float32 or int32; ``y`` is what the model is to say: labels (B,) int32, next tokens (B, T)
    int32 (-1: none, no loss is taken there), or values (B, ...) float32. ``mask`` (B,) float32 is 1 for a sample
    and 0 for padding, so that the last short batch of an epoch is exact.
    """

    x: Inputs
    y: Inputs
    mask: Float32s


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Everything that a train step reads and writes.

    ``parameters`` (num_values,) lie as the manifest's table says, ``optimizer`` (num_state_values,) as
    ``optimizer_table`` does; ``num_steps`` counts the steps that were taken.
    """

    parameters: Float32s
    optimizer: Float32s
    num_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What a step is told from outside.

    ``proximal_weight`` is FedProx's mu and ``anchor`` (num_values,) the parameters that it pulls towards (Li et
    al. 2020, arXiv 1812.06127, section 3); ``control`` (num_values,) is SCAFFOLD's c - c_i, added to the gradient
    (Karimireddy et al. 2020, arXiv 1910.06378, algorithm 1). A graph without these inputs takes none of them.
    """

    learning_rate: float
    proximal_weight: float = 0.0
    anchor: Float32s | None = None
    control: Float32s | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What evaluation tells of one batch: the loss, summed over the unmasked samples, and what was said for each
    sample, padding included: the chosen labels or tokens, int32, or values, float32, in the form of ``y``."""

    loss_sum: float
    predicted: Inputs


class TrainStep(Protocol):
    """One optimizer step on one batch; returns the next state and the batch's mean loss."""

    def begin(self, parameters: Float32s) -> TrainState:
        """The state before the first step from these parameters (num_values,)."""
        ...

    def __call__(self, state: TrainState, batch: Batch, settings: StepSettings) -> tuple[TrainState, float]: ...


class Evaluate(Protocol):
    """Float evaluation of parameters (num_values,) on one batch."""

    def __call__(self, parameters: Float32s, batch: Batch) -> Evaluated: ...


class Predict(Protocol):
    """Int8 inference of one Version: ``x`` (n, ...) in, float32 out: logits (n, num_classes), (n, T, num_classes)
    of tokens, or values (n, ...)."""

    def __call__(self, x: Inputs) -> Float32s: ...


class Preprocess(Protocol):
    """From what a device has, ``raw`` (n, ...), to what the model is given, ``x`` (n, ...)."""

    def __call__(self, raw: Inputs) -> Inputs: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPort:
    """An input or output of any model: ``dtype`` is numpy's name, -1 in ``shape`` any length.

    Where ``scale`` is not 0.0 the values are quantized: value = scale * (stored - zero_point).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    scale: float = 0.0
    zero_point: int = 0


class Model(Protocol):
    """A graph file as it is, whoever made it."""

    @property
    def inputs(self) -> tuple[ModelPort, ...]: ...

    @property
    def outputs(self) -> tuple[ModelPort, ...]: ...

    def __call__(self, feed: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, npt.NDArray[np.generic]]:
        """Outputs by name. Raises ValueError for inputs that are not the model's, InvalidBundle if it does not run."""
        ...


class Runtime(Protocol):
    """A library that runs graphs. Bad graphs raise InvalidBundle; nothing of the library's own leaks."""

    @property
    def name(self) -> str:
        """The library and its version, as in ``onnxruntime 1.31.1``."""
        ...

    @property
    def graph_format(self) -> str:
        """The format of the graphs that it runs: ``onnx`` or ``tflite``."""
        ...

    def open_train(self, bundle: Bundle) -> TrainStep:
        """The ``train`` Signature."""
        ...

    def open_evaluate(self, bundle: Bundle) -> Evaluate:
        """The ``evaluate`` Signature."""
        ...

    def open_predict(self, bundle: Bundle, parameters: Float32s) -> Predict:
        """The ``infer`` Signature with the slots filled from ``parameters`` (num_values,)."""
        ...

    def open_model(self, graph: bytes, what: str, signature: str = "") -> Model:
        """Any graph file of the runtime's format; ``what`` is its name in messages.

        ``signature`` says which one of several is meant, where the format has them ("": the only one).
        """
        ...
