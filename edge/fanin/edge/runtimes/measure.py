"""Measurement of a Version, in float and as the int8 model that devices serve.

Devices measure the Version of each Round on their own validation data, and a publisher measures on validation data
before it signs (``measure``). Without validation data the two models are compared with each other (``compare``). The
ranges of the activations for int8 are measured in float (``measure_ranges``).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.lengths import TARGETS
from fanin.edge.ranges import NUM_BINS, columns, counts, ranges_of_data
from fanin.edge.runtimes.base import Inputs, PaddedBatch, Runtime, VersionValues
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.edge.runtimes.quality import SMALL_SPREAD, Agreement, Quality
from fanin.edge.tensors import Float32s, Float64s, Int64s


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Targets and predictions of a batch, without padding.

    Attributes:
        targets: The targets (n, ...).
        in_float: The predictions of the float model, in the shape and dtype of the targets, unless the App declared
            targets of another form.
        in_int8: The predictions of the int8 model.
        labels: The targets of the labelled positions (num_labels,), if the observer needs logits of classes.
        logits: Their logits in the float model (num_labels, num_classes); None if the graph does not return them.
        logits_int8: Their logits in the int8 model.
    """

    targets: Inputs
    in_float: Inputs
    in_int8: Inputs
    labels: Inputs | None = None
    logits: Float32s | None = None
    logits_int8: Float32s | None = None


class BatchObserver(Protocol):
    """Receives the predictions of a measurement, batch by batch."""

    @property
    def needs_logits(self) -> bool:
        """Whether observations of a model with labels have logits."""
        ...

    def add(self, observation: Observation) -> None:
        """Receive a batch."""
        ...


def measure(
    runtime: Runtime,
    bundle: Bundle,
    version: VersionValues,
    batches: Iterable[PaddedBatch],
    observer: BatchObserver | None = None,
) -> Quality:
    """Evaluate a Version on examples with targets, in float and in int8.

    Args:
        runtime: Runs the graphs.
        bundle: Has the ``evaluate`` and ``infer`` graphs.
        version: The parameters, and the ranges of the int8 model.
        batches: The examples.
        observer: Receives each batch.

    Raises:
        ValueError: The loss is not finite.
        InvalidBundle: The runtime cannot open or run a graph.
        InvalidVersion: The parameters are not finite.
    """
    counts = np.zeros(5, np.int64)  # examples, labels, correct in float, correct in int8, agreeing
    squares, spread = np.zeros(2), _Spreads()
    loss_sum, has_other_targets = 0.0, False
    with_logits = observer is not None and observer.needs_logits and bundle.manifest.num_classes > 0
    for pair in _predictions(runtime, bundle, version, batches, with_logits=with_logits):
        loss_sum += pair.loss_sum
        counts[0] += len(pair.y)
        if observer is not None:
            observer.add(_observation(bundle.manifest, pair, with_logits=with_logits))
        if bundle.manifest.num_classes:
            has_label = pair.y != NO_TOKEN
            is_correct_float = (pair.in_float == pair.y) & has_label
            is_correct_int8 = (pair.in_int8 == pair.y) & has_label
            rows = (has_label, is_correct_float, is_correct_int8, (pair.in_float == pair.in_int8) & has_label)
            counts[1:] += [int(row.sum()) for row in rows]
        else:
            # Targets of another form than the output cannot be compared with it. Then int8 is compared with float.
            is_comparable = (pair.y.shape, pair.y.dtype) == (pair.in_float.shape, pair.in_float.dtype)
            has_other_targets |= not is_comparable
            wanted = pair.y if is_comparable else pair.in_float
            squares += [_squared_error(pair.in_float, wanted), _squared_error(pair.in_int8, wanted)]
            spread.add(wanted)
    if not math.isfinite(loss_sum):
        raise ValueError(
            f"the Version's loss is not finite on these examples (got {loss_sum}), expected a number; "
            "its parameters diverged, or the data does not fit"
        )
    num_examples, num_predictions, num_correct_float, num_correct_int8, num_agreeing = counts.tolist()
    return Quality(
        num_examples=num_examples,
        loss_sum=loss_sum,
        num_predictions=num_predictions,
        num_correct_float=num_correct_float,
        num_correct_int8=num_correct_int8,
        num_agreeing=num_agreeing,
        squares_float=float(squares[0]),
        squares_int8=float(squares[1]),
        squares_wanted=spread.squares,
        has_other_targets=has_other_targets,
    )


