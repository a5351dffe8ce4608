"""What is exported must do what the module does: held for every App, before its Bundle is written.

1. One exported train step and eager torch (autograd and ``torch.optim.SGD``) from the same state agree.
2. The exported evaluation agrees with the module's own loss.
3. The int8 graph takes Version 0's slots and gives finite logits, for the traced batch and for one sample.
4. It gives about the same logits fused by the runtime and plain: an optimizer's mistake is found here, not on devices.
"""

import copy
from typing import Final

import numpy as np
import torch

from fanin.edge.bundle import Bundle
from fanin.edge.export.app import App
from fanin.edge.export.trace import example_batch, table_of, trainable
from fanin.edge.runtimes.base import Batch, Runtime, TrainState
from fanin.edge.tensors import Float32s
from fanin.protos.errors import UnsupportedModel

TOLERANCE: Final = 1e-4
"""Of max(1, |value|): a hundred times what the order of additions makes, far less than a wrong gradient does."""
INT8_TOLERANCE: Final = 0.05
"""Mean difference of logits, of their range: a few roundings to 8 bits the other way, not a wrong kernel."""
LEARNING_RATE: Final = 0.1


def verify(app: App, bundle: Bundle, runtime: Runtime, plain: Runtime) -> None:
    """The module's checklist; ``plain`` is the runtime without fused operators. Raises UnsupportedModel."""
    x, y, mask = example_batch(app)
    batch = Batch(x=x.numpy(), y=y.numpy(), mask=mask.numpy())
    state = TrainState(
        parameters=bundle.initial_parameters(), momentum=np.zeros(bundle.manifest.table.num_values, "f4")
    )
    # (1)
    expected = eager_step(app, LEARNING_RATE)
    following, _ = runtime.open_train(bundle)(state, batch, LEARNING_RATE)
    _check_close(app, "train step: parameters", following.parameters, expected)
    # (2)
    module = copy.deepcopy(app.module).eval()
    with torch.no_grad():
        loss_sum = float((mask * app.loss(module(x), y)).sum())
    sums = runtime.open_evaluate(bundle)(state.parameters, batch)
    _check_close(app, "evaluation: loss", np.array([sums.loss_sum], np.float32), np.array([loss_sum], np.float32))
    # (3)
    predict = runtime.open_predict(bundle, state.parameters)
    logits = predict(batch.x)
    for got, num in ((logits, len(batch.x)), (predict(batch.x[:1]), 1)):
        if got.shape != (num, app.num_classes) or not np.isfinite(got).all():
            raise UnsupportedModel(
                f"App {app.name}: the int8 graph gave logits {got.shape} for {num} samples, "
                f"expected finite ones of shape {(num, app.num_classes)}"
            )
    # (4)
    expected_logits = plain.open_predict(bundle, state.parameters)(batch.x)
    gap, spread = float(np.abs(logits - expected_logits).mean()), float(np.ptp(expected_logits))
    if gap > INT8_TOLERANCE * spread:
        raise UnsupportedModel(
            f"App {app.name} ({type(app.module).__name__}): {runtime.name} gives int8 logits {gap:.1e} off those of "
            f"the plain graph, expected at most {INT8_TOLERANCE * spread:.1e}; please report the module"
        )


def eager_step(app: App, learning_rate: float) -> Float32s:
    """Parameters (num_values,) after one step of eager torch on the example batch."""
    module = copy.deepcopy(app.module)
    held = {name: value for name, value in module.named_parameters() if value.requires_grad}
    optimizer = torch.optim.SGD(held.values(), lr=learning_rate, momentum=app.momentum)
    x, y, mask = example_batch(app)
    loss = (mask * app.loss(module(x), y)).sum() / mask.sum().clamp(min=1.0)
    torch.autograd.backward(loss)
    optimizer.step()
    table = table_of(trainable(app))
    return table.flatten({name: value.detach().numpy() for name, value in held.items()})


def _check_close(app: App, what: str, got: Float32s, expected: Float32s) -> None:
    worst = float(np.max(np.abs(got - expected) / np.maximum(1.0, np.abs(expected)), initial=0.0))
    if not worst <= TOLERANCE:
        raise UnsupportedModel(
            f"App {app.name} ({type(app.module).__name__}): {what} of the exported graph differ from torch's by "
            f"{worst:.1e}, expected at most {TOLERANCE:.0e}; please report the module, its export is wrong"
        )
