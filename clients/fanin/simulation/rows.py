"""The rows of a simulation: one for each Round, each client and Round, each error of a client, and each event.

Accuracies are shares from 0 to 1, losses are in nats, and times are seconds of the virtual clock.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Final

from fanin.edge.metrics.metric import INT8, OUR_VALUES
from fanin.edge.runtimes.evaluations import METRIC_UNIT, OF_TRAINING, OF_VALIDATIONS, largest_loss_count, quality_of
from fanin.edge.runtimes.quality import Quality
from fanin.protos import messages as m
from fanin.protos.plans import Plan
from fanin.server.aggregation.statistics import reported_examples, with_examples
from fanin.server.evaluation.metrics import VersionMetrics
from fanin.server.storage.records import CommittedUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """One Round.

    Attributes:
        seed: The seed of the simulation, which adds it to its rows.
        round: The number of the Round, from 1. Round 0 is the model before the first one.
        version: The Version that it published.
        time_s: Virtual time of the publication.
        num_clients: Clients whose Updates are in the Version.
        num_examples: Examples on which they trained.
        train_loss: Mean loss of their training over ``train_loss_examples``; NaN without one, as in Round 0.
        train_loss_examples: Examples of the clients that report a training loss. A client of a Flower app may report
            none.
        test_loss: Loss on the test data; NaN without test data.
        test_accuracy: Accuracy on the test data, in float; NaN without labels.
        test_accuracy_int8: The same for the int8 model that devices serve.
        bytes_down: Bytes that clients downloaded.
        bytes_up: Bytes that clients uploaded.
        validation_loss: Loss of the previous Version on the validation parts of its clients: the mean over the examples
            of the clients that report one. NaN if none does. With a Flower app, it is that of the row's own Version.
        validation_accuracy: Its accuracy there, in float; NaN without labels.
        validation_accuracy_int8: The same in int8.
        statistics: Sums of the Plan's ``[[statistics]]`` by name; NaN if no client reported one.
        means: The means of the statistics ``train.NAME`` and ``evaluate.NAME`` over the examples of the clients that
            report one. NaN if none does.
        metrics: The metrics of the Plan (``[[evaluation.metrics]]``) and of the settings on the test data: NAME in
            float, and NAME_int8 of the int8 model. NaN if the Version was not evaluated.
        strategy_metrics: The metrics that the Flower strategy of the Plan returned, as ``train.NAME`` and
            ``evaluate.NAME``. It has no columns, because each Round may have others.
        num_diverged: Clients whose loss reached the largest counted loss (docs/howto/results.md#diverged-clients).
            ``train_loss`` and ``validation_loss`` are then too small.
        num_saturated: Values of the Round's Updates that the Round's grid clipped, because they were out of its range.
        num_saturated_clients: Clients that lost more than 1 % of their values so.
        num_clamped: Values of the Version that were out of the range of their tensor by at most a step of the grid, and
            were set to the end of the range.
    """

    seed: int
    round: int
    version: int
    time_s: float
    num_clients: int
    num_examples: int
    train_loss: float
    train_loss_examples: int
    test_loss: float
    test_accuracy: float
    test_accuracy_int8: float
    bytes_down: int
    bytes_up: int
    validation_loss: float
    validation_accuracy: float
    validation_accuracy_int8: float
    statistics: Mapping[str, float]
    means: Mapping[str, float]
    metrics: Mapping[str, float]
    strategy_metrics: Mapping[str, float]
    num_diverged: int
    num_saturated: int
    num_saturated_clients: int
    num_clamped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationEvent:
    """One line of the event log: the action of a participant.

    The same arguments and seed give the same log. To replay a failed simulation, run it again with its seed.

    Attributes:
        seed: The seed of the simulation.
        time_s: Virtual time.
        client: The index of the client; None for the coordinator.
        event: What happened: one of ``DEVICE_EVENTS`` or ``COORDINATOR_EVENTS`` (docs/howto/devices.md lists them).
        round: The Round; 0 for none.
        detail: More about it, such as the text of an error.
    """

    seed: int
    time_s: float
    client: int | None
    event: str
    round: int
    detail: str = ""

    @property
    def line(self) -> str:
        """The event as one line of JSON."""
        return json.dumps(asdict(self))


EVALUATED: Final = "version evaluated"
"""The event of a Version that clients of a Flower app have evaluated. Its detail is ``evaluation_text``."""
OnEvent = Callable[[SimulationEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRow:
    """One client in one Round.

    Attributes:
        seed: The seed of the simulation.
        round: The Round.
        client: The index of the client in the partition.
        num_examples: Examples on which it trained.
        train_loss: Mean loss of its training; NaN if a Flower app reports none.
        num_validation_examples: Examples of its validation part; 0 if it does not evaluate.
        validation_loss: Loss of the Version that it received, on its own validation part; NaN if it reports none.
        validation_accuracy: Accuracy of that Version, in float; NaN without labels.
        seconds: Duration of its training on this machine.
        statistics: The Plan's ``[[statistics]]`` by name; NaN if the client did not report one.
        means: Of the statistics ``train.NAME`` and ``evaluate.NAME``, the means over its examples.
        has_diverged: Whether its training or validation loss is the largest one that is counted, or more.
        num_saturated: Values of its Update that the Round's grid clipped.
    """

    seed: int = 0
    round: int
    client: int
    num_examples: int
    train_loss: float
    num_validation_examples: int
    validation_loss: float
    validation_accuracy: float
    seconds: float
    statistics: Mapping[str, float]
    means: Mapping[str, float]
    has_diverged: bool
    num_saturated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFailure:
    """An error in the training of a client, or the refusal of its Update. It took no part in that Round.

    Attributes:
        seed: The seed of the simulation.
        round: The Round.
        client: The index of the client in the partition.
        error: The text of the error.
        traceback: Where it was raised, as Python prints it; empty for a refusal. With worker processes, it
            includes that of the worker.
    """

    seed: int = 0
    round: int
    client: int
    error: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"client {self.client} in round {self.round}: {self.error}"

    @property
    def place(self) -> tuple[str, ...]:
        """The lines of code that raised the error. Errors of one cause have one place, whatever their texts."""
        lines = (line.strip() for line in self.traceback.splitlines())
        return tuple(line for line in lines if line.startswith('File "'))


OnFailure = Callable[[ClientFailure], None]


def round_row(
    event: m.VersionPublished,
    time_s: float,
    num_clients: int,
    evaluation: VersionMetrics | None,
    names: Sequence[str] = (),
) -> RoundRow:
    """Return the row of a published Version.

    Args:
        event: The publication.
        time_s: Its virtual time.
        num_clients: Clients whose Updates are in it.
        evaluation: The Version on the test data; None without test data.
        names: The names of the Plan's statistics.
    """
    validation = event.evaluation
    return RoundRow(
        seed=0,
        round=event.round,
        version=event.number,
        time_s=time_s,
        num_clients=num_clients,
        num_examples=event.total_examples,
        train_loss=event.train_loss if event.train_loss_examples else math.nan,
        train_loss_examples=event.train_loss_examples,
        bytes_down=event.bytes_down,
        bytes_up=event.bytes_up,
        statistics=_reported(event.statistics, names),
        means=_means(event.statistics, names, event.statistics_examples),
        metrics=_further(evaluation),
        strategy_metrics=dict(event.strategy_metrics),
        num_diverged=0,
        num_saturated=event.num_saturated,
        num_saturated_clients=event.saturated.num_devices,
        num_clamped=event.num_clamped,
        **_tested(evaluation),
        **_validated(validation),
    )


def initial_row(evaluation: VersionMetrics | None, names: Sequence[str] = ()) -> RoundRow:
    """Return the row of the initial model, with its metrics on the test data."""
    return RoundRow(
        seed=0,
        round=0,
        version=0,
        time_s=0.0,
        num_clients=0,
        num_examples=0,
        train_loss=float("nan"),
        train_loss_examples=0,
        bytes_down=0,
        bytes_up=0,
        statistics=_reported({}, names),
        means=_means({}, names, {}),
        metrics=_further(evaluation),
        strategy_metrics={},
        num_diverged=0,
        num_saturated=0,
        num_saturated_clients=0,
        num_clamped=0,
        **_tested(evaluation),
        **_validated(None),
    )


def with_evaluation(row: RoundRow, following: RoundRow) -> RoundRow:
    """Return a row with the clients' evaluation of its own Version, which the row after it has."""
    names = [name for name in row.statistics if name.startswith(OF_VALIDATIONS)]
    return replace(
        row,
        validation_loss=following.validation_loss,
        validation_accuracy=following.validation_accuracy,
        statistics={**row.statistics, **{name: following.statistics[name] for name in names}},
        means={**row.means, **{name: following.means[name] for name in names}},
    )


def client_name(client: int) -> str:
    """Return the name of a client's device."""
    return f"client-{client}"


def client_of(device: str) -> int:
    """Return the client of a device's name."""
    return int(device.rpartition("-")[2])


def client_rows(updates: Iterable[CommittedUpdate], round_number: int, plan: Plan, num_classes: int) -> list[ClientRow]:
    """Return the rows of a Round's Updates, in the order of the clients.

    Args:
        updates: The Updates.
        round_number: The Round.
        plan: The Plan.
        num_classes: Number of classes of the model; 0 for a model of values and for a Flower app.
    """
    names, rows = [statistic.name for statistic in plan.statistics], []
    for update in updates:
        counts, telemetry = update.header.statistics.counts, update.header.telemetry
        quality = quality_of(counts)
        rows.append(
            ClientRow(
                round=round_number,
                client=client_of(update.device_id),
                num_examples=counts.get(m.TRAINED, counts[m.EXAMPLES]),
                train_loss=_train_loss(counts),
                num_validation_examples=quality.num_examples,
                validation_loss=_validation_loss(counts, quality),
                validation_accuracy=_accuracy(quality.num_correct_float, quality),
                seconds=telemetry.train_s,
                statistics=_reported(counts, names),
                means=_means(counts, names, reported_examples(with_examples(counts), names)),
                has_diverged=_has_diverged(counts, num_classes, plan.max_sum),
                num_saturated=counts.get(m.SATURATED, 0),
            )
        )
    return sorted(rows, key=lambda row: row.client)


def with_clients(row: RoundRow, clients: Sequence[ClientRow]) -> RoundRow:
    """Return the row of a Round with the number of diverged clients."""
    return replace(row, num_diverged=sum(client.has_diverged for client in clients))


def without_int8(row: RoundRow) -> RoundRow:
    """Return the row of a Round whose Bundle has no int8 model: its int8 numbers are NaN."""
    return replace(
        row,
        test_accuracy_int8=math.nan,
        validation_accuracy_int8=math.nan,
        metrics={name: math.nan if name.endswith(INT8) else value for name, value in row.metrics.items()},
    )


def cells(row: RoundRow | ClientRow) -> dict[str, float]:
    """Return the cells of a row by the name of the column.

    A statistic has the column ``statistics.NAME``, its mean the column ``means.NAME``, and a further metric the column
    ``metrics.NAME``.
    """
    columns: dict[str, float] = {}
    for each in (each for each in fields(row) if each.name != "strategy_metrics"):
        value = getattr(row, each.name)
        is_table = isinstance(value, Mapping)
        columns |= {f"{each.name}.{name}": item for name, item in value.items()} if is_table else {each.name: value}
    return columns


def _reported(counts: Mapping[str, int], names: Iterable[str]) -> dict[str, float]:
    return {name: counts.get(name, math.nan) for name in names}


def _means(counts: Mapping[str, int], names: Iterable[str], examples: Mapping[str, int]) -> dict[str, float]:
    """Return the means of the statistics that are sums over examples; NaN without a sum or without examples.

    Args:
        counts: The sums.
        names: The statistics of the Plan.
        examples: The number of examples of each sum.
    """
    return {
        name: counts[name] / METRIC_UNIT / examples[name] if examples.get(name) else math.nan
        for name in names
        if name.startswith((OF_TRAINING, *OF_VALIDATIONS))
    }


def _train_loss(counts: Mapping[str, int]) -> float:
    is_known = m.TRAIN_LOSS in counts and counts[m.EXAMPLES] > 0
    return counts[m.TRAIN_LOSS] / m.LOSS_UNIT / counts[m.EXAMPLES] if is_known else math.nan


def _validation_loss(counts: Mapping[str, int], quality: Quality) -> float:
    is_known = m.EVAL_LOSS in counts and quality.num_examples > 0
    return quality.loss_sum / quality.num_examples if is_known else math.nan


def _has_diverged(counts: Mapping[str, int], num_classes: int, max_sum: int) -> bool:
    """Return whether a device cut one of its losses to the largest count."""
    losses = ((m.TRAIN_LOSS, m.EXAMPLES), (m.EVAL_LOSS, m.EVAL_EXAMPLES))
    return any(
        counts.get(of, 0) > 0 and abs(counts.get(name, 0)) >= min(largest_loss_count(counts[of], num_classes), max_sum)
        for name, of in losses
    )


def _validated(evaluation: m.Evaluation | None) -> dict[str, float]:
    return {
        "validation_loss": math.nan if evaluation is None else evaluation.loss,
        "validation_accuracy": evaluation.accuracy_float if evaluation and evaluation.has_labels else math.nan,
        "validation_accuracy_int8": evaluation.accuracy_int8 if evaluation and evaluation.has_labels else math.nan,
    }


def _tested(evaluation: VersionMetrics | None) -> dict[str, float]:
    values = {} if evaluation is None else evaluation.values
    return {f"test_{name}": values.get(name, math.nan) for name in ("loss", "accuracy", "accuracy_int8")}


def _further(evaluation: VersionMetrics | None) -> dict[str, float]:
    values = {} if evaluation is None else evaluation.values
    return {name: value for name, value in values.items() if name not in OUR_VALUES}


def _accuracy(num_correct: int, quality: Quality) -> float:
    return num_correct / quality.num_predictions if quality.num_predictions else float("nan")