def compare(runtime: Runtime, bundle: Bundle, version: VersionValues, batches: Iterable[PaddedBatch]) -> Agreement:
    """Compare the float and the int8 model on the same inputs. The batches' ``y`` is ignored.

    Arguments and exceptions are those of ``measure``, without the check of the loss.
    """
    num_examples, num_labels, num_agreeing, squares, size, spread = 0, 0, 0, 0.0, 0.0, _Spreads()
    for pair in _predictions(runtime, bundle, version, batches):
        num_examples += len(pair.y)
        num_labels += pair.in_float.size
        if bundle.manifest.num_classes:
            num_agreeing += int((pair.in_float == pair.in_int8).sum())
        else:
            squares += _squared_error(pair.in_int8, pair.in_float)
            size += float(np.square(pair.in_float, dtype=np.float64).sum())
            spread.add(pair.in_float)
    if bundle.manifest.num_classes:
        return Agreement(num_examples=num_examples, num_labels=num_labels, agreement=num_agreeing / max(1, num_labels))
    floor = SMALL_SPREAD**2 * size
    reference = max(spread.squares, floor)
    return Agreement(
        num_examples=num_examples,
        relative_error=math.sqrt(squares / reference) if reference else math.inf if squares else 0.0,
        hardly_varies=spread.squares < floor,
    )


def measure_ranges(runtime: Runtime, bundle: Bundle, parameters: Float32s, batches: Iterable[PaddedBatch]) -> Int64s:
    """Return the histograms of the activations in the runtime's format (num_measured, 2, NUM_BINS): see ``counts``.

    Arguments and exceptions are those of ``compare``.
    """
    histograms = np.zeros((columns(bundle.manifest.activations, runtime.graph_format).size, 2, NUM_BINS), np.int64)
    for lows, highs in _extremes(runtime, bundle, parameters, batches):
        histograms += counts(lows, highs)
    return histograms


def measure_data(runtime: Runtime, bundle: Bundle, parameters: Float32s, batches: Iterable[PaddedBatch]) -> Float32s:
    """Return the ranges of all activations on a data set (num_activations, 2): see ``ranges_of_data``.

    An activation of another format has NaN, as has one without an example whose values are finite.

    Arguments and exceptions are those of ``compare``.
    """
    activations = bundle.manifest.activations
    measured = columns(activations, runtime.graph_format)
    ranges = np.full((len(activations), 2), np.nan, np.float32)
    lows, highs = (np.concatenate(ends) for ends in zip(*_extremes(runtime, bundle, parameters, batches), strict=True))
    ranges[measured] = ranges_of_data(lows, highs, ranges[measured])
    return ranges


