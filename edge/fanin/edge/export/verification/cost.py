"""The cost of int8 on validation data, or its distance from float on calibration data; and whether a module is trained.

A module whose loss is not lower than that of one output for all samples has learnt nothing from its inputs. So the loss
alone shows whether a module is trained: its values may have any scale, such as logits for targets 0 and 1.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export.app.app import App
from fanin.edge.export.app.inputs.named import num_samples, numpy_inputs, rows_of
from fanin.edge.export.app.inputs.sequences import groups_of
from fanin.edge.export.app.losses import Loss, loss_sum, squared_error
from fanin.edge.export.app.optimizers.optimizer import Tensors
from fanin.edge.export.graph.examples import example_batch, loss_targets
from fanin.edge.export.module.draws import refused
from fanin.edge.export.module.prepare import Prepared
from fanin.edge.runtimes.base import PaddedBatch, Runtime, VersionValues
from fanin.edge.runtimes.measure import Observation, measure
from fanin.edge.runtimes.quality import Agreement, Quality, check_drop
from fanin.protos.errors import InvalidVersion, UnsupportedModel

COMPARED_SAMPLES: Final = 256
"""Calibration samples that are compared: more of them take longer and show the same."""
MIN_GAIN: Final = 0.02
"""Share of the labels, or of the squared error, by which a trained module is better than one constant prediction."""
MIN_LOSS_GAIN: Final = 1e-4
"""The same of another loss. It has no zero, so a share of it may be all that can be learnt: only rounding counts."""
TRAIN_FIRST: Final = (
    "int8's scales are calibrated with the module as it is, so int8 may cost a trained Version more: train the module "
    "before the export, such as by fanin export APP --out FOLDER --pretrain DATA, or let devices refresh the scales: "
    'int8.ranges = "devices" in the plan'
)
MAX_STEPS: Final = 50


class _Outputs:
    """The outputs of a model of values. It is a ``BatchObserver``."""

    needs_logits = False

    def __init__(self) -> None:
        self.rows: list[list[Tensor]] = []
        """Targets, outputs in float and outputs in int8, by batch."""

    def add(self, observation: Observation) -> None:
        arrays = observation.targets, observation.in_float, observation.in_int8
        self.rows.append([torch.from_numpy(np.array(each)) for each in arrays])


def measure_app(app: App, bundle: Bundle, runtime: Runtime) -> Quality:
    """Measure float and int8 on the validation data, with the loss of both for a model of values with one output."""
    version = VersionValues(parameters=bundle.completed(bundle.initial_parameters()))
    outputs = _Outputs()
    batches = validation_batches(app)
    if app.num_classes or app.lengths is not None or isinstance(app.output, tuple):
        return measure(runtime, bundle, version, batches)
    quality = measure(runtime, bundle, version, batches, outputs)
    rows, total = outputs.rows, math.nan
    # Any error: the loss is the user's code, and values of int8 may be outside its domain, such as a share of 1.001.
    with torch.no_grad(), suppress(Exception):
        total = sum(float(_sum_of_real(app.loss, output, y)) for y, _, output in rows)
    constant = None
    if app.loss is not squared_error:  # of this one the spread of the targets is known
        constant = constant_loss(app.loss, [each for _, each, _ in rows], [y for y, _, _ in rows])
    return replace(quality, loss_sum_int8=total if math.isfinite(total) else None, loss_sum_constant=constant)


def check_cost(prepared: Prepared, name: str, quality: Quality, max_drop: float | None) -> list[str]:
    """Return the notes on the cost of int8.

    Raises UnsupportedModel if int8 costs too much. The message says if the module seems not to be trained.
    """
    try:
        note = check_drop(f"{prepared.what}: {name}", quality, max_drop)
    except InvalidVersion as exc:
        finding = untrained(prepared.app, {name: quality}, {})
        advice = [TRAIN_FIRST] if finding else []
        raise UnsupportedModel("; ".join([str(exc), *finding, *advice]), code=exc.code) from exc
    return [note] if note else []


def constant_loss(loss: Loss, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> float | None:
    """Return the sum of the loss for the best constant output that a minimization finds; None if it has none.

    Args:
        loss: The loss of an App.
        outputs: The outputs of its module by batch, each (n, ...). The minimization begins at their mean.
        targets: Their targets.
    """
    values, num = [math.inf], sum(map(len, outputs))
    constant = torch.cat([*outputs]).mean(0, keepdim=True).requires_grad_()
    optimizer = torch.optim.LBFGS([constant], max_iter=MAX_STEPS, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        optimizer.zero_grad()
        parts = [_sum_of_real(loss, constant.expand(len(y), *constant.shape[1:]), y) for y in targets]
        total = torch.stack(parts).sum()
        values.append(float(total.detach()))
        mean = total / num
        mean.backward()  # type: ignore[no-untyped-call]  # torch's
        return mean

    # Any error: the loss is the user's code, and a step may leave its domain, such as that of shares.
    with suppress(Exception), refused():
        optimizer.step(step)  # type: ignore[no-untyped-call]  # torch's
    best = min(value for value in values if not math.isnan(value))
    return best if math.isfinite(best) else None


def _sum_of_real(loss: Loss, output: Tensor, y: Tensor) -> Tensor:
    """Return the sum of a loss over samples that are all real."""
    return loss_sum(loss, output, loss_targets(y), torch.ones(len(y)))


def validation_batches(app: App) -> Iterator[PaddedBatch]:
    """Yield the validation data in batches of the App's size; the last one is padded and masked."""
    inputs, y = app.held_out
    y = y.to(app.target_dtype)
    yield from _padded(app, inputs, y, groups_of(app.lengths, {**inputs, "y": y}))


