"""The ServerApp: FedAvg, training only. It writes the time at which each aggregation ended to a file."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class TimedFedAvg(FedAvg):
    """FedAvg that records the end of each aggregation."""

    def __init__(self, num_clients):
        super().__init__(
            fraction_evaluate=0.0,
            min_train_nodes=num_clients,
            min_evaluate_nodes=0,
            min_available_nodes=num_clients,
        )
        self.done_s = []

    def aggregate_train(self, server_round, replies):
        """Aggregate as FedAvg does. Raises RuntimeError if an update is missing."""
        replies = list(replies)
        if len(replies) != self.min_train_nodes or any(reply.has_error() for reply in replies):
            raise RuntimeError(f"got {len(replies)} replies, expected {self.min_train_nodes} good ones")
        aggregate = super().aggregate_train(server_round, replies)
        self.done_s.append(time.time())
        return aggregate


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds."""
    config = context.run_config
    strategy = TimedFedAvg(int(config["clients"]))
    initial = ArrayRecord([np.zeros(int(config["values"]), np.float32)])
    strategy.start(grid=grid, initial_arrays=initial, num_rounds=int(config["rounds"]))
    Path(config["out"]).write_text(json.dumps(strategy.done_s))
