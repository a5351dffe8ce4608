"""What every runtime can do, whatever library stands behind it.

A runtime opens a Bundle's Signatures as callables. State lives outside the graph: a train step takes a
``TrainState`` and hands the next one back, so a device can stop after any step and go on from there.
``tests/contracts/test_runtime.py`` runs one suite over all implementations.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fanin.edge.bundle import Bundle
from fanin.edge.tensors import Float32s


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch of the Bundle's own size B.

    ``x`` (B, ...) float32; ``y`` (B,) int64; ``mask`` (B,) float32, 1 for a sample and 0 for padding, so
    that the last short batch of an epoch is exact.
    """

    x: Float32s
    y: npt.NDArray[np.int64]
    mask: Float32s


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Everything that a train step reads and writes: both vectors (num_values,) in the table's layout."""

    parameters: Float32s
    momentum: Float32s


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What evaluation tells of one batch: the loss in nats, summed over the unmasked samples, and the class that
    was chosen for each sample (B,), padding included."""

    loss_sum: float
    predicted: npt.NDArray[np.int64]


class TrainStep(Protocol):
    """One optimizer step on one batch; returns the next state and the batch's mean loss."""

    def __call__(self, state: TrainState, batch: Batch, learning_rate: float) -> tuple[TrainState, float]: ...


class Evaluate(Protocol):
    """Float evaluation of parameters (num_values,) on one batch."""

    def __call__(self, parameters: Float32s, batch: Batch) -> Evaluated: ...


class Predict(Protocol):
    """Int8 inference of one Version: ``x`` (n, ...) float32 in, logits (n, num_classes) float32 out."""

    def __call__(self, x: Float32s) -> Float32s: ...


class Runtime(Protocol):
    """A library that runs graphs. Bad graphs raise InvalidBundle; nothing of the library's own leaks."""

    @property
    def name(self) -> str:
        """The library and its version, as in ``onnxruntime 1.31.1``."""
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
