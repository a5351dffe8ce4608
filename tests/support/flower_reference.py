"""Flower's own strategies around a ClientApp, in this process: the numbers to compare fanin with.

``FedAvg`` of ``flwr.serverapp`` sends its messages through a ``Grid`` that calls the app at once. For an app of
``client_fn``, ``FedAvg`` of ``flwr.server`` aggregates the results. The node ``i + 1`` is the client i, and its context
lives as long as the run.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import EvaluateIns, FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common.recorddict_compat import (
    evaluateins_to_recorddict,
    fitins_to_recorddict,
    recorddict_to_evaluateres,
    recorddict_to_fitres,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg as ListFedAvg
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

Metrics = dict[int, dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The results of Flower: the final arrays by name, and the metrics of each evaluation by round."""

    arrays: dict[str, np.ndarray]
    evaluations: Metrics = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A run of an app.

    Attributes:
        num_clients: Number of clients.
        num_rounds: Number of rounds.
        config: The entries of the ConfigRecord of each message.
        run_config: ``context.run_config``.
        evaluates: Whether the clients evaluate.
    """

    num_clients: int
    num_rounds: int
    config: Mapping[str, object]
    run_config: Mapping[str, object]
    evaluates: bool


class DirectGrid(Grid):
    """A Grid that calls an app with each message."""

    def __init__(self, app: ClientApp, contexts: Mapping[int, Context]) -> None:
        self._app, self._contexts = app, contexts

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *args: object, **kwargs: object) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def get_nodes(self) -> Iterable[NodeInfo]:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return [self._app(each, self._contexts[each.metadata.dst_node_id]) for each in messages]


def by_flower(
    app: ClientApp,
    arrays: ArrayRecord,
    setting: Setting,
) -> Reference:
    """Return the results of FedAvg over all clients.

    An app of ``client_fn`` also receives the number of the round as ``server_round`` and ``current_round``.
    """
    logging.getLogger("flwr").setLevel(logging.ERROR)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    contexts = {
        client + 1: Context(
            run_id=1,
            node_id=client + 1,
            node_config={"partition-id": client, "num-partitions": setting.num_clients},
            state=RecordDict(),
            run_config=dict(setting.run_config),  # type: ignore[arg-type]
        )
        for client in range(setting.num_clients)
    }
    if app._call is not None:
        return _by_lists(app, arrays, setting, contexts)
    strategy = FedAvg(fraction_evaluate=float(setting.evaluates), min_available_nodes=setting.num_clients)
    result = strategy.start(
        grid=DirectGrid(app, contexts),
        initial_arrays=arrays,
        num_rounds=setting.num_rounds,
        train_config=ConfigRecord(dict(setting.config)),  # type: ignore[arg-type]
        evaluate_config=ConfigRecord(dict(setting.config)),  # type: ignore[arg-type]
    )
    evaluations = {number: _numbers(metrics) for number, metrics in result.evaluate_metrics_clientapp.items()}
    return Reference(arrays={name: array.numpy() for name, array in result.arrays.items()}, evaluations=evaluations)


def _numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def _by_lists(
    app: ClientApp,
    arrays: ArrayRecord,
    setting: Setting,
    contexts: Mapping[int, Context],
) -> Reference:
    """Return the results of the strategy that aggregates lists of arrays."""

    def mean(results: list[tuple[int, dict[str, object]]]) -> dict[str, object]:
        total = sum(weight for weight, _ in results)
        names = results[0][1] if results else {}
        return {name: sum(weight * float(each[name]) for weight, each in results) / total for name in names}  # type: ignore[arg-type]

    strategy = ListFedAvg(fit_metrics_aggregation_fn=mean, evaluate_metrics_aggregation_fn=mean)  # type: ignore[arg-type]
    parameters, evaluations = ndarrays_to_parameters(arrays.to_numpy_ndarrays()), Metrics()
    proxies = {node: _Proxy(str(node)) for node in contexts}

    def replies(kind: str, content: RecordDict) -> list[tuple[int, RecordDict]]:
        messages = ((node, Message(content, dst_node_id=node, message_type=kind)) for node in contexts)
        return [(node, app(message, contexts[node]).content) for node, message in messages]

    for number in range(1, setting.num_rounds + 1):
        entries = {**setting.config, "server_round": number, "current_round": number}
        content = fitins_to_recorddict(FitIns(parameters, entries), keep_input=True)  # type: ignore[arg-type]
        results = [(proxies[node], recorddict_to_fitres(each, True)) for node, each in replies("train", content)]
        aggregate, _ = strategy.aggregate_fit(number, results, [])  # type: ignore[arg-type]
        assert aggregate is not None, "the clients have returned results"
        parameters = aggregate
        if not setting.evaluates:
            continue
        content = evaluateins_to_recorddict(EvaluateIns(parameters, entries), keep_input=True)  # type: ignore[arg-type]
        scores = [(proxies[node], recorddict_to_evaluateres(each)) for node, each in replies("evaluate", content)]
        loss, metrics = strategy.aggregate_evaluate(number, scores, [])  # type: ignore[arg-type]
        evaluations[number] = {"loss": float(loss or 0.0), **_numbers(metrics)}
    names = list(arrays)
    return Reference(arrays=dict(zip(names, parameters_to_ndarrays(parameters), strict=True)), evaluations=evaluations)


class _Proxy(ClientProxy):
    """The id of a client."""

    def get_properties(self, *args: object) -> object:  # type: ignore[override]
        raise NotImplementedError

    get_parameters = fit = evaluate = reconnect = get_properties  # type: ignore[assignment]