def calibration_batches(prepared: Prepared) -> Iterator[PaddedBatch]:
    """Yield some of the calibration data like ``validation_batches``; y has no meaning."""
    _, example, _ = example_batch(prepared)
    inputs = rows_of(prepared.app.inputs, slice(COMPARED_SAMPLES))
    y = example[torch.arange(num_samples(inputs)) % len(example)]
    yield from _padded(prepared.app, inputs, y, groups_of(prepared.app.lengths, inputs))


def _padded(app: App, inputs: Tensors, y: Tensor, groups: Iterable[tuple[int, Tensor]]) -> Iterator[PaddedBatch]:
    """Yield the batches of each group of rows, with the group's length. The last one is padded with its first row."""
    for size, rows in groups:
        for start in range(0, len(rows), app.batch_size):
            index, mask = rows[start : start + app.batch_size], torch.zeros(app.batch_size)
            mask[: len(index)] = 1.0
            index = torch.cat([index, index[:1].expand(app.batch_size - len(index))])
            arrays = {**numpy_inputs(rows_of(inputs, index)), "y": y[index].numpy()}
            if app.lengths is not None:
                arrays = {name: app.lengths.fit(name, array, size) for name, array in arrays.items()}
            yield PaddedBatch(inputs=arrays, y=arrays.pop("y"), mask=mask.numpy())


def warnings_of(name: str, comparison: Agreement) -> list[str]:
    advice = (
        "it may not be trained yet, or a few of these examples are outliers; give the App validation data to measure "
        "the cost of int8, and set quantization_aware to lower it"
    )
    return [] if comparison.is_good else [f"{name}: {comparison}, a large difference for one model: {advice}"]


def untrained(app: App, measured: Mapping[str, Quality], compared: Mapping[str, Agreement]) -> list[str]:
    """Return a note if the module is not better than a constant prediction, or if that is unknown."""
    if app.validation is None:
        name, comparison = next(iter(compared.items()))
        return [f"the cost of int8 is not measured; in {name}, {comparison}: give the App validation=(x, y)"]
    name, quality = next(iter(measured.items()))
    if app.num_classes:
        labels = app.held_out[1]
        counts = torch.bincount(labels[labels >= 0].flatten())
        share = float(counts.max() / counts.sum())
        is_trained = quality.accuracy_float > share + MIN_GAIN
        accuracy = f"{100 * quality.accuracy_float:.2f} % of the labels"
        scores = f"predicts {accuracy}, of which {100 * share:.2f} % are of one class"
        cost = f"{quality.drop_points:.2f} points of accuracy"
    elif app.loss is squared_error:
        # A squared error of 0 means that the targets have another form than the output, and cannot be compared.
        error, spread = quality.squares_float, quality.squares_wanted
        is_trained = not error or error < (1.0 - MIN_GAIN) * spread
        scores = f"has a squared error of {error:g} in total, and the mean of the targets one of {spread:g}"
        cost = f"{quality.rise_percent:.2f} % of the squared error"
    elif quality.loss_sum_constant is not None:
        # Another loss may give the values another scale than the targets, such as logits for 0 and 1.
        loss, constant = (total / quality.num_examples for total in (quality.loss_sum, quality.loss_sum_constant))
        is_trained = loss < constant - MIN_LOSS_GAIN * abs(constant)
        scores = f"has a mean loss of {loss:.4f}, and one output for all examples has {constant:.4f}"
        rise = quality.loss_rise
        cost = "an unknown part of the loss" if rise is None else f"{rise:.4f} of the mean loss"
    else:
        return []
    if is_trained:
        return []
    return [f"the module {scores}: it seems not to be trained; int8 now costs {cost} in {name}"]
