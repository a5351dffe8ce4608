"""Training on a device: local SGD on its own examples, and the int8 model's validation.

FedAvg's client (McMahan et al. 2017, arXiv 1602.05629, algorithm 1, ClientUpdate): some epochs over the local
examples in batches, in an order that is drawn anew each epoch. The batch size is the Bundle's. The seed comes
from (seed, partition, round), so a device that begins again after a crash ends in the same bits.

Before it trains, a device evaluates the Version that it was given on its validation part: in float, and as the
int8 model that it would serve; what it tells are sums over examples, never examples.
"""

import math
import time
from importlib.metadata import version

import numpy as np

from fanin.clients.data import ExampleStore, batches, batches_in_order
from fanin.clients.models import OpenedModel
from fanin.clients.updates import TrainingOutcome
from fanin.edge.runtimes.base import Runtime, TrainState
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m


class RuntimeTrainer:
    """The Trainer over a runtime and a device's examples."""

    graph_format = "onnx"

    def __init__(self, runtime: Runtime, store: ExampleStore) -> None:
        self._runtime = runtime
        self._store = store

    @property
    def runtime(self) -> str:
        """The library and its version."""
        return self._runtime.name

    def train(self, model: OpenedModel, assignment: m.Assignment, bytes_downloaded: int) -> TrainingOutcome:
        """Validate the Version, then run local SGD from it."""
        started_s = time.monotonic()
        counts = self._evaluate(model)
        step = self._runtime.open_train(model.bundle)
        plan, batch_size = assignment.training, model.bundle.manifest.batch_size
        rng = np.random.default_rng(np.random.SeedSequence((plan.seed, self._store.partition, assignment.round)))
        state = TrainState(parameters=model.parameters, momentum=np.zeros_like(model.parameters))
        loss_sum, num_steps = 0.0, 0
        for _ in range(plan.epochs):
            for batch in batches(self._store.train, batch_size, rng):
                state, loss = step(state, batch, plan.learning_rate)
                if not np.isfinite(loss):
                    raise ValueError(
                        f"loss became {loss} after {num_steps + 1} steps, expected a finite one; "
                        f"lower the learning rate ({plan.learning_rate:g})"
                    )
                loss_sum += loss * float(batch.mask.sum())
                num_steps += 1
        counts |= {
            m.EXAMPLES: len(self._store.train.y),
            m.TRAIN_LOSS: round(loss_sum / plan.epochs * m.LOSS_UNIT),
        }
        telemetry = m.Telemetry(
            runtime=self._runtime.name,
            train_s=time.monotonic() - started_s,
            num_steps=num_steps,
            bytes_downloaded=bytes_downloaded,
            fanin_version=version("fanin"),
        )
        return TrainingOutcome(change=_change(state.parameters, model.parameters), counts=counts, telemetry=telemetry)

    def _evaluate(self, model: OpenedModel) -> dict[str, int]:
        examples = self._store.validation
        evaluate = self._runtime.open_evaluate(model.bundle)
        loss_sum, chosen = 0.0, []
        for batch in batches_in_order(examples, model.bundle.manifest.batch_size):
            found = evaluate(model.parameters, batch)
            loss_sum += found.loss_sum
            chosen.append(found.predicted[batch.mask > 0])
        if not math.isfinite(loss_sum):
            raise ValueError(
                f"the Version's loss is not finite on the validation part (got {loss_sum}), expected a number; "
                "its parameters diverged, or this device's data does not fit"
            )
        in_float = np.concatenate(chosen)
        in_int8 = self._runtime.open_predict(model.bundle, model.parameters)(examples.x).argmax(axis=1)
        return {
            m.EVAL_EXAMPLES: len(examples.y),
            m.EVAL_LOSS: round(loss_sum * m.LOSS_UNIT),
            m.EVAL_CORRECT_FLOAT: int((in_float == examples.y).sum()),
            m.EVAL_CORRECT_INT8: int((in_int8 == examples.y).sum()),
            m.EVAL_AGREE: int((in_float == in_int8).sum()),
        }


def _change(after: Float32s, before: Float32s) -> Float32s:
    """What training changed; exact in float64, rounded once."""
    return (after.astype(np.float64) - before).astype(np.float32)
