"""The same with Flower's simulation on Ray: a ClientApp and a ServerApp of the Message API."""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from load import accuracy, arguments, arrays, module, report
from torch import nn

LOAD, FOLDER = arguments()
client_app, server_app = ClientApp(), ServerApp()
TIMES: list[float] = []


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the examples of one user, which the actor maps into memory."""
    user = int(context.node_config["partition-id"])
    x = torch.from_numpy(np.array(np.load(FOLDER / "x.npy", mmap_mode="r")[user]))
    y = torch.from_numpy(np.array(np.load(FOLDER / "y.npy", mmap_mode="r")[user])).long()
    net = module(LOAD.model)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=LOAD.learning_rate)
    for picked in torch.randperm(LOAD.samples).split(LOAD.batch_size):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(net(x[picked]), y[picked]))
        optimizer.step()
    metrics = MetricRecord({"num-examples": LOAD.samples})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


class TimedFedAvg(FedAvg):
    """FedAvg that notes when each round has ended."""

    def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
        """See Flower."""
        result = super().aggregate_train(server_round, replies)
        TIMES.append(time.perf_counter())
        return result


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Run all rounds without evaluation."""
    net = module(LOAD.model)
    share = LOAD.cohort / LOAD.users
    strategy = TimedFedAvg(
        fraction_train=share, fraction_evaluate=0.0, min_train_nodes=LOAD.cohort, min_available_nodes=LOAD.users
    )
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(net.state_dict()), num_rounds=LOAD.rounds)
    net.load_state_dict(result.arrays.to_torch_state_dict())
    report(np.diff(TIMES).tolist(), accuracy(net, arrays(FOLDER)))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=LOAD.users,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
