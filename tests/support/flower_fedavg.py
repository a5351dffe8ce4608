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
    message = Message(RecordDict(), dst_node_id=1, message_type="train")
    metrics = MetricRecord({"num-examples": num_examples})
    return Message(RecordDict({"arrays": ArrayRecord([parameters]), "metrics": metrics}), reply_to=message)


def by_strategy(updates: list[tuple[np.ndarray, int]], number: int) -> np.ndarray:
    """Average with the strategy of flwr.serverapp."""
    arrays, _ = FedAvg().aggregate_train(number, [reply(parameters, count) for parameters, count in updates])
    (mean,) = arrays.to_numpy_ndarrays()
    return mean


def by_function(updates: list[tuple[np.ndarray, int]], _number: int) -> np.ndarray:
    """Average with the function that the strategies of flwr.server call."""
    (mean,) = aggregate([([parameters], count) for parameters, count in updates])
    return mean


def main() -> None:
    """Read the input, and print the results."""
    logging.disable()
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    data = json.load(sys.stdin)
    results: dict[str, object] = {"flwr": version("flwr")}
    for name, average in (("strategy", by_strategy), ("function", by_function)):
        parameters, averages = of_hex(data["start"]), []
        for number, clients in enumerate(data["rounds"], start=1):
            updates = [(parameters + of_hex(change), count) for count, change in clients]
            parameters = average(updates, number).astype("<f4")
            averages.append(parameters.tobytes().hex())
        results[name] = averages
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
