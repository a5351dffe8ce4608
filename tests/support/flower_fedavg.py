"""Flower's FedAvg on the given parameters, in Flower's own environment. This script does not import fanin.

    python flower_fedavg.py < INPUT > OUTPUT

INPUT is ``{"start": HEX, "rounds": [[[num_examples, CHANGE], ...], ...]}``. Arrays are hex of little-endian float32.
Each client of a round ends with the global parameters plus its change. Flower's strategy computes the next global
parameters from them. OUTPUT has Flower's version and the parameters after each round, by two functions:
``FedAvg.aggregate_train`` of the current ``flwr.serverapp``, and ``aggregate`` of ``flwr.server``.
"""

import json
import logging
import sys
from importlib.metadata import version

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.server.strategy.aggregate import aggregate
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity


def of_hex(text: str) -> np.ndarray:
    """Return the float32 array (num_values,)."""
    return np.frombuffer(bytes.fromhex(text), "<f4")


def reply(parameters: np.ndarray, num_examples: int) -> Message:
    """Return a client's reply to a message of the server."""
    asked = Message(RecordDict(), dst_node_id=1, message_type="train")
    metrics = MetricRecord({"num-examples": num_examples})
    return Message(RecordDict({"arrays": ArrayRecord([parameters]), "metrics": metrics}), reply_to=asked)


def by_strategy(ended: list[tuple[np.ndarray, int]], number: int) -> np.ndarray:
    """Average with the strategy of flwr.serverapp."""
    arrays, _ = FedAvg().aggregate_train(number, [reply(parameters, count) for parameters, count in ended])
    (found,) = arrays.to_numpy_ndarrays()
    return found


def by_function(ended: list[tuple[np.ndarray, int]], _number: int) -> np.ndarray:
    """Average with the function that the strategies of flwr.server call."""
    (found,) = aggregate([([parameters], count) for parameters, count in ended])
    return found


def main() -> None:
    """Read the input, and print the results."""
    logging.disable()
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    asked = json.load(sys.stdin)
    told: dict[str, object] = {"flwr": version("flwr")}
    for name, average in (("strategy", by_strategy), ("function", by_function)):
        parameters, found = of_hex(asked["start"]), []
        for number, clients in enumerate(asked["rounds"], start=1):
            ended = [(parameters + of_hex(change), count) for count, change in clients]
            parameters = average(ended, number).astype("<f4")
            found.append(parameters.tobytes().hex())
        told[name] = found
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
