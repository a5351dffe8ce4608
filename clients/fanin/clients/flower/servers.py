"""The initial arrays of a ServerApp: those of its first message. No client exists, and the ServerApp ends there.

    main(grid, context)  -->  strategy.start(initial_arrays)  -->  grid.send_and_receive(messages)  -->  _FirstMessages

A ServerApp of ``server_fn`` has them in its strategy.

Reference:
    Flower 1.41, ``flwr.serverapp.ServerApp`` and ``flwr.serverapp.Grid``.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Final

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.common import parameters_to_ndarrays
from flwr.server import SimpleClientManager
from flwr.serverapp import ServerApp
from flwr.supercore.task_identity import TaskIdentity

NUM_NODES: Final = 1024
"""Nodes that a strategy may sample. A strategy waits for as many as it needs."""


class _FirstMessages(BaseException):
    """Ends a ServerApp at its first messages. No ``except Exception`` of the app catches it."""

    def __init__(self, content: RecordDict | None) -> None:
        self.content = content


class _Grid:
    """A Grid with many nodes that raises the first messages. It has no run, and its nodes have no information."""

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """See Grid."""
        return Message(content, dst_node_id=dst_node_id, message_type=message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """See Grid."""
        return range(2, 2 + NUM_NODES)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Raise the messages."""
        raise _FirstMessages(next((each.content for each in messages), None))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """There are no replies."""
        return ()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Raise the messages."""
        raise _FirstMessages(next((each.content for each in messages), None))


def first_arrays(app: ServerApp, run_config: Mapping[str, object]) -> object:
    """Return the initial arrays of a ServerApp: an ArrayRecord, or a list of arrays.

    Args:
        app: The ServerApp. Its code runs until its first message.
        run_config: ``context.run_config``.

    Raises:
        TypeError: It sends no arrays, and its strategy has none.
    """
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=dict(run_config))
    if app._server_fn is not None:
        strategy = app._server_fn(context).strategy
        parameters = None if strategy is None else strategy.initialize_parameters(SimpleClientManager())
        if parameters is None:
            raise TypeError("its strategy has no initial_parameters; name the arrays with --initial")
        return parameters_to_ndarrays(parameters)
    # A message of a strategy has these ids.
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    log = logging.getLogger("flwr")
    level = log.level
    # Strategies report a federation that does not take place: its rounds, and the nodes that they sample.
    log.setLevel(logging.WARNING)
    try:
        app(_Grid(), context)
    except _FirstMessages as first:
        records: list[ArrayRecord] = [] if first.content is None else list(first.content.array_records.values())
        if len(records) == 1 and records[0]:
            return records[0]
        raise TypeError(
            f"its first message has {len(records)} ArrayRecords with arrays; name the arrays with --initial"
        ) from None
    finally:
        log.setLevel(level)
    raise TypeError("it sends no message; name the arrays with --initial")
