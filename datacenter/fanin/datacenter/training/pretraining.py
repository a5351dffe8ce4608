"""A short training of an App's module in one process, for an export without a trained model.

The activation scales of int8 are calibrated at the export. Those of an untrained module would not fit the trained one.
The recipe's optimizer, loss and clipping train all parameters that require a gradient. The same arguments give the same
parameters on one machine.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from fanin.clients.data.batching import at_longest
from fanin.clients.data.examples import Examples
from fanin.edge.runtimes.graphs import form_of
from fanin.edge.runtimes.models import label_remedy
from fanin.protos.errors import Diverged, InvalidInput

if TYPE_CHECKING:
    # The exporter imports onnx and the TFLite converter.
    from fanin.edge.export.app.app import App

SEED: Final = 0
TRAIN_AGAIN: Final = "lower the learning rate, or scale the data to about -1 to 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretraining:
    """Passes over the data, and the learning rate.

    Raises:
        InvalidInput: A value is not positive.
    """

    epochs: int = 5
    learning_rate: float = 0.01

    def __post_init__(self) -> None:
        if self.epochs < 1 or not 0.0 < self.learning_rate < float("inf"):
            raise InvalidInput(
                f"pretraining: got {self.epochs} epochs and a learning rate of {self.learning_rate:g}, expected at "
                "least 1 and a positive number",
                code="FN-1385",
            )


def pretrain(app: "App", train: Examples, options: Pretraining, log: Callable[[str], None]) -> "App":
    """Train a copy of an App's module.

    Args:
        app: The App.
        train: Inputs of the module or raw inputs, and their targets.
        options: Epochs and learning rate.
        log: Receives one line for each epoch.

    Returns:
        The App with the trained module.

    Raises:
        InvalidInput: The data does not fit the App.
        Diverged: The loss is not finite.
        UnsupportedModel: The module or the loss raises on the data.
    """
    from fanin.edge.export.app.calls import guarded
    from fanin.edge.export.app.inputs.named import rows_of

    inputs, y = fitting_data(app, train)
    module = copy.deepcopy(app.module)
    parameters = [value for value in module.parameters() if value.requires_grad]
    optimizer = app.recipe.optimizer.eager(parameters, options.learning_rate)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        for epoch in range(1, options.epochs + 1):
            losses = []
            for index in _batches(len(y), app.batch_size):
                optimizer.zero_grad()
                call = partial(_loss, app, module, (rows_of(inputs, index), y[index]))
                loss = guarded(f"App {app.name}: the pretraining", module, call)
                torch.autograd.backward(loss)
                if app.recipe.clip_norm:
                    torch.nn.utils.clip_grad_norm_(parameters, app.recipe.clip_norm)
                optimizer.step()
                losses.append(float(loss.detach()))
            mean = float(np.mean(losses))
            if not np.isfinite(mean):
                raise Diverged(
                    f"pretraining: the loss is {mean} in epoch {epoch}, expected a finite number; {TRAIN_AGAIN}",
                    code="FN-1386",
                )
            log(f"pretraining: epoch {epoch} of {options.epochs}, loss {mean:.4f}")
    return replace(app, module=module)


def fitting_data(app: "App", data: Examples) -> tuple[dict[str, Tensor], Tensor]:
    """Return data as the App's module and loss accept it. Raises InvalidInput if it does not fit the App."""
    from fanin.edge.export.app.app import inputs_of
    from fanin.edge.export.app.inputs.named import torch_inputs

    try:
        data = at_longest(data, app.lengths)
    except ValueError as exc:
        raise InvalidInput(f"pretraining: got data {exc}", code="FN-1185") from exc
    converted, y = inputs_of(app, torch_inputs(data.inputs)), torch.from_numpy(data.y)
    if missing := [name for name in app.inputs if name not in converted]:
        raise InvalidInput(
            f"pretraining: got data with the inputs {sorted(converted)}, expected {sorted(app.inputs)}; add {missing}",
            code="FN-1387",
        )
    inputs = {name: converted[name] for name in app.inputs}
    for name, expected in app.inputs.items():
        if (inputs[name].dtype, inputs[name].shape[1:]) != (expected.dtype, expected.shape[1:]):
            raise InvalidInput(
                f"pretraining: got data {name} {form_of(inputs[name].dtype, inputs[name].shape)}, expected "
                f"{form_of(expected.dtype, (-1, *app.input_shapes[name]))} like the calibration data of App {app.name}",
                code="FN-1387",
            )
    is_values = y.is_floating_point()
    if is_values != app.target_dtype.is_floating_point or (app.num_classes and int(y.max()) >= app.num_classes):
        integers = f"classes from 0 to {app.num_classes - 1}" if app.num_classes else "integers"
        wanted = "float values" if app.target_dtype.is_floating_point else integers
        remedy = "" if is_values or not app.num_classes else label_remedy(data.y, app.num_classes)
        raise InvalidInput(
            f"pretraining: got data y {y.dtype} from {y.min()} to {y.max()}, expected {wanted}{remedy}", code="FN-1387"
        )
    return inputs, y if is_values else y.long()


def _loss(app: "App", module: torch.nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
    from fanin.edge.export.app.losses import loss_sum
    from fanin.edge.export.graph.examples import check_output

    inputs, y = batch
    total = loss_sum(app.loss, check_output(app, app.call(module, inputs)), y, torch.ones(len(y)))
    return total / len(y)


def _batches(num: int, batch_size: int) -> Iterator[Tensor]:
    """Yield the indices of each batch in random order, without a last batch of one sample, in which norms fail."""
    for index in torch.split(torch.randperm(num), batch_size):
        if len(index) > 1 or num == 1 or batch_size == 1:
            yield index
