"""The Trainer of a Flower app: sent values, local values, and the checks of the app's results.

    arrays that travel    the Version's values go to the app in its own dtypes, and the Update is their change on the
                          Round's grid. An array that a reply lacks has not changed
    other arrays          stay on the device: the app gets back what it returned in its last Round that counted
    num-examples          the weight of the Update
    metrics               declared statistics ``train.NAME`` and ``evaluate.NAME``: value x num-examples, in 2^-16
    context.state         stays on the device, with the lifetime of the state of stages

The app receives no batch sizes and no epochs from the Plan. It reads its ``run_config`` and the ConfigRecord.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.storage.seeds import app_seed
from fanin.clients.device.updates import Change
from fanin.clients.flower.states import AppStates, FlowerState
from fanin.clients.flower.task import AppFailed, ConfigValue, FlowerReply, FlowerRunner, FlowerTask, Number
from fanin.edge.bundles.arrays import MAX_WHOLE, ArrayLayout, read_layout
from fanin.edge.bundles.manifest import NO_GRAPHS
from fanin.edge.runtimes.evaluations import OF_TRAINING, OF_VALIDATION, metric_count
from fanin.edge.tensors import Array, Float32s
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput
from fanin.protos.plans.flower import ROUND_NAMES, SERVER_ROUND
from fanin.protos.texts import counted, listed

LOG = logging.getLogger("fanin.clients")
LOSSES: Final = ("train_loss", "eval_loss", "loss")
"""Metrics that are also the Round's own loss; the first that an app reports."""
MAX_SHOWN: Final = 5


