"""Messages, arrays and nodes of Flower, as a strategy sees them in its process.

Reference:
    Flower 1.41, ``flwr.serverapp.Grid`` and ``flwr.app.Message``.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.plans.entries import Setting
from fanin.protos.plans.flower import ROUND_NAMES, SERVER_ROUND
from fanin.server.aggregation.rules import Metrics, Reply

ARRAYS: Final = "arrays"
CONFIG: Final = "config"
METRICS: Final = "metrics"
MAX_LOOKS: Final = 4
"""Looks at the nodes in one call. Strategies of flwr look twice, and then once a second while they wait for more."""
MAX_SHOWN: Final = 5


class Unfit(Exception):
    """A strategy did what does not fit a Round. The text says what, after the name of the method."""


class RoundNodes(Grid):  # type: ignore[misc]  # flwr is not strictly typed
    """The nodes of a Round, of which a strategy may sample. The Plan selects devices, so nothing is sent to them.

    Args:
        num_nodes: Number of nodes.
    """

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._num_looks = 0

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids 1, 2, and so on."""
        self._num_looks += 1
        if self._num_looks > MAX_LOOKS:
            raise Unfit(
                f"it waits for more than the {self._num_nodes} nodes of a Round; lower min_train_nodes, "
                "min_evaluate_nodes and min_available_nodes in flower.strategy_options, or raise cohort.buffer"
            )
        return list(range(1, self._num_nodes + 1))

    def set_run(self, run: Run) -> None:
        """See Grid."""
        raise _no_messages()

    @property
    def run(self) -> Run:
        """See Grid."""
        raise _no_messages()

    def create_message(self, *args: object, **kwargs: object) -> Message:
        """See Grid."""
        raise _no_messages()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See Grid."""
        raise _no_messages()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Grid."""
        raise _no_messages()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """See Grid."""
        raise _no_messages()


def prepare_flower() -> None:
    """Give this process the identity without which flwr creates no messages, and silence the lines of each Round."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


def array_record(table: TensorTable, flat: Float32s) -> ArrayRecord:
    """Return parameters as an ArrayRecord."""
    return ArrayRecord({name: Array(np.asarray(values)) for name, values in table.views(flat).items()})


def config_record(config: Mapping[str, Setting]) -> ConfigRecord:
    """Return entries as a ConfigRecord."""
    return ConfigRecord({name: list(value) if isinstance(value, tuple) else value for name, value in config.items()})


def train_reply(table: TensorTable, reply: Reply, node: int) -> Message:
    """Return the message of a device after its training."""
    arrays, metrics = array_record(table, reply.parameters), MetricRecord(dict(reply.metrics))
    return _reply(RecordDict({ARRAYS: arrays, METRICS: metrics}), MessageType.TRAIN, node)


def evaluate_reply(metrics: Metrics, node: int) -> Message:
    """Return the message of a device after its evaluation."""
    return _reply(RecordDict({METRICS: MetricRecord(dict(metrics))}), MessageType.EVALUATE, node)


def check_messages(messages: Iterable[Message], arrays: ArrayRecord, config: Mapping[str, Setting], number: int) -> int:
    """Check that a strategy configures the devices as the Plan does. Return how many messages there are.

    Args:
        messages: Its messages.
        arrays: The arrays of the Version.
        config: The entries of the Plan.
        number: The number of the Round that the devices receive.

    Raises:
        Unfit: A message has other records, other arrays, or other entries of the config.
    """
    seen: set[int] = set()
    num_messages = 0
    for message in messages:
        num_messages += 1
        content = message.content
        # Strategies put one record into all messages.
        if id(content) not in seen:
            seen.add(id(content))
            _check_content(content, arrays, dict(config_record(config)), number)
    return num_messages


def _check_content(content: RecordDict, arrays: ArrayRecord, config: Mapping[str, object], number: int) -> None:
    if set(content) != {ARRAYS, CONFIG}:
        raise Unfit(f"its messages have the records {sorted(content)}, expected {ARRAYS!r} and {CONFIG!r}")
    sent, changed = content[ARRAYS], content[CONFIG]
    if sent is not arrays and (list(sent) != list(arrays) or any(sent[name] != arrays[name] for name in arrays)):
        raise Unfit("its messages have other arrays than those of the version, which the devices train")
    received = {**dict.fromkeys(ROUND_NAMES, number), **config}
    others = {name: value for name, value in changed.items() if name != SERVER_ROUND and received.get(name) != value}
    missing = sorted(config.keys() - changed.keys())
    if others or missing:
        name, value = next(iter(others.items()), (missing[0] if missing else "", None))
        raise Unfit(
            f"its messages have {name} = {value!r} in the config, but the plan configures the devices; set it in "
            "flower.config, for later Rounds in [[schedule]]"
        )


def checked_parameters(record: object, table: TensorTable) -> Float32s:
    """Return the arrays that a strategy returned as parameters (num_values,).

    Raises:
        Unfit: They are none, others, of another shape or dtype, or not finite.
    """
    if record is None:
        raise Unfit("returned no arrays (None), expected those of the next version")
    if not isinstance(record, ArrayRecord):
        raise Unfit(f"returned {type(record).__name__} as the arrays, expected an ArrayRecord")
    shapes = {spec.name: spec.shape for spec in table.specs}
    if set(record) != set(shapes):
        missing, added = sorted(shapes.keys() - set(record)), sorted(set(record) - shapes.keys())
        raise Unfit(
            f"returned {len(record)} arrays, {missing[:MAX_SHOWN]} missing and {added[:MAX_SHOWN]} new, expected the "
            f"{len(shapes)} of the version: it has a fixed layout, so a model that grows, such as trees, does not fit"
        )
    arrays = {name: record[name].numpy() for name in shapes}
    for name, value in arrays.items():
        if value.shape != shapes[name] or value.dtype.kind != "f":
            raise Unfit(
                f"returned the array {name!r} as {value.dtype} {value.shape}, expected floats {shapes[name]}: a "
                "version has a fixed layout, so a model that grows, such as trees, does not fit"
            )
        # A value beyond float32 becomes infinite here.
        with np.errstate(over="ignore"):
            arrays[name] = value.astype(np.float32)
        if not np.isfinite(arrays[name]).all():
            raise Unfit(f"returned NaN, infinity or values beyond float32 in the array {name!r}")
    return table.flatten(arrays)


def numbers_of(record: object, prefix: str) -> dict[str, float]:
    """Return the finite numbers of a MetricRecord, or none for None. Raises Unfit for another object."""
    if record is None:
        return {}
    if not isinstance(record, MetricRecord):
        raise Unfit(f"returned {type(record).__name__} as the metrics, expected a MetricRecord or None")
    numbers = {prefix + name: float(value) for name, value in record.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if np.isfinite(value)}


def _reply(content: RecordDict, kind: str, node: int) -> Message:
    return Message(content, reply_to=Message(RecordDict(), dst_node_id=node, message_type=kind))


def _no_messages() -> Unfit:
    return Unfit("it sends messages itself, but in a Round of fanin the Plan selects the devices; return them")