def _extremes(
    runtime: Runtime, bundle: Bundle, parameters: Float32s, batches: Iterable[PaddedBatch]
) -> Iterator[tuple[Float32s, Float32s]]:
    """Yield the lowest and the highest value of each activation of the format in the examples of each batch."""
    measured = runtime.open_ranges(bundle, parameters)
    for batch in batches:
        is_sample = batch.mask > 0
        yield measured({name: array[is_sample] for name, array in batch.inputs.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Predictions:
    """Targets and both models' predictions for the samples of one batch, without padding."""

    loss_sum: float
    y: Inputs
    in_float: Inputs
    in_int8: Inputs
    logits: Float32s | None
    logits_int8: Float32s | None


def _predictions(
    runtime: Runtime,
    bundle: Bundle,
    version: VersionValues,
    batches: Iterable[PaddedBatch],
    *,
    with_logits: bool = False,
) -> Iterator[_Predictions]:
    evaluate = runtime.open_evaluate(bundle)
    # Without graphs there is no int8 model. Its numbers are then those of the float model, and a simulation shows none.
    has_int8 = bool(bundle.manifest.signatures["infer"].graphs)
    predict = runtime.open_predict(bundle, version.parameters, version.ranges) if has_int8 else None
    for batch in batches:
        is_sample = batch.mask > 0
        samples = {name: array[is_sample] for name, array in batch.inputs.items()}
        evaluation = evaluate(version.parameters, batch, with_logits=with_logits)
        in_float: Inputs = evaluation.predicted[is_sample]
        logits = None if evaluation.logits is None else evaluation.logits[is_sample]
        in_int8, logits_int8 = in_float, logits
        if predict is not None:
            logits_int8 = predict(samples)
            in_int8 = logits_int8.argmax(axis=-1).astype(np.int32) if bundle.manifest.num_classes else logits_int8
        yield _Predictions(
            loss_sum=evaluation.loss_sum,
            y=batch.y[is_sample],
            in_float=in_float,
            in_int8=in_int8,
            logits=logits,
            logits_int8=logits_int8,
        )


def _observation(manifest: Manifest, pair: _Predictions, *, with_logits: bool) -> Observation:
    """Return targets and predictions, padded to the longest length if each position has a target."""
    lengths, arrays = manifest.lengths, (pair.y, pair.in_float, pair.in_int8)
    if lengths is not None and pair.y.shape == pair.in_float.shape:
        arrays = tuple(lengths.fit(TARGETS, each, lengths.longest) for each in arrays)  # type: ignore[assignment]
    targets, in_float, in_int8 = arrays
    if not with_logits:
        return Observation(targets=targets, in_float=in_float, in_int8=in_int8)
    # Positions without a label have logits, too: a vocabulary makes them the largest arrays of a measurement.
    has_label = pair.y != NO_TOKEN
    logits, logits_int8 = (None if each is None else each[has_label] for each in (pair.logits, pair.logits_int8))
    return Observation(
        targets=targets,
        in_float=in_float,
        in_int8=in_int8,
        labels=pair.y[has_label],
        logits=logits,
        logits_int8=logits_int8,
    )


def _squared_error(values: Inputs, targets: Inputs) -> float:
    return float(np.square(values.astype(np.float64) - targets).sum())


class _Spread:
    """Sum of squared distances of values (n, ...) from their mean over n, accumulated batch by batch.

    Distances are taken from the mean of the first batch, so that a large common offset does not cancel the digits of
    the differences.
    """

    def __init__(self) -> None:
        self._num = 0
        self._origin: Float64s | None = None
        self._sums = np.zeros(())
        self._squares = np.zeros(())

    def add(self, values: Inputs) -> None:
        if not len(values):
            return
        exact = values.astype(np.float64)
        if self._origin is None:
            self._origin = exact.mean(axis=0)
        shifted = exact - self._origin
        self._num += len(values)
        self._sums = self._sums + shifted.sum(axis=0)
        self._squares = self._squares + np.square(shifted).sum(axis=0)

    @property
    def squares(self) -> float:
        """The sum over all values."""
        return float((self._squares - np.square(self._sums) / max(1, self._num)).clip(min=0.0).sum())


class _Spreads:
    """The sum of a ``_Spread`` for each shape of a sample: sequences of different lengths have no common mean."""

    def __init__(self) -> None:
        self._parts: defaultdict[tuple[int, ...], _Spread] = defaultdict(_Spread)

    def add(self, values: Inputs) -> None:
        self._parts[values.shape[1:]].add(values)

    @property
    def squares(self) -> float:
        """The sum over all values."""
        return sum(part.squares for part in self._parts.values())