class FlowerTrainer:
    """A Trainer that calls a Flower app. See Trainer.

    Args:
        runner: Runs the app. Its warnings are logged.
        states: What the app keeps between Rounds.
        partition: Index of the device's data, a part of the seed in a simulation.
        log: Receives each warning once.
    """

    graph_format = NO_GRAPHS

    def __init__(
        self,
        runner: FlowerRunner,
        states: AppStates,
        partition: int = 0,
        log: Callable[[str], None] = LOG.warning,
    ) -> None:
        self._runner = runner
        self._states = states
        self._partition = partition
        self._log = log
        self._warned: set[str] = set()
        for text in runner.warnings:
            self._warn(text)

    @property
    def runtime(self) -> str:
        """The library and its version."""
        return self._runner.name

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """Let the app evaluate the Version and train it. See Trainer.

        Raises:
            Interrupted: ``should_continue`` raised it.
            InvalidInput: The app raised an error, or its result does not fit the Bundle.
            StorageFull: The app's state cannot be stored.
        """
        layout = read_layout(model.bundle)
        self._warn_of_local(layout)
        state = self._states.get(assignment, FlowerState(local=layout.local))
        views = model.bundle.manifest.table.views(model.parameters)
        task = self._task(model, assignment, layout.complete(views, state.local), state.context)
        reply = self._runner.run(task, should_continue)
        _check_arrays(task.arrays, reply.arrays, layout)
        if missing := [name for name in task.arrays if name not in reply.arrays]:
            self._warn(f"the app returns no {listed(missing)}: these arrays do not change")
        values = _difference({name: (reply.arrays.get(name, view), view) for name, view in views.items()}, model)
        counts = self._counts(reply, assignment)
        # Last: a training that fails leaves no trace.
        local = {name: reply.arrays.get(name, state.local[name]) for name in layout.local}
        self._states.put(assignment, FlowerState(context=reply.state, local=local))
        return Change(values=values, counts=counts)

    def evaluate(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> dict[str, int]:
        """Let the app evaluate a Version with the state that the Assignment names. Return its statistics.

        Raises:
            Interrupted: ``should_continue`` raised it.
            InvalidInput: The app raised an error, or its result is invalid.
        """
        layout = read_layout(model.bundle)
        state = self._states.get(assignment, FlowerState(local=layout.local))
        arrays = layout.complete(model.bundle.manifest.table.views(model.parameters), state.local)
        task = replace(self._task(model, assignment, arrays, state.context), config=None)
        reply = self._runner.run(task, should_continue)
        if reply.evaluation.problem:
            raise AppFailed(reply.evaluation.problem, code="FN-0905")
        return self._counts(reply, assignment)

    def _task(
        self, model: OpenedModel, assignment: m.Assignment, arrays: Mapping[str, Array], state: bytes
    ) -> FlowerTask:
        return FlowerTask(
            run_id=assignment.run_id,
            round=assignment.round,
            seed=app_seed(model, assignment, self._partition),
            config=config_of(assignment, assignment.round),
            # As in Flower, the Version of Round 1 is evaluated in round 1. Flower never evaluates the initial arrays.
            evaluate_config=config_of(assignment, max(1, assignment.version.number)),
            arrays=arrays,
            state=state,
        )

    def _counts(self, reply: FlowerReply, assignment: m.Assignment) -> dict[str, int]:
        """Return the statistics of a reply."""
        training, evaluation = reply.training, reply.evaluation
        num_examples = _whole_number("train", training.num_examples)
        counts = {m.EXAMPLES: num_examples}
        if (loss := self._loss(OF_TRAINING, training.metrics)) is not None:
            counts[m.TRAIN_LOSS] = metric_count(loss, num_examples)
        if evaluation.problem:
            self._warn(f"an evaluation is left out: {evaluation.problem}")
        num_evaluated = _whole_number("evaluate", evaluation.num_examples)
        if num_evaluated:
            counts[m.EVAL_EXAMPLES] = num_evaluated
            if (loss := self._loss(OF_VALIDATION, evaluation.metrics)) is not None:
                counts[m.EVAL_LOSS] = metric_count(loss, num_evaluated)
        metrics = {OF_TRAINING + name: (value, num_examples) for name, value in training.metrics.items()}
        metrics |= {OF_VALIDATION + name: (value, num_evaluated) for name, value in evaluation.metrics.items()}
        declared = {statistic.name for statistic in assignment.statistics}
        for name, (value, weight) in metrics.items():
            if name in declared and math.isfinite(value):
                counts[name] = metric_count(value, weight)
            elif name in declared:
                self._warn(f"metric {name}: got {value}, expected a finite number; it is left out")
        losses = {OF_TRAINING + _loss_in(training.metrics), OF_VALIDATION + _loss_in(evaluation.metrics)}
        if others := sorted(set(metrics) - declared - losses):
            self._warn(f"metrics without [[statistics]] of these names in the plan are not sent: {listed(others)}")
        if others := sorted({*training.others, *evaluation.others}):
            self._warn(f"texts, bytes and ConfigRecords of a reply are not sent: {listed(others)}")
        return counts

    def _loss(self, prefix: str, metrics: Mapping[str, Number]) -> Number | None:
        """Return the loss that the app reports under one of its usual names; None without a finite one."""
        metric = _loss_in(metrics)
        if not metric:
            return None
        if not math.isfinite(metrics[metric]):
            self._warn(f"metric {prefix}{metric}: got {metrics[metric]}, expected a finite loss; it is left out")
            return None
        return metrics[metric]

    def _warn_of_local(self, layout: ArrayLayout) -> None:
        if layout.local:
            kinds = [f"{name} ({value.dtype})" for name, value in layout.local.items()]
            self._warn(f"arrays that do not travel: {listed(kinds)}")

    def _warn(self, text: str) -> None:
        """Log a warning once: it would be the same in each Round."""
        if text not in self._warned:
            self._warned.add(text)
            self._log(text)


def _loss_in(metrics: Mapping[str, Number]) -> str:
    """Return the name of the metric that is the loss; "" if there is none."""
    return next((each for each in LOSSES if each in metrics), "")


def config_of(assignment: m.Assignment, number: int) -> dict[str, ConfigValue]:
    """Return the entries of the ConfigRecord of an Assignment, with a number of the round."""
    config: dict[str, ConfigValue] = {}
    if assignment.training.learning_rate:
        config["lr"] = assignment.training.learning_rate
    config |= dict.fromkeys(ROUND_NAMES, number)
    for name, value in assignment.flower.config.items():
        config[name] = list(value) if isinstance(value, tuple) else value
    return config | {SERVER_ROUND: number}


def _check_arrays(sent: Mapping[str, Array], returned: Mapping[str, Array], layout: ArrayLayout) -> None:
    """Raise AppFailed unless an app returned arrays of the message, in their shapes and with values that they can have.

    As in Flower, a float may have another dtype than in the message, because numpy computes with the larger one.
    """
    if not returned or set(returned) - set(sent):
        missing, added = sorted(set(sent) - set(returned)), sorted(set(returned) - set(sent))
        raise AppFailed(
            f"flower app: returned {counted(len(returned), 'array')}, {missing[:MAX_SHOWN]} missing and "
            f"{added[:MAX_SHOWN]} new, expected the {len(sent)} of the message; correct train",
            code="FN-0910",
        )
    for name, after in returned.items():
        before = sent[name]
        is_same = after.dtype == before.dtype or (name not in layout.local and after.dtype.kind in "iuf")
        if not is_same or after.shape != before.shape:
            raise AppFailed(
                f"flower app: array {name!r}: returned {after.dtype} {after.shape}, expected {before.dtype} "
                f"{before.shape} as in the message; correct train. The arrays of a Run have fixed shapes "
                "(docs/howto/flower.md#the-arrays)",
                code="FN-0910",
            )
        if after.dtype.kind == "f" and not np.isfinite(after).all():
            raise AppFailed(
                f"flower app: array {name!r}: returned NaN or infinity, expected finite values; lower the learning "
                "rate",
                code="FN-0911",
            )
        if name not in layout.local and before.dtype.kind in "iu" and (number := _unfit(after)) is not None:
            raise AppFailed(
                f"flower app: array {name!r}: returned {number}, expected whole numbers up to {MAX_WHOLE}, because it "
                f"is {before.dtype} and travels as float32; correct train, or keep it on the device with fanin bundle "
                "--keep",
                code="FN-0910",
            )


def _unfit(values: Array) -> object:
    """Return a value that is not whole, or that float32 may round; None if there is none."""
    exact = values.astype(np.float64)
    wrong = values[(exact != np.rint(exact)) | (np.abs(exact) > MAX_WHOLE)]
    return wrong[0] if wrong.size else None


def _difference(pairs: Mapping[str, tuple[Array, Float32s]], model: OpenedModel) -> Float32s:
    """Return the change of the parameters (num_values,): computed in float64, rounded once to float32."""
    # A change beyond float32 becomes infinite here, and is refused.
    with np.errstate(over="ignore"):
        changes = {
            name: (after.astype(np.float64) - before).astype(np.float32) for name, (after, before) in pairs.items()
        }
    if bad := sorted(name for name, change in changes.items() if not np.isfinite(change).all()):
        raise InvalidInput(
            f"flower app: the change of {bad[:MAX_SHOWN]} exceeds float32; lower the learning rate", code="FN-0911"
        )
    return model.bundle.manifest.table.flatten(changes)


def _whole_number(kind: str, number: Number) -> int:
    """Return ``num-examples`` as an integer. Raises AppFailed unless it is an integer from 0 to 2^40."""
    if not math.isfinite(number) or number != int(number) or not 0 <= number <= m.MAX_COUNT:
        raise AppFailed(
            f"flower app: {kind}: got num-examples {number}, expected a whole number from 0 to {m.MAX_COUNT}",
            code="FN-0909",
        )
    return int(number)
