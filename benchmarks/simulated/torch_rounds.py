"""FedAvg as a plain loop in torch: the least that a simulation costs without vectorization."""

import copy
import time

import numpy as np
import torch
from load import accuracy, arguments, arrays, module, report
from torch import nn


def main() -> None:
    """Run all rounds."""
    load, folder = arguments()
    data, net = arrays(folder), module(load.model).to(load.device)
    x, y = (torch.from_numpy(data[name]).to(load.device) for name in ("x", "y"))
    rng, seconds = np.random.default_rng(0), []
    for _ in range(load.rounds):
        began_s = time.perf_counter()
        sums = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
        for user in rng.choice(load.users, load.cohort, replace=False):
            local = copy.deepcopy(net)
            optimizer = torch.optim.SGD(local.parameters(), lr=load.learning_rate)
            for picked in torch.from_numpy(rng.permutation(load.samples)).split(load.batch_size):
                optimizer.zero_grad()
                torch.autograd.backward(nn.functional.cross_entropy(local(x[user, picked]), y[user, picked].long()))
                optimizer.step()
            for name, value in local.state_dict().items():
                sums[name] += value / load.cohort
        net.load_state_dict(sums)
        # On a GPU, the Round ends when it has done what it was told.
        next(net.parameters())[:1].cpu()
        seconds.append(time.perf_counter() - began_s)
    report(seconds[1:], accuracy(net, data))


if __name__ == "__main__":
    main()
